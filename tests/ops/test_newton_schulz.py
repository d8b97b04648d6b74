"""Newton-Schulz on matrices and in token space."""

import pytest
import torch
from problems import make_problem

from atlas_hf.ops import chunk_atlas, naive_atlas, newton_schulz, newton_schulz_factors, step_atlas


def textbook(matrix, steps=5, coefficients=(3.4445, -4.7750, 2.0315), eps=1e-7):
    """The quintic, step by step on the matrix itself."""
    a, b, c = coefficients
    x = matrix / (matrix.square().sum((-2, -1), keepdim=True) + eps**2).sqrt()
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + b * (gram @ x) + c * (gram @ gram @ x)
    return x


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6), (1, 7)])
@pytest.mark.parametrize("steps", [0, 1, 5, 7])
def test_equals_the_textbook_iteration(shape, steps):
    matrix = torch.randn(3, *shape, dtype=torch.float64)
    torch.testing.assert_close(newton_schulz(matrix, steps), textbook(matrix, steps), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(newton_schulz(matrix.mT, steps), newton_schulz(matrix, steps).mT, rtol=1e-10, atol=1e-10)


def test_singular_values_come_near_one():
    values = torch.linalg.svdvals(newton_schulz(torch.randn(4, 16, 40, dtype=torch.float64)))
    assert 0.6 < values.min() < values.max() < 1.3


@pytest.mark.parametrize(("tokens", "out", "inner"), [(3, 8, 11), (12, 8, 11), (23, 64, 50)])
def test_token_space_equals_matrices(tokens, out, inner):
    e, x = torch.randn(2, tokens, out, dtype=torch.float64), torch.randn(2, tokens, inner, dtype=torch.float64)
    factors = newton_schulz_factors(e @ e.mT, x @ x.mT)
    torch.testing.assert_close(e.mT @ factors @ x, textbook(e.mT @ x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_a_norm_too(dtype):
    """The floor of the norm, and squares of large numbers, lie outside float16."""
    torch.manual_seed(0)
    matrix = torch.randn(2, 4, 6)
    matrix[0] = 0
    y = newton_schulz((matrix * 1000).to(dtype))
    assert y.dtype == dtype
    assert not y[0].any()
    torch.testing.assert_close(y.float(), newton_schulz(matrix), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("in_batch", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_gives_zero_with_finite_gradients(in_batch, dtype):
    matrix = torch.zeros(2, 4, 6, dtype=dtype)
    if in_batch:
        matrix[1] = torch.randn(4, 6, dtype=dtype)
    matrix.requires_grad_()
    y = newton_schulz(matrix)
    assert not y[0].any()
    (grad,) = torch.autograd.grad(y.square().sum() + y.sum(), matrix)
    assert grad.isfinite().all()

    e = torch.zeros(2, 5, 4, dtype=dtype)
    if in_batch:
        e[1] = torch.randn(5, 4, dtype=dtype)
    e.requires_grad_()
    x = torch.randn(2, 5, 6, dtype=dtype, requires_grad=True)
    y = e.mT @ newton_schulz_factors(e @ e.mT, x @ x.mT) @ x
    assert not y[0].any()
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.square().sum() + y.sum(), (e, x)))


@pytest.mark.parametrize("form", [chunk_atlas, naive_atlas])
@pytest.mark.parametrize("momentum", ["restart", "carry"])
def test_a_sequence_that_writes_nothing_keeps_the_memory(form, momentum):
    """Zero gates and zero errors reach Newton-Schulz as zero matrices."""
    from problems import make_problem

    p = make_problem("mlp", tokens=9)
    p.gates["gamma"] = torch.zeros_like(p.gates["gamma"])
    leaves = p.leaves()
    y, state = p.run(form, rule="muon", momentum=momentum, output_errors="anchored")
    assert not state["matrix_0"].any()
    grads = torch.autograd.grad(y.sum(), list(leaves.values()), allow_unused=True)
    assert all(g is None or g.isfinite().all() for g in grads)


def test_token_space_survives_terms_that_cancel():
    """Errors that nearly cancel: single precision's Gram matrices have no polynomial that stays finite, double's have."""
    torch.manual_seed(0)
    x = torch.nn.functional.normalize(torch.randn(64, 1, 24) + 1e-2 * torch.randn(64, 11, 24), dim=-1)
    e = torch.randn(64, 1, 16) * torch.tensor([1.0, -1.0] * 5 + [0.0])[:, None]
    e = e + 1e-3 * torch.randn_like(e.expand(-1, 11, -1))
    single = newton_schulz_factors(e @ e.mT, x @ x.mT)
    assert not single.isfinite().all() or single.abs().max() > 1e8
    e, x = e.requires_grad_(), x.requires_grad_()
    factors = newton_schulz_factors(e.double() @ e.double().mT, x.double() @ x.double().mT)
    result = e.double().mT @ factors @ x.double()
    torch.testing.assert_close(result, textbook(e.double().mT @ x.double()), rtol=1e-4, atol=1e-4)
    assert all(g.isfinite().all() for g in torch.autograd.grad(result.square().sum(), (e, x)))


@pytest.mark.parametrize("form", [chunk_atlas, step_atlas])
@pytest.mark.parametrize("output_errors", ["exact", "anchored"])
def test_float32_muon_survives_values_that_contradict_each_other(form, output_errors):
    """One key, values of alternating sign: the momentum's terms cancel again and again."""
    problem = make_problem("gated", window=4, tokens=64, batch=4, key_dim=16, hidden=32, rank=4, dtype=torch.float32)
    problem.k = torch.nn.functional.normalize(problem.k[:, :1] + 1e-4 * problem.k, dim=-1)
    sign = torch.tensor([1.0, -1.0]).repeat(32)[None, :, None, None]
    problem.v = problem.v[:, :1] * sign + 1e-4 * problem.v
    problem.gates["log_theta"] = problem.gates["log_theta"] * 1e-3
    leaves = problem.leaves()
    options = {"rule": "muon", "momentum": "restart", "output_errors": output_errors, "chunk_size": 8}
    y, _ = problem.run(form, **options)
    assert y.isfinite().all()
    assert y.abs().max() < 100 * problem.v.abs().max()
    for name, grad in zip(leaves, torch.autograd.grad(y.sum(), list(leaves.values()), allow_unused=True), strict=True):
        assert grad is None or grad.isfinite().all(), name
