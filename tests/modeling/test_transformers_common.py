"""transformers' own common tests, of exactly the installed version, on the Atlas classes (`transformers_common.py`)."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest
import transformers

# The source distribution has the mixins, but not these modules that they import.
EMPTY = ("__init__.py", "generation/__init__.py", "exporters/__init__.py", "utils/__init__.py")
STAND_INS = {
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "utils/test_configuration_utils.py": (
        'config_common_kwargs = {"return_dict": False, "output_hidden_states": True, "dtype": "float16", '
        '"output_attentions": True, "chunk_size_feed_forward": 5, "architectures": ["AtlasModel"], '
        '"id2label": {0: "label"}, "label2id": {"label": "0"}, "problem_type": "regression"}\n'
    ),
}


def fetch(folder: Path) -> None:
    """The `tests` package of the installed transformers' source distribution, from the registry that pip uses.

    Raises:
        OSError, subprocess.SubprocessError: the registry cannot be reached.
    """
    requirement = f"transformers=={transformers.__version__}"
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "transformers"]
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        subprocess.run([*download, "--dest", work, requirement], check=True, capture_output=True, timeout=180)
        (archive,) = Path(work).glob("transformers-*.tar.gz")
        with tarfile.open(archive) as tar:
            members = [m for m in tar if m.isfile() and re.match(r"[^/]+/tests/test_\w+\.py$", m.name)]
            tar.extractall(work, members=members, filter="data")
        (tests,) = Path(work).glob("*/tests")
        for name, text in {**dict.fromkeys(EMPTY, ""), **STAND_INS}.items():
            (tests / name).parent.mkdir(exist_ok=True)
            (tests / name).write_text(text)
        (tests.parent / "pytest.ini").write_text("[pytest]\n")
        # Whole or not at all: another process may be doing the same.
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(tests.parent, folder)


@pytest.mark.slow
def test_transformers_common_tests(request):
    folder = request.config.cache.mkdir(f"transformers-tests-{transformers.__version__}") / "source"
    if not (folder / "tests" / "test_modeling_common.py").exists():
        try:
            fetch(folder)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"TRANSFORMERS' OWN TESTS DID NOT RUN: its source distribution cannot be fetched ({error})")
    source = Path(__file__).parents[2] / "src"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--disable-warnings", "-rf"]
    command += ["-c", str(folder / "pytest.ini"), str(Path(__file__).with_name("transformers_common.py"))]
    path = os.pathsep.join([str(folder), str(source), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    print(done.stdout[-6000:], done.stderr[-2000:])
    assert done.returncode == 0
    counted = re.search(r"(\d+) passed", done.stdout)
    assert counted
    assert int(counted[1]) >= 75, "fewer of transformers' tests ran than there are"
