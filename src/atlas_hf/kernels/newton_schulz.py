"""Newton-Schulz in token space (docs/recurrence.md, section 6): one program runs all steps of one write on the chip.

Legend: M problems (a write of a row), R tokens in view, `G_E`, `G_X` Gram matrices of the factors, C the result, as in
`modeling/newton_schulz.py`, whose `newton_schulz_factors` this computes. Tiles are 16, 32 or 64 wide.
"""

import torch
import triton
import triton.language as tl

from atlas_hf.kernels.newton_schulz_tiles import advance, gram_gradients, identity, squared_norm, step_back, total
from atlas_hf.modeling import newton_schulz as reference
from atlas_hf.modeling.newton_schulz import COEFFICIENTS, EPS

WIDEST = 64
# On a tile of 64 the backward pass takes 288 KiB of shared memory, more than any GPU gives a block
WIDEST_BACKWARD = 32
WARPS = {16: 2, 32: 8, 64: 16}


@triton.jit
def _place(pointer, number, num_tokens, BLOCK: tl.constexpr):
    """Addresses and mask of the `number`-th matrix `[R, R]`."""
    i, j = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    return pointer + number * num_tokens * num_tokens + i * num_tokens + j, (i < num_tokens) & (j < num_tokens)


@triton.jit
def _load(pointer, number, num_tokens, BLOCK: tl.constexpr):
    place, inside = _place(pointer, number, num_tokens, BLOCK)
    return tl.load(place, mask=inside, other=0.0).to(tl.float64)


