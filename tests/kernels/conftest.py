"""Kernels run in processes of their own under Triton's interpreter, which is chosen when Triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def interpret():
    """Run one of `programs/` under the interpreter; gives what it printed."""
    pytest.importorskip("triton", reason="Triton has no build for this platform")

    def run(program: str, *arguments: str) -> str:
        command = [sys.executable, "-W", "error", str(Path(__file__).parent / "programs" / program), *arguments]
        finished = subprocess.run(
            command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600
        )
        assert finished.returncode == 0, finished.stderr[-4000:]
        return finished.stdout

    return run
