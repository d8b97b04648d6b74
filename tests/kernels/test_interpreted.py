"""The kernels on a CPU: Triton interprets them where it was told so before its import, hence in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = sorted((Path(__file__).parent / "programs").glob("check_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_checks_pass(program):
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", program],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-2000:]
