"""Triton's solution of unit lower-triangular systems equals PyTorch's. Run by `test_interpreted.py`."""

import pytest
import torch

from atlas_hf.kernels.triangular_solve import COLUMNS, ROWS, unit_lower_solve

DOUBLE = torch.float64


def torchs(system, rhs, *, transposed=False):
    lower = system.mT if transposed else system
    return torch.linalg.solve_triangular(lower, rhs, upper=transposed, unitriangular=True)


def problem(size, width, dtype=DOUBLE, leading=(2,), scale=0.5):
    generator = torch.Generator().manual_seed(size)
    system = scale * torch.randn(*leading, size, size, generator=generator, dtype=DOUBLE)
    return system.to(dtype), torch.randn(*leading, size, width, generator=generator, dtype=DOUBLE).to(dtype)


def result_and_gradients(form, system, rhs, transposed):
    leaves = system.detach().requires_grad_(), rhs.detach().requires_grad_()
    result = form(*leaves, transposed=transposed)
    weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(0), dtype=DOUBLE).to(result.dtype)
    grads = torch.autograd.grad((result * weights).sum(), leaves)
    return result.detach(), grads[0].tril(-1), grads[1]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", [1, ROWS, ROWS + 1, 3 * ROWS + 1])
@pytest.mark.parametrize("width", [1, COLUMNS + 1])
def test_equal_in_double_precision(size, width, transposed):
    mine, other = (result_and_gradients(f, *problem(size, width), transposed) for f in (unit_lower_solve, torchs))
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10 * b.abs().max().item())


@pytest.mark.parametrize("transposed", [False, True])
def test_single_precision_is_as_good_as_pytorchs(transposed):
    system, rhs = problem(40, 32, scale=0.2)
    exact = result_and_gradients(torchs, system, rhs, transposed)
    mine, other = (result_and_gradients(f, system.float(), rhs.float(), transposed) for f in (unit_lower_solve, torchs))
    for a, b, c in zip(mine, other, exact, strict=True):
        scale = c.abs().max()
        assert (a - c).abs().max() / scale <= 2 * (b - c).abs().max() / scale + 1e-6


def test_one_token_again_and_again():
    """The system of a repeated key at full rate: its inverse is small, but powers of its strict part are not."""
    rhs = problem(64, 8, torch.float32)[1]
    system = torch.ones(2, 64, 64)
    expected = torch.cat([rhs[..., :1, :], rhs.diff(dim=-2)], -2)
    torch.testing.assert_close(unit_lower_solve(system, rhs), expected, rtol=1e-5, atol=1e-5)


def test_what_is_not_read():
    system, rhs = problem(20, 3)
    upper = torch.full_like(system, torch.nan).triu()
    assert torch.equal(unit_lower_solve(system.tril(-1) + upper, rhs), unit_lower_solve(system, rhs))


def test_gradients_of_gradients():
    system, rhs = (x.requires_grad_() for x in problem(2, 2, leading=()))
    assert torch.autograd.gradgradcheck(lambda s, r: unit_lower_solve(s.tril(-1), r), (system, rhs))


def test_the_operator_keeps_pytorchs_rules():
    system, rhs = (x.requires_grad_() for x in problem(5, 4))
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    for transposed in (False, True):
        torch.library.opcheck(torch.ops.atlas_hf.unit_lower_solve, (system, rhs, transposed), test_utils=checks)


def test_refusals_and_nothing():
    system, rhs = problem(5, 4)
    for wrong in (
        (system[..., :4], rhs),
        (system, rhs[..., :4, :]),
        (system.float(), rhs),
        (system.half(), rhs.half()),
    ):
        with pytest.raises(ValueError, match=r"system must be \[\.\.\., P, P\]"):
            unit_lower_solve(*wrong)
    assert unit_lower_solve(system[:0], rhs[:0]).shape == (0, 5, 4)
