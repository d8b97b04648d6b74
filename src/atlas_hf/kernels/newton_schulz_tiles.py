"""Newton-Schulz in token space and its gradient, on tiles that hold all tokens in view (docs/recurrence.md, section 6).

What every kernel that orthogonalises is made of. Legend: R tokens in view, `gram_e = E E^T` and `gram_x = X X^T` `[R, R]`,
`factor` the `C` of `NS(E^T X) = E^T C X` as it grows from step to step. Tiles are wider than R; what lies beyond is zero in
the Gram matrices, so it stays out of every product.

All is double: where the terms of the sum cancel, as with a momentum, single precision would leave Gram matrices with negative
eigenvalues, on which the quintic diverges. The tensor cores of A100, H100 and their kin multiply doubles as fast as their
ordinary units multiply floats; GPUs for games and graphics multiply them slowly.
"""

import triton
import triton.language as tl

from atlas_hf.modeling import newton_schulz as reference

CANCELLED = tl.constexpr(reference.CANCELLED)


@triton.jit
def product(x, y):
    return tl.dot(x, y, out_dtype=tl.float64)


@triton.jit
def identity(SIZE: tl.constexpr):
    token = tl.arange(0, SIZE)
    return tl.where(token[:, None] == token[None, :], 1.0, 0.0).to(tl.float64)


@triton.jit
def total(x):
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def trace(x, SIZE: tl.constexpr):
    return total(x * identity(SIZE))


@triton.jit
def squared_norm(gram_e, gram_x, EPS: tl.constexpr, SIZE: tl.constexpr):
    """`|S|_F^2 + eps^2`, with a floor where the terms of `S` cancel; and whether they do."""
    inner = total(gram_e * gram_x)
    floor = CANCELLED * (trace(gram_e, SIZE) * trace(gram_x, SIZE))
    cancelled = inner < floor
    return tl.maximum(tl.where(cancelled, floor, inner), 0.0) + EPS * EPS, cancelled


@triton.jit
def advance(factor, gram_x, scaled, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """One step of the quintic: `C <- a C + b P C + c P (P C)`, `P = C G_X C^T G_E / |S|^2`; `scaled = G_E / |S|^2`."""
    p = product(product(product(factor, gram_x), tl.trans(factor)), scaled)
    pc = product(p, factor)
    return A * factor + B * pc + C * product(p, pc)


@triton.jit
def step_back(factor, gram_x, scaled, grad, d_scaled, d_gram_x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """Gradient of `advance` at `factor`: by it from `grad`, and added to those by `scaled` and `gram_x`."""
    half = product(factor, gram_x)
    whole = product(half, tl.trans(factor))
    p = product(whole, scaled)
    pc = product(p, factor)
    d_pc = C * product(tl.trans(p), grad) + B * grad
    d_p = C * product(grad, tl.trans(pc)) + product(d_pc, tl.trans(factor))
    # The Gram matrices and `whole` equal their transposes, but as transposed operands they take fewer registers
    d_whole = product(d_p, tl.trans(scaled))
    d_scaled += product(tl.trans(whole), d_p)
    d_half = product(d_whole, factor)
    d_gram_x += product(tl.trans(factor), d_half)
    grad = A * grad + product(tl.trans(p), d_pc)
    grad += product(d_half, tl.trans(gram_x)) + product(tl.trans(d_whole), half)
    return grad, d_scaled, d_gram_x


@triton.jit
def gram_gradients(gram_e, gram_x, d_scaled, d_gram_x, d_norm, EPS: tl.constexpr, SIZE: tl.constexpr):
    """Gradients by both Gram matrices, once all steps are taken back; `d_norm` is that by `|S|` at the last division."""
    square, cancelled = squared_norm(gram_e, gram_x, EPS, SIZE)
    norm = tl.sqrt(square)
    d_gram_e = d_scaled / square
    d_square = (d_norm - 2.0 * total(d_gram_e * gram_e) / norm) / (2.0 * norm)
    d_inner = tl.where(cancelled, 0.0, d_square)
    # Where the floor stands for the norm, it depends on the traces
    d_floor = tl.where(cancelled, CANCELLED * d_square, 0.0)
    d_gram_e += d_inner * gram_x + d_floor * trace(gram_x, SIZE) * identity(SIZE)
    d_gram_x += d_inner * gram_e + d_floor * trace(gram_e, SIZE) * identity(SIZE)
    return d_gram_e, d_gram_x
