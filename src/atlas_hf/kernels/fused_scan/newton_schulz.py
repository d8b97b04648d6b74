"""Newton-Schulz in token space, and its gradient, on tiles that hold all tokens in view (recurrence, section 6).

In float64, as `modeling/newton_schulz.py` has it and for its reason: where the terms of a momentum cancel, float32 leaves
Gram matrices with negative eigenvalues, and on those the quintic diverges. The tensor cores of A100 and H100 take such
products; GPUs for games and graphics take them slowly.

Legend: as in `plan.py`; `gram_e = E E^T`, `gram_x = X X^T`, both `[R, R]`.
"""

import triton
import triton.language as tl

from ...modeling import newton_schulz as reference

CANCELLED = tl.constexpr(reference.CANCELLED)
FLOOR = tl.constexpr(reference.EPS**2)


@triton.jit
def product(x, y):
    return tl.dot(x, y, out_dtype=tl.float64)


@triton.jit
def identity(plan: tl.constexpr):
    token = tl.arange(0, plan.view_pad)
    return tl.where(token[:, None] == token[None, :], 1.0, 0.0).to(tl.float64)


@triton.jit
def total(x):
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def trace(x, plan: tl.constexpr):
    return total(x * identity(plan))


@triton.jit
def squared_norm(gram_e, gram_x, plan: tl.constexpr):
    """`|S|_F^2` with its floors, and whether the terms of `S` cancel."""
    inner = total(gram_e * gram_x)
    floor = CANCELLED * (trace(gram_e, plan) * trace(gram_x, plan))
    cancelled = inner < floor
    return tl.maximum(tl.where(cancelled, floor, inner), 0.0) + FLOOR, cancelled


@triton.jit
def load_history(history, step, plan: tl.constexpr):
    token = tl.arange(0, plan.view_pad)
    place = step * plan.view_pad * plan.view_pad + token[:, None] * plan.view_pad + token[None, :]
    return tl.load(history + place)


@triton.jit
def newton_schulz(gram_e, gram_x, history, plan: tl.constexpr, with_history: tl.constexpr):
    """The `C` in `NS(E^T X) = E^T C X`. `with_history`: what each step starts from goes to `history`."""
    token = tl.arange(0, plan.view_pad)
    square, _ = squared_norm(gram_e, gram_x, plan)
    scaled = gram_e / square
    factor = identity(plan)
    for step in range(0, plan.steps):
        if with_history:
            place = step * plan.view_pad * plan.view_pad + token[:, None] * plan.view_pad + token[None, :]
            tl.store(history + place, factor)
        whole = product(product(factor, gram_x), tl.trans(factor))
        p = product(whole, scaled)
        pc = product(p, factor)
        factor = plan.quintic[0] * factor + plan.quintic[1] * pc + plan.quintic[2] * product(p, pc)
    return factor / tl.sqrt(square)


@triton.jit
def newton_schulz_backward(gram_e, gram_x, history, result, grad, plan: tl.constexpr):
    """Gradients by both Gram matrices from that by the result; `newton_schulz` has left its history."""
    square, cancelled = squared_norm(gram_e, gram_x, plan)
    norm = tl.sqrt(square)
    scaled = gram_e / square
    d_norm = -total(grad * result) / norm
    grad = grad / norm
    d_scaled = scaled * 0.0
    d_gram_x = scaled * 0.0
    for back in range(0, plan.steps):
        factor = load_history(history, plan.steps - 1 - back, plan)
        half = product(factor, gram_x)
        whole = product(half, tl.trans(factor))
        p = product(whole, scaled)
        pc = product(p, factor)
        d_pc = plan.quintic[2] * product(tl.trans(p), grad) + plan.quintic[1] * grad
        d_p = plan.quintic[2] * product(grad, tl.trans(pc)) + product(d_pc, tl.trans(factor))
        d_whole = product(d_p, tl.trans(scaled))
        d_scaled += product(tl.trans(whole), d_p)
        d_half = product(d_whole, factor)
        d_gram_x += product(tl.trans(factor), d_half)
        grad = plan.quintic[0] * grad + product(tl.trans(p), d_pc)
        grad += product(d_half, tl.trans(gram_x)) + product(tl.trans(d_whole), half)
    d_norm -= 2.0 * total(d_scaled * scaled) / norm
    d_square = d_norm / (2.0 * norm)
    d_inner = tl.where(cancelled, 0.0, d_square)
    # The floor depends on the traces
    d_floor = tl.where(cancelled, CANCELLED * d_square, 0.0)
    d_gram_e = d_scaled / square + d_inner * gram_x + d_floor * trace(gram_x, plan) * identity(plan)
    d_gram_x += d_inner * gram_e + d_floor * trace(gram_e, plan) * identity(plan)
    return d_gram_e, d_gram_x
