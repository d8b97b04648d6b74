"""A tiny model and tiny data for running other people's training tools on it."""

import pytest
import torch
from training_checks import TINY, VOCAB
from transformers import TrainingArguments

from atlas_hf import AtlasConfig, AtlasForCausalLM


@pytest.fixture(scope="session")
def tiny_model():
    """`tiny_model()`: the same weights at every call; fields of the configuration can be overridden."""

    def make(seed: int = 0, **fields) -> AtlasForCausalLM:
        torch.manual_seed(seed)
        return AtlasForCausalLM(AtlasConfig.atlas(**{**TINY, **fields}))

    return make


@pytest.fixture(scope="session")
def random_rows():
    """`random_rows(lengths)`: a list of token ids for every length."""

    def make(lengths, seed: int = 1) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]

    return make


@pytest.fixture
def arguments(tmp_path):
    """`TrainingArguments` for a quiet run on the CPU without checkpoints, with what a test changes."""

    def make(kind=TrainingArguments, **changes):
        quiet = {
            "output_dir": str(tmp_path / "trainer"),
            "max_steps": 3,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "seed": 0,
        }
        return kind(**{**quiet, **changes})

    return make
