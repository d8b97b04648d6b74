"""Newton-Schulz orthogonalisation: on matrices, and on the factors of a sum of outer products (paper, section 4.2).

Legend: S matrix `[out, in]`, NS its approximately orthogonal factor, E `[R, out]` and X `[R, in]` factors of `S = E^T X`.
"""

import torch
from torch.nn.functional import pad

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# Inside the square root, `sqrt(|S|_F^2 + eps^2)`: the norm is then differentiable at zero too.
EPS = 1e-7
# A sum of outer products that cancels to below about 3e-5 of its terms counts as that large: what is left of it is rounding.
CANCELLED = 1e-9
# Gram matrices are padded to a multiple of this, with zeros that stay out of every product: odd sizes are slow on CPUs, up to
# threefold.
EVEN = 4


def precise(x: torch.Tensor) -> torch.Tensor:
    """`x` in the precision that token space needs: double, where the device has it.

    Gram matrices of the factors carry rounding relative to `|E|^2 |X|^2`, not to `|S|^2`. Where the terms of `S` cancel,
    single precision leaves a product with negative eigenvalues, and on those the quintic diverges.
    """
    return x if x.device.type == "mps" else x.double()


def _quintic(gram: torch.Tensor, coefficients: tuple[float, float, float]) -> torch.Tensor:
    a, b, c = coefficients
    step = b * gram + c * (gram @ gram)
    return step + a * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)


def newton_schulz(
    matrix: torch.Tensor, steps: int = 5, coefficients: tuple[float, float, float] = COEFFICIENTS, eps: float = EPS
) -> torch.Tensor:
    """`NS_k(S)`: the quintic `a S + b (S S^T) S + c (S S^T)^2 S`, `k` times, on `S / sqrt(|S|_F^2 + eps^2)`.

    The iteration runs on the Gram matrix of the smaller side: each step multiplies `S` by a polynomial of it, and
    polynomials of one matrix commute.

    Args:
        matrix: `[..., out, in]`, any real dtype; zero matrices give zero, with finite gradients.
        steps: `k >= 0`.
        coefficients: `(a, b, c)`.
        eps: > 0, the floor of the Frobenius norm.

    Returns:
        `[..., out, in]`; singular values lie near 1 except those far below the largest one.
    """
    # At least in float32: half precision knows no eps^2
    wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    norm = (wide.square().sum((-2, -1), keepdim=True) + eps**2).sqrt()
    x = wide / norm
    x = x.to(matrix.dtype) if matrix.is_floating_point() else x
    tall = x.shape[-2] > x.shape[-1]
    gram = x.transpose(-1, -2) @ x if tall else x @ x.transpose(-1, -2)
    total = None
    for i in range(steps):
        step = _quintic(gram, coefficients)
        total = step if total is None else step @ total
        if i + 1 < steps:
            gram = step @ gram @ step
    if total is None:
        return x
    return x @ total if tall else total @ x


def newton_schulz_factors(
    gram_e: torch.Tensor,
    gram_x: torch.Tensor,
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = EPS,
) -> torch.Tensor:
    """The `C` in `NS_k(E^T X) = E^T C X`, from the Gram matrices of the factors alone.

    Give them in double precision (see `precise`). `NS` is an odd polynomial of `S`, so `NS(S)` stays between the factors:
    with `P = C G_X C^T G_E` one step is `C <- a C + b P C + c P (P C)`. The cost, `O(R^3)` a step, depends on neither width.

    Args:
        gram_e: `[..., R, R]`, `E E^T`.
        gram_x: `[..., R, R]`, `X X^T`.

    Returns:
        `C [..., R, R]`, the division by the norm included. Agrees with `newton_schulz(E^T X)` to rounding.
    """
    if torch.is_grad_enabled() and (gram_e.requires_grad or gram_x.requires_grad):
        return _Factors.apply(gram_e, gram_x, steps, coefficients, eps)
    return newton_schulz_factors_forward(gram_e, gram_x, steps, coefficients, eps)[0]


