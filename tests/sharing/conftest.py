"""A small model with a tokenizer, and clients of a Hub or of a folder in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from atlas_hf import AtlasConfig, AtlasForCausalLM
from atlas_hf.sharing.remote_code import CLASSES
from atlas_hf.training.tokenizer import train_tokenizer

# In such a process importing the package fails, as where it is not installed.
WITHOUT_PACKAGE = "import sys\nsys.modules['atlas_hf'] = None\n"
SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(autouse=True)
def _registration_is_undone(monkeypatch):
    for kind in CLASSES.values():
        monkeypatch.setattr(kind, "_auto_class", None)


@pytest.fixture
def tokenizer():
    return train_tokenizer(["the rain had stopped before the coach came"], 260)


@pytest.fixture
def tiny_model():
    def make(**overrides) -> AtlasForCausalLM:
        torch.manual_seed(0)
        fields = {"vocab_size": 260, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        fields |= {"num_attention_heads": 2, "chunk_size": 4, "feature_rank": 3, "initializer_range": 0.3}
        fields |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
        return AtlasForCausalLM(AtlasConfig.atlas(**{**fields, **overrides})).eval()

    return make


@pytest.fixture
def ids():
    return torch.randint(3, 250, (2, 11), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def client(tmp_path):
    """Runs a program in a process of its own, with empty caches in `home`; returns what it printed."""

    def run(program, *arguments, environment=(), home="home", fails=False, installed=True):
        own = tmp_path / home
        variables = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(own), "HF_MODULES_CACHE": str(own / "modules")}
        variables |= {"PYTHONPATH": str(SOURCE)} if installed else {}
        finished = subprocess.run(
            [sys.executable, "-c", ("" if installed else WITHOUT_PACKAGE) + program, *map(str, arguments)],
            env={**os.environ, **variables, **dict(environment)},
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert (finished.returncode != 0) is fails, finished.stderr[-4000:]
        return finished.stderr if fails else finished.stdout

    return run
