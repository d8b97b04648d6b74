"""Newton-Schulz inside the fused scan: all steps of one write, and their gradient. Legend: as in `plan.py`."""

import triton
import triton.language as tl

from ...modeling.newton_schulz import EPS
from ..newton_schulz_tiles import advance, gram_gradients, identity, squared_norm, step_back, total

LEAST = tl.constexpr(EPS)


@triton.jit
def _place(history, step, plan: tl.constexpr):
    token = tl.arange(0, plan.view_pad)
    return history + step * plan.view_pad * plan.view_pad + token[:, None] * plan.view_pad + token[None, :]


@triton.jit
def newton_schulz(gram_e, gram_x, history, plan: tl.constexpr, with_history: tl.constexpr):
    """The `C` in `NS(E^T X) = E^T C X`. `with_history`: what each step starts from goes to `history`."""
    square, _ = squared_norm(gram_e, gram_x, LEAST, plan.view_pad)
    scaled = gram_e / square
    factor = identity(plan.view_pad)
    for step in range(0, plan.steps):
        if with_history:
            tl.store(_place(history, step, plan), factor)
        factor = advance(factor, gram_x, scaled, plan.quintic[0], plan.quintic[1], plan.quintic[2])
    return factor / tl.sqrt(square)


@triton.jit
def newton_schulz_backward(gram_e, gram_x, history, result, grad, plan: tl.constexpr):
    """Gradients by both Gram matrices from that by the result; `newton_schulz` has left its history."""
    square, _ = squared_norm(gram_e, gram_x, LEAST, plan.view_pad)
    norm = tl.sqrt(square)
    scaled = gram_e / square
    d_norm = -total(grad * result) / norm
    grad = grad / norm
    d_scaled = scaled * 0.0
    d_gram_x = scaled * 0.0
    for back in range(0, plan.steps):
        factor = tl.load(_place(history, plan.steps - 1 - back, plan))
        grad, d_scaled, d_gram_x = step_back(
            factor, gram_x, scaled, grad, d_scaled, d_gram_x, plan.quintic[0], plan.quintic[1], plan.quintic[2]
        )
    return gram_gradients(gram_e, gram_x, d_scaled, d_gram_x, d_norm, LEAST, plan.view_pad)
