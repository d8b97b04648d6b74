"""Gradients are by the weights of the forward pass, also where the modules hold others by the time of the backward pass."""

import pytest
import torch
from torch.func import functional_call

from atlas_hf import AtlasConfig, AtlasForCausalLM

TINY = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 32, "chunk_size": 4}


@pytest.mark.parametrize("preset", ["atlas", "omeganet"])
@pytest.mark.parametrize("skip_logits", [False, True])
def test_functional_call(preset, skip_logits):
    config = getattr(AtlasConfig, preset)(**TINY, feature_rank=3, initializer_range=0.3)
    model, other = AtlasForCausalLM(config).double(), AtlasForCausalLM(config).double()
    ids = torch.randint(3, 32, (2, 11))
    given = {"input_ids": ids, "labels": ids, "skip_logits": skip_logits, "use_cache": False}
    names = [name for name, _ in model.named_parameters()]
    # No weight like another's, the starts that are the same in every model among them
    weights = {n: (p + 0.1 * torch.randn_like(p)).detach().requires_grad_() for n, p in other.named_parameters()}
    loss = functional_call(model, weights, kwargs=given).loss
    borrowed = torch.autograd.grad(loss, [weights[n] for n in names])
    other.load_state_dict(weights)
    own = torch.autograd.grad(other(**given).loss, [dict(other.named_parameters())[n] for n in names])
    assert all(g.abs().max() > 0 for g in own)
    for name, mine, wanted in zip(names, borrowed, own, strict=True):
        torch.testing.assert_close(mine, wanted, msg=name)
