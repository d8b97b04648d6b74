"""Newton-Schulz orthogonalisation: on matrices, and on the factors of a sum of outer products (paper, section 4.2).

Legend: S matrix `[out, in]`, NS its approximately orthogonal factor, E `[R, out]` and X `[R, in]` factors of `S = E^T X`.
"""

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# Inside the square root, `sqrt(|S|_F^2 + eps^2)`: the norm is then differentiable at zero too.
EPS = 1e-7


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
    norm = (matrix.square().sum((-2, -1), keepdim=True) + eps**2).sqrt()
    x = matrix / norm
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

    `NS` is an odd polynomial of `S`, so `NS(S)` stays between the factors: with `P = C G_X C^T G_E` one step is
    `C <- a C + b P C + c P (P C)`. The cost, `O(R^3)` a step, depends on neither width.

    Args:
        gram_e: `[..., R, R]`, `E E^T`.
        gram_x: `[..., R, R]`, `X X^T`.

    Returns:
        `C [..., R, R]`, the division by the norm included. Agrees with `newton_schulz(E^T X)` to rounding.
    """
    a, b, c = coefficients
    norm = ((gram_e * gram_x).sum((-2, -1), keepdim=True).clamp_min(0) + eps**2).sqrt()
    gram_e = gram_e / norm.square()
    factor = torch.eye(gram_x.shape[-1], dtype=gram_x.dtype, device=gram_x.device).expand_as(gram_e)
    for i in range(steps):
        # The first step starts from C = 1.
        p = gram_x @ gram_e if i == 0 else factor @ gram_x @ factor.transpose(-1, -2) @ gram_e
        pc = p if i == 0 else p @ factor
        factor = a * factor + b * pc + c * (p @ pc)
    return factor / norm