def newton_schulz_factors_forward(gram_e, gram_x, steps, coefficients=COEFFICIENTS, eps=EPS):
    """`newton_schulz_factors` and what `newton_schulz_factors_backward` needs of it."""
    a, b, c = coefficients
    shapes = gram_e.shape, gram_x.shape
    gram_e, gram_x = (x.flatten(0, -3) if x.ndim > 2 else x[None] for x in torch.broadcast_tensors(gram_e, gram_x))
    size = gram_e.shape[-1]
    gram_e, gram_x = (pad(x, (0, -size % EVEN) * 2) for x in (gram_e, gram_x))
    traces = gram_e.diagonal(dim1=-2, dim2=-1).sum(-1) * gram_x.diagonal(dim1=-2, dim2=-1).sum(-1)
    floor = CANCELLED * traces[..., None, None]
    inner = (gram_e * gram_x).sum((-2, -1), keepdim=True)
    cancelled = inner < floor
    norm = (torch.where(cancelled, floor, inner).clamp_min(0) + eps**2).sqrt()
    scaled = gram_e / norm.square()
    factor, history = None, []
    for _ in range(steps):
        # The first step starts from C = 1
        half = gram_x if factor is None else torch.bmm(factor, gram_x)  # C G_X
        whole = half if factor is None else torch.bmm(half, factor.mT)
        p = torch.bmm(whole, scaled)
        pc = p if factor is None else torch.bmm(p, factor)
        history.append((factor, half, whole, p, pc))
        step = torch.baddbmm(pc, p, pc, beta=b, alpha=c)
        if factor is None:
            step.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            step.add_(factor, alpha=a)
        factor = step
    if factor is None:
        factor = torch.eye(gram_x.shape[-1], dtype=gram_x.dtype, device=gram_x.device).expand_as(scaled).clone()
    result = (factor / norm)[..., :size, :size]
    tape = (shapes, gram_e, gram_x, norm, cancelled, scaled, history, result, coefficients)
    return result.reshape(torch.broadcast_shapes(*shapes)), tape


def newton_schulz_factors_backward(tape, grad):
    """Gradients by `gram_e` and `gram_x` (summed over the axes along which it was shared)."""
    shapes, gram_e, gram_x, norm, cancelled, scaled, history, result, (a, b, c) = tape
    shape, size, grad = grad.shape, grad.shape[-1], grad.reshape(result.shape)
    d_norm = -(grad * result).sum((-2, -1), keepdim=True) / norm
    grad = pad(grad / norm, (0, -size % EVEN) * 2)
    d_scaled, d_gram_x = torch.zeros_like(scaled), torch.zeros_like(scaled)
    for factor, half, whole, p, pc in reversed(history):
        d_pc = torch.baddbmm(grad, p.mT, grad, beta=b, alpha=c)
        d_p = torch.bmm(grad, pc.mT).mul_(c)
        if factor is None:
            d_p += d_pc
            d_gram_x.baddbmm_(d_p, scaled.mT)
            d_scaled.baddbmm_(whole.mT, d_p)
            continue
        d_p.baddbmm_(d_pc, factor.mT)
        d_whole = torch.bmm(d_p, scaled.mT)
        d_scaled.baddbmm_(whole.mT, d_p)
        d_half = torch.bmm(d_whole, factor)
        d_gram_x.baddbmm_(factor.mT, d_half)
        grad = torch.baddbmm(grad, p.mT, d_pc, beta=a)
        grad.baddbmm_(d_half, gram_x.mT).baddbmm_(d_whole.mT, half)
    d_norm -= 2 * (d_scaled * scaled).sum((-2, -1), keepdim=True) / norm
    d_square = d_norm / (2 * norm)
    d_inner = torch.where(cancelled, 0.0, d_square)
    d_gram_e = d_scaled / norm.square() + d_inner * gram_x
    d_gram_x += d_inner * gram_e
    # The floor depends on the traces
    d_floor = torch.where(cancelled, CANCELLED * d_square, 0.0)[..., 0]
    d_gram_e.diagonal(dim1=-2, dim2=-1).add_(d_floor * gram_x.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True))
    d_gram_x.diagonal(dim1=-2, dim2=-1).add_(d_floor * gram_e.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True))
    grads = (d[:, :size, :size].reshape(shape) for d in (d_gram_e, d_gram_x))
    return tuple(d.sum_to_size(s) for d, s in zip(grads, shapes, strict=True))


class _Factors(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gram_e, gram_x, steps, coefficients, eps):
        result, ctx.tape = newton_schulz_factors_forward(gram_e, gram_x, steps, coefficients, eps)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        # Under autocast the products would fall back to half precision.
        with torch.autocast(device_type=grad.device.type, enabled=False):
            return *newton_schulz_factors_backward(ctx.tape, grad), None, None, None
