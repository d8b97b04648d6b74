"""Small models whose memory is at work, so that tests of equality can fail.

Weights are large, gates differ from token to token, and the chunk and window are short: a token three chunks back moves the
last logits (`test_cache.py` checks it for every variant). Exactness is tested in float64, where rounding cannot hide a fault.
"""

import pytest
import torch
from transformers import DynamicCache

from atlas_hf import AtlasConfig, AtlasForCausalLM

SMALL = {
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "chunk_size": 4,
    "omega_window": 3,
    "muon_interval": 1,
    "feature_rank": 3,
    "initializer_range": 0.6,
    "pad_token_id": 0,
    "eos_token_id": None,
}

PRESETS = ("atlas", "atlas_plus_plus", "omeganet", "titans")

WINDOWED = {"omega_window": 2, "feature_degree": 2}
RESTARTED = {"omega_window": 3, "momentum": "restart", "feature_degree": 2}

# Preset and what is changed in it: together they use every value of every choice.
VARIANTS = {
    **{name: (name, {}) for name in PRESETS},
    # As the preset is, with chunks in which Muon writes at two of eight tokens
    "shipped": ("atlas", {"chunk_size": 8, "omega_window": 4, "muon_interval": 4}),
    "degree_four": ("atlas_plus_plus", {"feature_degree": 4, "feature_rank": 2, "muon_interval": 2}),
    "anchored": ("atlas", {"output_errors": "anchored", "muon_interval": 2}),
    "dense": ("atlas", {"output_errors": "anchored", "momentum": "carry", "newton_schulz_steps": 3}),
    "gated_dense": ("atlas_plus_plus", {"momentum": "carry", "decay_to": "zero"}),
    "gated_gd": ("titans", {"memory": "gated", "output_errors": "anchored", "memory_expansion": 1, **WINDOWED}),
    "linear": ("omeganet", {"memory": "linear", "decay_to": "zero"}),
    "linear_muon": ("atlas", {"memory": "linear", "output_errors": "anchored", "conv_kernel_size": 2}),
    # Without normalisation the memory diverges at higher rates.
    "plain_step": ("titans", {"inner_norm": False, "learning_rate_init": 0.02, "initializer_range": 0.3, **RESTARTED}),
    "hebbian": ("omeganet", {"inner_loss": "dot", "feature_degree": 1, "feature_rank": None, "residual_scale": 0.5}),
    "wide_window": ("atlas", {"omega_window": 5, "chunk_size": 3, "conv_kernel_size": 1}),
    "per_token": ("omeganet", {"chunk_size": 1, "momentum": "carry"}),
    "full_features": ("atlas", {"feature_degree": 3, "feature_rank": 5, "head_dim": 5, "tie_word_embeddings": True}),
}


@pytest.fixture(params=VARIANTS)
def variant(request) -> str:
    return request.param


@pytest.fixture(params=PRESETS)
def preset(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def small_config():
    def make(variant: str = "atlas", **overrides) -> AtlasConfig:
        name, changes = VARIANTS[variant]
        small = dict(SMALL)
        if name == "titans":
            del small["omega_window"]
            if "feature_degree" not in changes:
                del small["feature_rank"]
        return getattr(AtlasConfig, name)(**{**small, **changes, **overrides})

    return make


@pytest.fixture(scope="session")
def small_model(small_config):
    def make(variant: str = "atlas", dtype=torch.float64, seed: int = 0, **overrides) -> AtlasForCausalLM:
        torch.manual_seed(seed)
        return AtlasForCausalLM(small_config(variant, **overrides)).to(dtype).eval()

    return make


@pytest.fixture(scope="session")
def random_ids():
    def make(batch: int, num_tokens: int, seed: int = 1) -> torch.Tensor:
        return torch.randint(3, 67, (batch, num_tokens), generator=torch.Generator().manual_seed(seed))

    return make


@pytest.fixture(scope="session")
def logits_in_pieces():
    """`[B, T, vocab]` from calls on `sizes` tokens each, with the cache they leave."""

    @torch.no_grad()
    def run(model, ids, sizes, cache=None, mask=None):
        cache = DynamicCache(config=model.config) if cache is None else cache
        pieces, seen = [], 0
        for size in sizes:
            part = None if mask is None else mask[:, : seen + size]
            pieces.append(model(ids[:, seen : seen + size], attention_mask=part, cache=cache).logits)
            seen += size
        assert seen == ids.shape[1]
        return torch.cat(pieces, 1), cache

    return run


@pytest.fixture(scope="session")
def assert_equal_logits():
    """Equal to rounding in float64."""

    def check(actual, expected):
        torch.testing.assert_close(actual, expected, atol=1e-7, rtol=1e-7)

    return check
