"""A model with a tokenizer in a folder, and a working directory with the data of the tasks in `tasks/`."""

import pytest
import torch
from local_tasks import TRAINED_AT, sentences, write_data

from atlas_hf import AtlasConfig, AtlasForCausalLM
from atlas_hf.training.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer([sentences(2000, 0)], 300)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = AtlasConfig.atlas(
        **{"vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"chunk_size": 4, "feature_rank": 4, "initializer_range": 0.2, "max_position_embeddings": TRAINED_AT},
        **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1},
    )
    AtlasForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def working_directory(tmp_path, monkeypatch):
    """An empty folder with the tasks' data in it, where the tasks look for them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_data(tmp_path, shuffled=False)
    return tmp_path
