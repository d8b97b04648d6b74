"""What the checks of kernels share; the recurrence's problems are those of its own tests."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "ops"))


@pytest.fixture(autouse=True)
def _poisoned():
    """Uninitialised memory holds NaN, so that what a kernel leaves unwritten is seen."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
