"""The norms, which the backward pass makes again, against PyTorch's, also with weights that stand in for a call only."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from atlas_hf.modeling.memory_layer import HeadRMSNorm
from atlas_hf.modeling.modeling_atlas import AtlasRMSNorm


@pytest.mark.parametrize("kind", [AtlasRMSNorm, HeadRMSNorm])
@pytest.mark.parametrize("gated", [False, True])
def test_gradients_by_the_weights_of_the_forward_pass(kind, gated):
    if gated and kind is AtlasRMSNorm:
        pytest.skip("only the heads' norm has a gate")
    torch.manual_seed(0)
    norm = kind(8, 1e-6).double()
    x, weight, gate = (torch.randn(n, dtype=torch.float64, requires_grad=True) for n in ((3, 8), (8,), (3, 8)))
    y = functional_call(norm, {"weight": weight}, (x, gate) if gated else (x,))
    expected = F.rms_norm(x, (8,), weight, 1e-6) * (F.silu(gate) if gated else 1)
    torch.testing.assert_close(y, expected)
    leaves = (x, weight, gate) if gated else (x, weight)
    seed = torch.randn_like(y)
    for mine, wanted in zip(
        torch.autograd.grad(y, leaves, seed), torch.autograd.grad(expected, leaves, seed), strict=True
    ):
        torch.testing.assert_close(mine, wanted)
