"""fla's modules are the model's own functions: results, gradients, and a whole model with them. Run by `test_interpreted.py`.

They tune themselves, for which Triton asks a driver; `cpu_driver` is one that answers and measures nothing.
"""

import warnings

import cpu_driver
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from atlas_hf import AtlasConfig, AtlasForCausalLM
from atlas_hf.modeling import dispatch
from atlas_hf.modeling.linear_loss import linear_cross_entropy
from atlas_hf.modeling.memory_layer import HeadRMSNorm
from atlas_hf.modeling.modeling_atlas import AtlasMLP, AtlasRMSNorm
from atlas_hf.modeling.short_convolution import ShortConvolution

cpu_driver.activate()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what fla itself uses
    from atlas_hf.kernels import fla_modules

TINY = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 32, "feature_rank": 3}


@pytest.fixture
def fused(monkeypatch):
    """The dispatch as on a GPU: fla's modules unless PyTorch's are asked for, and a count of the times they were."""
    calls = []

    def select(kernels, like):
        if kernels == "torch":
            return None
        calls.append(kernels)
        return fla_modules

    for module in ("linear_loss", "memory_layer", "modeling_atlas", "short_convolution"):
        monkeypatch.setattr(f"atlas_hf.modeling.{module}.select_fused", select)
    return calls


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def spread(module):
    """Weights that no two elements share."""
    with torch.no_grad():
        for n, parameter in enumerate(module.parameters()):
            parameter.copy_(1 + 0.5 * normal(*parameter.shape, seed=10 + n))
    return module


def outcomes(module, *tensors, **arguments):
    """Result and the gradients by every tensor and parameter."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    y = module(*leaves, **arguments)
    y = y[0] if isinstance(y, tuple) else y
    weights = normal(*y.shape, seed=1).to(y.dtype)
    return y, *torch.autograd.grad((y * weights).sum(), leaves + list(module.parameters()))


def assert_same(module, *tensors, **arguments):
    """float32: to rounding. bfloat16: at most twice as far from float64 as PyTorch's own, whose roundings are more."""
    mine = outcomes(module, *tensors, kernels="auto", **arguments)
    torchs = outcomes(module, *tensors, kernels="torch", **arguments)
    for a, b in zip(mine, torchs, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * b.abs().max().clamp_min(1).item())
    half = tuple(x.bfloat16() for x in tensors)
    exact = outcomes(module.double(), *(x.double() for x in half), kernels="torch", **arguments)
    mine = outcomes(module.bfloat16(), *half, kernels="auto", **arguments)
    torchs = outcomes(module, *half, kernels="torch", **arguments)
    for a, b, c in zip(mine, torchs, exact, strict=True):
        assert a.dtype == b.dtype
        scale = c.abs().max()
        assert (a - c).abs().max() <= 2 * (b - c).abs().max() + 2**-9 * scale


@pytest.mark.parametrize("tokens", [1, 9])
def test_norm(fused, tokens):
    assert_same(spread(AtlasRMSNorm(24, 1e-6)), normal(2, tokens, 24))
    assert fused


def test_gated_norm(fused):
    module = spread(HeadRMSNorm(12, 1e-6))
    x, gate = normal(2, 5, 3, 12), normal(2, 5, 3, 12, seed=2)
    assert_same(module, x, gate)
    assert fused
    # As in a model in half precision: the memory's output is float32
    half = [module(x, gate.bfloat16(), torch.bfloat16, kernels) for kernels in ("auto", "torch")]
    assert {y.dtype for y in half} == {torch.bfloat16}
    torch.testing.assert_close(*half, rtol=2**-6, atol=2**-8)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("with_tail", [False, True])
def test_short_convolution(fused, width, with_tail):
    module = spread(ShortConvolution(24, width))
    tail = normal(2, width - 1, 24, seed=3) if with_tail else None
    lengths = torch.tensor([7, 3])
    assert_same(module, normal(2, 7, 24), tail=tail, lengths=lengths)
    assert fused
    x = normal(2, 7, 24)
    module = module.float()
    for a, b in zip(module(x, tail, lengths, "auto"), module(x, tail, lengths, "torch"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_swiglu(fused):
    assert_same(
        spread(AtlasMLP(AtlasConfig(hidden_size=16, intermediate_size=24, num_attention_heads=2))), normal(2, 5, 16)
    )
    assert fused
    del fused[:]
    module = AtlasMLP(AtlasConfig(hidden_size=16, intermediate_size=24, num_attention_heads=2, hidden_act="gelu"))
    module(normal(2, 5, 16), "auto")
    assert not fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_cross_entropy(fused, dtype):
    head = nn.Linear(24, 50, bias=False)
    targets = torch.arange(21).view(3, 7) % 50
    targets[0, 2:4] = -100
    for more in ({}, {"num_items_in_batch": 5}):
        seen = []
        for kernels, cast in (("auto", dtype), ("torch", dtype), ("torch", torch.float64)):
            x = normal(3, 7, 24, dtype=dtype).to(cast).requires_grad_()
            loss = linear_cross_entropy(head.to(dtype).to(cast), x, targets, kernels=kernels, **more)
            seen.append([loss, *torch.autograd.grad(loss, [x, head.weight])])
        for a, b, c in zip(*seen, strict=True):
            assert a.dtype == b.dtype
            floor = {torch.float32: 1e-6, torch.bfloat16: 2**-9}[dtype] * c.abs().max()
            assert (a - c).abs().max() <= 2 * (b - c).abs().max() + floor
    assert fused


def test_a_model_with_them(fused):
    """Loss, gradients, padded rows, a cache and decoding."""
    torch.manual_seed(0)
    model = AtlasForCausalLM(AtlasConfig.omeganet(**TINY, initializer_range=0.3)).eval()
    ids = torch.randint(3, 32, (2, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    seen = []
    for kernels in ("auto", "torch"):
        model.config.kernels = kernels
        model.zero_grad()
        loss = model(ids, labels=ids).loss + model(ids, attention_mask=mask, labels=ids).loss
        loss = loss + model(ids, labels=ids, skip_logits=True).loss
        loss.backward()
        with torch.no_grad():
            first = model(ids[:, :6], use_cache=True)
            second = model(ids[:, 6:9], cache=first.cache)
            third = model(ids[:, 9:10], cache=second.cache)
        logits = torch.cat([x.logits for x in (first, second, third)], 1)
        seen.append([loss.detach(), logits, *(p.grad for p in model.parameters())])
    assert set(fused) == {"auto"}
    assert len(fused) > 20
    for a, b in zip(*seen, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().clamp_min(1).item())


def test_what_is_left_out_is_another_function():
    """Near zero, at the model's epsilon, l2norm is smaller."""
    from fla.modules.norm.l2norm import l2norm

    x = torch.full((1, 4), 5e-4)
    assert (l2norm(x, eps=1e-6) - F.normalize(x, dim=-1, eps=1e-6)).abs().max() > 0.1


def test_dispatch_gives_them_on_a_gpu_only():
    assert dispatch.select_fused("auto", torch.ones(1)) is None
    assert dispatch.select_fused("triton", torch.ones(1)) is None
