"""Every page of `docs/` does what it says: its blocks run in the order of the page, as a reader would type them.

`python` blocks of a page share one process; `bash` blocks run between them, in the same working directory, and stop at the
first error. A block whose fence names a file (```yaml train.yaml) becomes that file. Blocks of other languages are for
reading only. The Hub is one on loopback, with an empty cache.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^```(?P<language>\w+)(?: (?P<file>[\w./-]+))?\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
PREAMBLE = """\
import pathlib as _pathlib, subprocess as _subprocess

def _bash(text):
    _subprocess.run(["bash", "-euo", "pipefail", "-c", text], check=True)

def _file(name, text):
    _pathlib.Path(name).parent.mkdir(parents=True, exist_ok=True)
    _pathlib.Path(name).write_text(text, encoding="utf-8")
"""


def program_of(page: str) -> str:
    """One Python program that does what the page's blocks say; a failing line carries its block's language and number."""
    steps = [PREAMBLE]
    for block in BLOCK.finditer(page):
        if block["file"]:
            steps.append(f"_file({block['file']!r}, {block['text']!r})")
        elif block["language"] == "python":
            steps.append(block["text"])
        elif block["language"] == "bash":
            steps.append(f"_bash({block['text']!r})")
    return "\n".join(steps)


def run_page(page: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess:
    program = folder / "page.py"
    program.write_text(program_of(page), encoding="utf-8")
    work = folder / "work"
    work.mkdir()
    # The environment's own commands first, whether or not it is activated.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **environment, "PATH": path, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [sys.executable, program], cwd=work, env=environment, capture_output=True, text=True, timeout=600
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_page(page, tmp_path, hub):
    text = page.read_text(encoding="utf-8")
    assert any(block["language"] in ("python", "bash") for block in BLOCK.finditer(text)), "nothing on the page runs"
    finished = run_page(text, tmp_path, hub.environment(tmp_path / "hf"))
    assert finished.returncode == 0, f"{finished.stdout[-3000:]}\n{finished.stderr[-6000:]}"


def test_blocks_run_in_order_and_share_one_process(tmp_path):
    page = (
        "```text notes/a.txt\nfirst\n```\n```python\nseen = open('notes/a.txt').read()\n```\n"
        "```bash\nprintf second > b.txt\n```\n```yaml\nnever: run\n```\n```python\nprint(seen + open('b.txt').read())\n```\n"
    )
    finished = run_page(page, tmp_path, {})
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "first\nsecond\n"


@pytest.mark.parametrize("block", ["```python\nassert 1 == 2\n```", "```bash\nfalse\ntrue\n```"])
def test_a_failing_block_fails_the_page(tmp_path, block):
    assert run_page(block + "\n", tmp_path, {}).returncode != 0
