"""Triton's Newton-Schulz in token space equals PyTorch's, result and gradients. Run by `test_interpreted.py`."""

import pytest
import torch
from problems import make_problem

from atlas_hf.kernels import newton_schulz as kernel
from atlas_hf.modeling import recurrence_step
from atlas_hf.modeling.newton_schulz import newton_schulz_factors
from atlas_hf.ops import step_atlas

DOUBLE = torch.float64
# One token, the tiles' edges from both sides, and sizes of the presets.
TOKENS = (1, 11, 16, 17, 33, 64)


def grams(tokens, shared=3, rows=2, dtype=DOUBLE, width=24):
    """Gram matrices of `shared` errors for each of `rows` inputs."""
    generator = torch.Generator().manual_seed(tokens)
    e = torch.randn(rows, shared, tokens, width, generator=generator, dtype=DOUBLE)
    x = torch.randn(rows, 1, tokens, width, generator=generator, dtype=DOUBLE)
    return (e @ e.mT).to(dtype), (x @ x.mT).to(dtype)


def result_and_gradients(form, gram_e, gram_x, steps=5):
    leaves = gram_e.detach().requires_grad_(), gram_x.detach().requires_grad_()
    result = form(*leaves, steps)
    weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(0), dtype=DOUBLE).to(result.dtype)
    return result.detach(), *torch.autograd.grad((result * weights).sum(), leaves)


def assert_equal(actual, expected, bound=1e-10):
    for mine, other in zip(actual, expected, strict=True):
        assert mine.shape == other.shape
        scale = other.abs().max().clamp_min(1e-30)
        torch.testing.assert_close(mine / scale, other / scale, rtol=0, atol=bound)


@pytest.mark.parametrize("tokens", TOKENS)
def test_equal_in_double_precision(tokens):
    # Five steps lift the rounding of faded directions 485-fold
    assert_equal(
        result_and_gradients(kernel.newton_schulz_factors, *grams(tokens)),
        result_and_gradients(newton_schulz_factors, *grams(tokens)),
    )


@pytest.mark.parametrize("tokens", [33, 64])
def test_widest_tiles_without_gradients(tokens):
    assert_equal([kernel.newton_schulz_factors(*grams(tokens))], [newton_schulz_factors(*grams(tokens))])


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_any_number_of_steps(steps):
    assert_equal(
        result_and_gradients(kernel.newton_schulz_factors, *grams(7), steps),
        result_and_gradients(newton_schulz_factors, *grams(7), steps),
    )


@pytest.mark.parametrize("tokens", [11, 19, 33])
def test_single_precision_is_as_good_as_pytorchs(tokens):
    exact = result_and_gradients(newton_schulz_factors, *grams(tokens))
    single = grams(tokens, dtype=torch.float32)
    mine = result_and_gradients(kernel.newton_schulz_factors, *single)
    torchs = result_and_gradients(newton_schulz_factors, *single)
    for a, b, c in zip(mine, torchs, exact, strict=True):
        scale = c.abs().max()
        assert (a - c).abs().max() / scale <= 2 * (b - c).abs().max() / scale + 1e-6


def test_terms_that_cancel_and_zero():
    """Two writes of which the second takes back the first, all but; and nothing at all: the norm's floor holds."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, 6, 24, generator=generator, dtype=DOUBLE).repeat(1, 1, 2, 1)
    e = torch.randn(1, 1, 6, 24, generator=generator, dtype=DOUBLE)
    e = torch.cat([e, -e + 1e-6 * torch.randn(e.shape, generator=generator, dtype=DOUBLE)], 2)
    for factor in (e, 0 * e):
        pair = factor @ factor.mT, x @ x.mT
        assert all(torch.isfinite(part).all() for part in result_and_gradients(kernel.newton_schulz_factors, *pair))
        # One step: what is left of such a sum is its terms' rounding, lifted a thousandfold by each
        torchs = result_and_gradients(newton_schulz_factors, *pair, 1)
        assert_equal(result_and_gradients(kernel.newton_schulz_factors, *pair, 1), torchs, 1e-7)


@pytest.mark.parametrize("leading", [((), ()), ((2, 3), (3,)), ((3,), (2, 3)), ((2, 1, 3), (2, 4, 1))])
def test_leading_axes_are_broadcast(leading):
    generator = torch.Generator().manual_seed(0)
    e, x = (torch.randn(*shape, 5, 9, generator=generator, dtype=DOUBLE) for shape in leading)
    pair = e @ e.mT, x @ x.mT
    assert_equal(*(result_and_gradients(f, *pair) for f in (kernel.newton_schulz_factors, newton_schulz_factors)))


def test_no_problems():
    e, x = torch.zeros(0, 2, 5, 5), torch.zeros(0, 1, 5, 5)
    assert [part.shape for part in result_and_gradients(kernel.newton_schulz_factors, e, x)] == [
        e.shape,
        e.shape,
        x.shape,
    ]


def test_refusals():
    with pytest.raises(ValueError, match="65 tokens, the kernel's tiles hold 64"):
        kernel.newton_schulz_factors(torch.eye(65), torch.eye(65))
    with pytest.raises(ValueError, match=r"float32 or float64, got torch.bfloat16"):
        kernel.newton_schulz_factors(torch.eye(2).bfloat16(), torch.eye(2).bfloat16())


@pytest.mark.filterwarnings("ignore:.*bytes.*is deprecated:DeprecationWarning")
def test_the_operators_keep_pytorchs_rules():
    gram_e, gram_x = (g.flatten(0, 1) for g in grams(5))
    for keep in (False, True):
        arguments = gram_e.requires_grad_(keep), gram_x.requires_grad_(keep), 2, [3.0, -4.0, 2.0], 1e-7, keep
        checks = ("test_schema", "test_faketensor", "test_autograd_registration")
        torch.library.opcheck(torch.ops.atlas_hf.newton_schulz_factors, arguments, test_utils=checks)


@pytest.mark.parametrize("memory", ["mlp", "gated"])
def test_decoding_uses_it(monkeypatch, memory):
    called = []
    # As under "auto" where the step has no kernel
    monkeypatch.setattr(recurrence_step, "select_step", lambda *a, **widths: None)
    original = kernel.newton_schulz_factors
    monkeypatch.setattr(kernel, "newton_schulz_factors", lambda *a: called.append(1) or original(*a))
    problem = make_problem(memory, tokens=6, dtype=torch.float32)
    options = {"rule": "muon", "momentum": "restart"}
    y, state = problem.run(step_atlas, kernels="triton", **options)
    assert called
    count = len(called)
    wanted, wanted_state = problem.run(step_atlas, **options)
    assert len(called) == count
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-6)
    for name, value in wanted_state.items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-5)
