"""One thread, fixed seeds, no network, and accelerator tests only where there is an accelerator."""

import importlib.metadata
import importlib.util
import os

# Before the first import of torch or of a Hugging Face library, which read these once.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from transformers import set_seed

from hub_server import LoopbackHub


def pytest_configure(config):
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skipif(True, reason="needs an accelerator"))


@pytest.fixture(autouse=True)
def _seeded():
    set_seed(0)


@pytest.fixture
def hub():
    """An empty Hub on loopback. Its clients are processes of their own: this one reads the real address at import."""
    with LoopbackHub() as running:
        yield running


@pytest.fixture(scope="session")
def fla_naive():
    """Loads one of flash-linear-attention's naive oracles, e.g. `fla_naive("gla")` for `fla/ops/gla/naive.py`.

    By file path, because importing the package `fla.ops` needs Triton, and these files need torch and einops only.
    """
    package = importlib.metadata.distribution("fla-core")

    def load(op: str):
        path = package.locate_file(f"fla/ops/{op}/naive.py")
        spec = importlib.util.spec_from_file_location(f"fla_naive_{op}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
