"""Rules of the repository that no other tool keeps."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LONGEST_FILE = 450
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|X" r"XX)\b|NotImplemented" r"Error")


def python_files(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", sorted((ROOT / "src/atlas_hf/modeling").glob("*.py")), ids=lambda path: path.name)
def test_files_that_travel_with_checkpoints_import_flat_siblings_only(path):
    """Transformers copies remote code by a regular expression: nothing but `from .sibling import name` survives it."""
    text = path.read_text(encoding="utf-8")
    siblings = {p.stem for p in path.parent.glob("*.py")}
    for module in re.findall(r"^\s*from\s+(\.\S*)\s+import", text, re.MULTILINE):
        assert re.fullmatch(r"\.\w+", module), module
        assert module[1:] in siblings
    assert not re.search(r"^\s*import\s+\.", text, re.MULTILINE)
    guarded = re.sub(r"^( *)try:\n(\1 +.*\n)+", "", text, flags=re.MULTILINE)
    assert not re.search(r"^\s*(from|import)\s+atlas_hf", guarded, re.MULTILINE)


def test_modeling_is_flat():
    folders = [p for p in (ROOT / "src/atlas_hf/modeling").iterdir() if p.is_dir() and p.name != "__pycache__"]
    assert folders == []


def test_files_stay_short_and_finished():
    for path in python_files("src", "tests", "benchmarks"):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= LONGEST_FILE, f"{path} has {len(lines)} lines"
        for number, line in enumerate(lines, 1):
            assert not UNFINISHED.search(line), f"{path}:{number}: {line.strip()}"


def test_importing_the_package_needs_neither_triton_nor_fla():
    """PyTorch itself imports Triton where it is installed: here importing it fails, and nothing of ours asks for it."""
    program = "import sys; sys.modules |= {'triton': None, 'fla': None}; import atlas_hf, atlas_hf.ops; "
    program += "print([name for name in sys.modules if name.startswith(('atlas_hf.kernels', 'triton.', 'fla.'))])"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert finished.stdout == "[]\n"


def test_the_readme_runs(tmp_path):
    """Every Python block of the README, one after the other in one process, as a reader would paste them."""
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert blocks
    program = tmp_path / "readme.py"
    program.write_text("\n".join(blocks), encoding="utf-8")
    finished = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
