"""What `atlas-hf info` prints against the model itself: parameters, bytes of the cache, operations counted by PyTorch."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from transformers import DynamicCache

from atlas_hf import AtlasConfig, AtlasForCausalLM
from atlas_hf.modeling import newton_schulz
from atlas_hf.modeling.configuration_atlas import PRESETS
from atlas_hf.modeling.model_statistics import flops_per_token, memory_shapes, parameter_count, state_bytes


def bytes_of(cache) -> int:
    """While decoding, the tokens' public buffers are views of one tensor."""
    total = 0
    for layer in cache.layers:
        tokens = layer.states.get("step_tokens")
        for state in layer.states.values():
            if state is tokens or tokens is None or not shares_storage(state, tokens):
                total += state.numel() * state.element_size()
    return total


def shares_storage(a, b) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_parameters(small_config, variant):
    for overrides in ({}, {"tie_word_embeddings": True, "conv_kernel_size": 3, "num_hidden_layers": 1}):
        config = small_config(variant, **overrides)
        assert parameter_count(config) == sum(p.numel() for p in AtlasForCausalLM(config).parameters())


@pytest.mark.parametrize("size", ["170M", "340M", "760M", "1.3B"])
def test_parameters_of_the_papers_sizes(preset, size):
    config = getattr(AtlasConfig, preset)(size)
    with torch.device("meta"):
        model = AtlasForCausalLM(config)
    assert parameter_count(config) == sum(p.numel() for p in model.parameters())


def test_memory_shapes(small_config, small_model, variant):
    weights = small_model(variant).model.layers[0].memory.memory_weights
    assert memory_shapes(small_config(variant)) == [tuple(w.shape[1:]) for w in weights]


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 3])
def test_state(small_model, random_ids, variant, batch):
    model, ids = small_model(variant, dtype=torch.float32), random_ids(batch, 12)
    cache = DynamicCache(config=model.config)
    model(ids[:, :11], cache=cache)
    assert bytes_of(cache) == batch * state_bytes(model.config, decoding=False)
    model(ids[:, 11:], cache=cache)
    assert bytes_of(cache) == batch * state_bytes(model.config)


@torch.no_grad()
def test_operations(small_model, random_ids, variant, monkeypatch):
    monkeypatch.setattr(newton_schulz, "EVEN", 1)  # products with zeros are no part of the count
    model = small_model(variant, dtype=torch.float32, hidden_size=32, intermediate_size=64)
    num_tokens = 4 * model.config.chunk_size
    # PyTorch counts `baddbmm` but not its form in place
    in_place = {torch.ops.aten.baddbmm_: lambda _, a, b, **_kwargs: flop_registry[torch.ops.aten.bmm](a, b)}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        model(random_ids(1, num_tokens), use_cache=True)  # the last chunk too is written to the end
    assert flops_per_token(model.config) == pytest.approx(counter.get_total_flops() / num_tokens, rel=0.12)


def test_the_default_state_fits():
    """The 340M model's state stays under 64 MiB in float32, decoding included."""
    for name in PRESETS:
        assert state_bytes(getattr(AtlasConfig, name)("340M")) < 64 * 2**20, name
