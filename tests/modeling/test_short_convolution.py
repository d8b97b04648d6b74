"""The short convolution's ways to compute: shifted sums and PyTorch's depthwise convolution, the same function."""

import pytest
import torch
import torch.nn.functional as F

from atlas_hf.modeling.short_convolution import ShortConvolution


@pytest.fixture
def module():
    torch.manual_seed(0)
    module = ShortConvolution(24, 4)
    module.reset_parameters(torch.nn.init)
    return module


def by_hand(module, x):
    w = module.weight[:, 0].double()
    x = F.pad(x.double(), (0, 0, 3, 0))
    return F.silu(torch.stack([(x[:, t : t + 4] * w.T).sum(1) for t in range(x.shape[1] - 3)], 1))


@pytest.mark.parametrize("length", [1, 2, 17])
@pytest.mark.parametrize("gradients", [True, False])
def test_equals_the_sum_over_the_last_tokens(module, length, gradients):
    x = torch.randn(3, length, 24)
    with torch.set_grad_enabled(gradients):
        y, tail = module(x)
    torch.testing.assert_close(y.double(), by_hand(module, x), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(tail, F.pad(x, (0, 0, 3, 0))[:, -3:])


@pytest.mark.parametrize("autocast", [True, False])
@torch.no_grad()
def test_keeps_the_wider_precision(module, autocast):
    """Half-precision inputs with float32 weights, as under autocast: nothing is rounded, whether by text or by token."""
    x = torch.randn(2, 9, 24).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        y, _ = module(x)
        pieces, tail = [], None
        for t in range(9):
            piece, tail = module(x[:, t : t + 1], tail)
            pieces.append(piece)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), by_hand(module, x), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(torch.cat(pieces, 1), y, atol=1e-6, rtol=1e-5)