@triton.jit
def _store(pointer, number, value, num_tokens, BLOCK: tl.constexpr):
    place, inside = _place(pointer, number, num_tokens, BLOCK)
    tl.store(place, value.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _forward_kernel(
    gram_e,
    gram_x,
    result,
    history,
    num_tokens,
    num_problems,
    repeats,
    steps,
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    EPS: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64)
    e = _load(gram_e, m, num_tokens, BLOCK)
    x = _load(gram_x, m // repeats, num_tokens, BLOCK)
    square, _ = squared_norm(e, x, EPS, BLOCK)
    scaled = e / square
    factor = identity(BLOCK)
    for step in range(steps):
        if KEEP:
            _store(history, step * num_problems + m, factor, num_tokens, BLOCK)
        factor = advance(factor, x, scaled, A, B, C)
    _store(result, m, factor / tl.sqrt(square), num_tokens, BLOCK)


@triton.jit
def _backward_kernel(
    gram_e,
    gram_x,
    result,
    history,
    grad_result,
    grad_e,
    grad_x,
    num_tokens,
    num_problems,
    repeats,
    steps,
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64)
    e = _load(gram_e, m, num_tokens, BLOCK)
    x = _load(gram_x, m // repeats, num_tokens, BLOCK)
    square, _ = squared_norm(e, x, EPS, BLOCK)
    norm = tl.sqrt(square)
    grad = _load(grad_result, m, num_tokens, BLOCK)
    d_norm = -total(grad * _load(result, m, num_tokens, BLOCK)) / norm
    grad = grad / norm
    d_scaled = tl.zeros_like(e)
    d_x = tl.zeros_like(e)
    # The Gram matrices are read again at each step: registers are scarce here
    for i in range(steps):
        factor = _load(history, (steps - 1 - i) * num_problems + m, num_tokens, BLOCK)
        x = _load(gram_x, m // repeats, num_tokens, BLOCK)
        scaled = _load(gram_e, m, num_tokens, BLOCK) / square
        grad, d_scaled, d_x = step_back(factor, x, scaled, grad, d_scaled, d_x, A, B, C)
    e = _load(gram_e, m, num_tokens, BLOCK)
    x = _load(gram_x, m // repeats, num_tokens, BLOCK)
    d_e, d_x = gram_gradients(e, x, d_scaled, d_x, d_norm, EPS, BLOCK)
    _store(grad_e, m, d_e, num_tokens, BLOCK)
    _store(grad_x, m, d_x, num_tokens, BLOCK)


def _launch(kernel, tensors, gram_e, gram_x, steps, coefficients, eps, **constants):
    size = gram_e.shape[-1]
    block = max(16, triton.next_power_of_2(size))
    if len(gram_e) == 0:
        return
    with torch.cuda.device_of(gram_e):
        kernel[(len(gram_e),)](
            *tensors,
            size,
            len(gram_e),
            len(gram_e) // len(gram_x),
            steps,
            *coefficients,
            eps,
            BLOCK=block,
            num_warps=WARPS[block],
            num_stages=1,
            **constants,
        )


@torch.library.custom_op("atlas_hf::newton_schulz_factors", mutates_args=())
def _factors(
    gram_e: torch.Tensor, gram_x: torch.Tensor, steps: int, coefficients: list[float], eps: float, keep: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gram_e [M, R, R]`, `gram_x [M / n, R, R]` -> `C [M, R, R]` and, if kept, `C` before each step `[k, M, R, R]`."""
    result = torch.empty_like(gram_e)
    history = gram_e.new_empty(steps if keep else 0, *gram_e.shape, dtype=torch.float64)
    _launch(_forward_kernel, (gram_e, gram_x, result, history), gram_e, gram_x, steps, coefficients, eps, KEEP=keep)
    return result, history


@_factors.register_fake
def _(gram_e, gram_x, steps, coefficients, eps, keep):
    return torch.empty_like(gram_e), gram_e.new_empty(steps if keep else 0, *gram_e.shape, dtype=torch.float64)


@torch.library.custom_op("atlas_hf::newton_schulz_factors_backward", mutates_args=())
def _factors_backward(
    gram_e: torch.Tensor,
    gram_x: torch.Tensor,
    result: torch.Tensor,
    history: torch.Tensor,
    grad: torch.Tensor,
    coefficients: list[float],
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients by both, `[M, R, R]`: of a shared `gram_x` one for each of its uses."""
    grad_e, grad_x = torch.empty_like(gram_e), torch.empty_like(gram_e)
    tensors = gram_e, gram_x, result, history, grad, grad_e, grad_x
    _launch(_backward_kernel, tensors, gram_e, gram_x, len(history), coefficients, eps)
    return grad_e, grad_x


@_factors_backward.register_fake
def _(gram_e, gram_x, result, history, grad, coefficients, eps):
    return torch.empty_like(gram_e), torch.empty_like(gram_e)


def _setup(ctx, inputs, output):
    gram_e, gram_x, _, ctx.coefficients, ctx.eps, _ = inputs
    ctx.save_for_backward(gram_e, gram_x, *output)


def _backward(ctx, grad, _):
    gram_e, gram_x, result, history = ctx.saved_tensors
    grad_e, grad_x = _factors_backward(
        gram_e, gram_x, result, history, grad.contiguous(), list(ctx.coefficients), ctx.eps
    )
    grad_x = grad_x.view(len(gram_x), len(gram_e) // max(len(gram_x), 1), *gram_x.shape[1:]).sum(1)
    return grad_e, grad_x, None, None, None, None


_factors.register_autograd(_backward, setup_context=_setup)


def newton_schulz_factors(
    gram_e: torch.Tensor,
    gram_x: torch.Tensor,
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = EPS,
) -> torch.Tensor:
    """The `C` in `NS_k(E^T X) = E^T C X`, as `modeling.newton_schulz.newton_schulz_factors` and equal to it to rounding.

    Args:
        gram_e: `[..., R, R]`, `E E^T`, float32 or float64; R is at most `WIDEST`. Where gradients are taken and R exceeds
            `WIDEST_BACKWARD`, PyTorch's twin runs.
        gram_x: `[..., R, R]`, `X X^T`, of the same dtype; broadcast against `gram_e`, and not copied where only its last
            leading axis is shared. Both symmetric.

    Returns:
        `C [..., R, R]`. Once differentiable.

    Raises:
        ValueError: too many tokens, or another dtype.
    """
    size = gram_e.shape[-1]
    if size > WIDEST:
        raise ValueError(f"gram_e is of {size} tokens, the kernel's tiles hold {WIDEST}: use PyTorch's twin")
    if gram_e.dtype not in (torch.float32, torch.float64) or gram_x.dtype != gram_e.dtype:
        raise ValueError(f"gram_e and gram_x must both be float32 or float64, got {gram_e.dtype} and {gram_x.dtype}")
    leading = torch.broadcast_shapes(gram_e.shape[:-2], gram_x.shape[:-2])
    gram_e = gram_e.expand(*leading, size, size)
    shared = gram_x.ndim > 2 and gram_x.shape[-3] == 1
    gram_x = gram_x.expand(*leading[:-1], 1 if shared else leading[-1], size, size) if leading else gram_x
    keep = torch.is_grad_enabled() and (gram_e.requires_grad or gram_x.requires_grad)
    if keep and size > WIDEST_BACKWARD:
        grams = (reference.precise(gram) for gram in (gram_e, gram_x))
        return reference.newton_schulz_factors(*grams, steps, coefficients, eps).to(gram_e.dtype)
    result, _ = _factors(
        gram_e.reshape(-1, size, size).contiguous(),
        gram_x.reshape(-1, size, size).contiguous(),
        steps,
        list(coefficients),
        eps,
        keep,
    )
    return result.view(*leading, size, size)
