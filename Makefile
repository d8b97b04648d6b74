# Every target makes its own virtual environment first; nothing else needs to be installed but Python 3.11 or later.
#   make test VENV=.venv-other     another environment
#   make demo TORCH=torch          another build of PyTorch than the one the project is tested with
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
RUN ?= runs/demo

BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint format clean

$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed, found " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	touch $@

# Waiting threads sleep: on a machine that does something else too, spinning ones slow every operation many times over.
demo: $(READY)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/atlas-hf demo --output $(RUN) --overwrite

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache
