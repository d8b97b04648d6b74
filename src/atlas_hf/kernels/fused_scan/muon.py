"""Muon's writes without carried momentum, both ways: orthogonalised in token space (docs/recurrence.md, section 6).

A write's momentum is `E_n^T X`, with `E_n [R, rows]` the errors of the tokens in view as decayed and summed by write `n`, its
step `C_n^T E_n`. Everything here is for the rows of one matrix, or of several below one another, each orthogonalised by
itself.

Legend: as in `plan.py`; rows: the `G E` of the hidden matrices or the `V` of the output matrix; `sums`, `steps [W, R, rows]`.
"""

import triton
import triton.language as tl

from ..newton_schulz_tiles import product
from .chunk import source_index, weigh
from .newton_schulz import newton_schulz, newton_schulz_backward
from .tiles import add_to_tile, add_to_vector, dot, load_tile, load_vector, rows_by_rows, store_tile, zeros


@triton.jit
def gram_of_rows(x, y, first_row, num_rows: tl.constexpr, stride: tl.constexpr, tile: tl.constexpr, plan: tl.constexpr):
    """`x y^T [R, R]` in float64, over one matrix's rows."""
    token = tl.arange(0, plan.view_pad)
    exist = token < plan.view
    gram = zeros(plan.view_pad, plan.view_pad).to(tl.float64)
    for first in range(0, num_rows, tile):
        row = first + tl.arange(0, tile)
        left = load_tile(x, token, exist, first_row + row, row < num_rows, stride).to(tl.float64)
        right = load_tile(y, token, exist, first_row + row, row < num_rows, stride).to(tl.float64)
        gram += product(left, tl.trans(right))
    return gram


@triton.jit
def load_precise(gram, plan: tl.constexpr):
    token = tl.arange(0, plan.view_pad)
    exist = (token[:, None] < plan.view) & (token[None, :] < plan.view)
    return tl.load(gram + token[:, None] * plan.view + token[None, :], mask=exist, other=0.0).to(tl.float64)


@triton.jit(noinline=True)
def keep_gram(x, gram, plan: tl.constexpr):
    """Inner products of the keys' activations `x [R, E]`, in float64."""
    token = tl.arange(0, plan.view_pad)
    exist = (token[:, None] < plan.view) & (token[None, :] < plan.view)
    tile: tl.constexpr = plan.hidden_tile
    value = gram_of_rows(x, x, 0, plan.hidden_dim, plan.hidden_dim, tile, plan)
    tl.store(gram + token[:, None] * plan.view + token[None, :], value, mask=exist)


@triton.jit(noinline=True)
def step_errors(inputs, work, plan: tl.constexpr):
    """The output matrix's errors times the normalised step of their tokens."""
    source, exist, _, _ = source_index(plan)
    step = load_step_of_errors(inputs, work, plan)
    for first in range(0, plan.value_dim, plan.value_tile):
        value = first + tl.arange(0, plan.value_tile)
        values = value < plan.value_dim
        errors = load_tile(work + plan.at.errors, source, exist, value, values, plan.value_dim)
        at = work + plan.at.stepped_errors
        store_tile(at, source, exist, value, values, plan.value_dim, errors * step[:, None])


@triton.jit
def load_step_of_errors(inputs, work, plan: tl.constexpr):
    _, exist, token, _ = source_index(plan)
    step = zeros(plan.source_pad) + 1.0
    if plan.norm:
        step = load_vector(work + plan.at.step if plan.deep else inputs.step_k, token, exist)
    return step


@triton.jit(noinline=True)
def step_errors_backward(inputs, grads, work, plan: tl.constexpr):
    """`d_errors`, in place: from the gradient by the stepped errors to that by the errors; and by the step."""
    source, exist, token, _ = source_index(plan)
    step = load_step_of_errors(inputs, work, plan)
    d_step = zeros(plan.source_pad)
    for first in range(0, plan.value_dim, plan.value_tile):
        value = first + tl.arange(0, plan.value_tile)
        values = value < plan.value_dim
        errors = load_tile(work + plan.at.errors, source, exist, value, values, plan.value_dim)
        grad = load_tile(work + plan.at.d_errors, source, exist, value, values, plan.value_dim)
        d_step += tl.sum(grad * errors, 1)
        store_tile(work + plan.at.d_errors, source, exist, value, values, plan.value_dim, grad * step[:, None])
    if plan.deep:
        tl.store(work + plan.at.d_step + token, d_step, mask=exist)
    elif plan.norm:
        add_to_vector(grads.step_k, token, exist, d_step)


@triton.jit(noinline=True)
def sum_errors(inputs, errors, sums, num_rows: tl.constexpr, tile: tl.constexpr, plan: tl.constexpr):
    for write in range(0, plan.writes):
        weights = inputs.accumulated + write * plan.sources
        weigh(weights, errors, sums + write * plan.view * num_rows, num_rows, tile, plan)


@triton.jit(noinline=True)
def take_steps(
    gram_x,
    history,
    sums,
    steps,
    num_matrices: tl.constexpr,
    num_rows: tl.constexpr,
    tile: tl.constexpr,
    plan: tl.constexpr,
):
    """`steps` from `sums`; `num_rows` of each matrix."""
    token = tl.arange(0, plan.view_pad)
    exist = token < plan.view
    stride: tl.constexpr = num_matrices * num_rows
    gram = load_precise(gram_x, plan)
    for index in range(0, plan.writes * num_matrices):
        place = index // num_matrices * (plan.view * stride)
        first_row = index % num_matrices * num_rows
        gram_e = gram_of_rows(sums + place, sums + place, first_row, num_rows, stride, tile, plan)
        factor = tl.trans(newton_schulz(gram_e, gram, history, plan, False)).to(tl.float32)
        for first in range(0, num_rows, tile):
            row = first + tl.arange(0, tile)
            summed = load_tile(sums + place, token, exist, first_row + row, row < num_rows, stride)
            step = dot(factor, summed, zeros(plan.view_pad, tile), plan)
            store_tile(steps + place, token, exist, first_row + row, row < num_rows, stride, step)


@triton.jit(noinline=True)
def combine_steps(
    inputs, steps, rate: tl.constexpr, result, num_rows: tl.constexpr, tile: tl.constexpr, plan: tl.constexpr
):
    """`result [R, rows]`: what the chunk's end takes of all writes."""
    token = tl.arange(0, plan.view_pad)
    exist = token < plan.view
    for first in range(0, num_rows, tile):
        row = first + tl.arange(0, tile)
        rows = row < num_rows
        combined = zeros(plan.view_pad, tile)
        for write in range(0, plan.writes):
            step = load_tile(steps + write * plan.view * num_rows, token, exist, row, rows, num_rows)
            combined += tl.load(inputs.end_sizes + write) * step
        store_tile(result, token, exist, row, rows, num_rows, rate * combined)


@triton.jit
def read_steps(
    inputs, gram, steps, rate: tl.constexpr, row, rows, num_rows: tl.constexpr, tile: tl.constexpr, plan: tl.constexpr
):
    """What the reads see of the chunk's writes, some rows of it: `[b, rows]`."""
    token = tl.arange(0, plan.view_pad)
    exist = token < plan.view
    position = tl.arange(0, plan.chunk_pad)
    positions = position < plan.chunk
    inner = load_tile(gram, position, positions, token, exist, plan.view)
    total = zeros(plan.chunk_pad, tile)
    for write in range(0, plan.writes):
        size = load_vector(inputs.sizes, position * plan.writes + write, positions)
        step = load_tile(steps + write * plan.view * num_rows, token, exist, row, rows, num_rows)
        total = dot(inner * (rate * size)[:, None], step, total, plan)
    return total


@triton.jit(noinline=True)
def read_steps_backward(
    inputs,
    grads,
    gram,
    d_gram,
    grad,
    steps,
    d_steps,
    rate: tl.constexpr,
    num_rows: tl.constexpr,
    tile: tl.constexpr,
    plan: tl.constexpr,
):
    """Of minus what `read_steps` gives, whose gradient is `grad [b, rows]`; `d_steps` is set, `d_gram` added to."""
    token = tl.arange(0, plan.view_pad)
    exist = token < plan.view
    position = tl.arange(0, plan.chunk_pad)
    positions = position < plan.chunk
    inner = load_tile(gram, position, positions, token, exist, plan.view)
    by_gram = zeros(plan.chunk_pad, plan.view_pad)
    for write in range(0, plan.writes):
        place = write * plan.view * num_rows
        size = rate * load_vector(inputs.sizes, position * plan.writes + write, positions)
        for first in range(0, num_rows, tile):
            row = first + tl.arange(0, tile)
            rows = row < num_rows
            by_read = load_tile(grad, position, positions, row, rows, num_rows)
            by_step = -dot(tl.trans(inner * size[:, None]), by_read, zeros(plan.view_pad, tile), plan)
            store_tile(d_steps + place, token, exist, row, rows, num_rows, by_step)
        seen = zeros(plan.chunk_pad, plan.view_pad)
        seen = rows_by_rows(seen, grad, position, positions, steps + place, token, exist, num_rows, plan)
        add_to_vector(grads.sizes, position * plan.writes + write, positions, -rate * tl.sum(inner * seen, 1))
        by_gram -= size[:, None] * seen
    add_to_tile(d_gram, position, positions, token, exist, plan.view, by_gram)


@triton.jit(noinline=True)
def end_of_steps_backward(
    inputs,
    grads,
    d_matrix,
    entry,
    steps,
    d_steps,
    rate: tl.constexpr,
    num_rows: tl.constexpr,
    num_columns: tl.constexpr,
    tile: tl.constexpr,
    plan: tl.constexpr,
):
    """Of the chunk's end: by the steps (added) and how much is left of them."""
    token = tl.arange(0, plan.view_pad)
    exist = token < plan.view
    for first in range(0, num_rows, tile):
        row = first + tl.arange(0, tile)
        rows = row < num_rows
        grad = zeros(plan.view_pad, tile)
        grad = -rate * rows_by_rows(grad, entry, token, exist, d_matrix, row, rows, num_columns, plan)
        for write in range(0, plan.writes):
            place = write * plan.view * num_rows
            step = load_tile(steps + place, token, exist, row, rows, num_rows)
            left = grads.end_sizes + write
            tl.store(left, tl.load(left) + tl.sum(tl.sum(grad * step, 1), 0))
            size = tl.load(inputs.end_sizes + write)
            add_to_tile(d_steps + place, token, exist, row, rows, num_rows, size * grad)


@triton.jit(noinline=True)
def take_steps_backward(
    gram_x,
    d_gram_x,
    history,
    sums,
    d_steps,
    num_matrices: tl.constexpr,
    num_rows: tl.constexpr,
    tile: tl.constexpr,
    plan: tl.constexpr,
):
    """`d_steps` becomes the gradient by `sums`; `d_gram_x [R, R]` is added to."""
    token = tl.arange(0, plan.view_pad)
    exist = token < plan.view
    stride: tl.constexpr = num_matrices * num_rows
    gram = load_precise(gram_x, plan)
    for index in range(0, plan.writes * num_matrices):
        place = index // num_matrices * (plan.view * stride)
        first_row = index % num_matrices * num_rows
        gram_e = gram_of_rows(sums + place, sums + place, first_row, num_rows, stride, tile, plan)
        factor = newton_schulz(gram_e, gram, history, plan, True)
        grad = gram_of_rows(sums + place, d_steps + place, first_row, num_rows, stride, tile, plan)
        tl.debug_barrier()
        d_gram_e, by_gram_x = newton_schulz_backward(gram_e, gram, history, factor, grad, plan)
        add_to_tile(d_gram_x, token, exist, token, exist, plan.view, by_gram_x)
        by_sums = d_gram_e + tl.trans(d_gram_e)
        for first in range(0, num_rows, tile):
            row = first + tl.arange(0, tile)
            rows = row < num_rows
            summed = load_tile(sums + place, token, exist, first_row + row, rows, stride).to(tl.float64)
            step = load_tile(d_steps + place, token, exist, first_row + row, rows, stride)
            total = dot(factor.to(tl.float32), step, zeros(plan.view_pad, tile), plan)
            total += product(by_sums, summed).to(tl.float32)
            store_tile(d_steps + place, token, exist, first_row + row, rows, stride, total)
        tl.debug_barrier()


@triton.jit(noinline=True)
def sum_errors_backward(
    inputs, grads, errors, d_sums, d_errors, num_rows: tl.constexpr, tile: tl.constexpr, plan: tl.constexpr
):
    """By the errors (set) and how the writes' momentum sums them."""
    source, exist, token, _ = source_index(plan)
    for write in range(0, plan.writes):
        d_weight = zeros(plan.source_pad)
        for first in range(0, num_rows, tile):
            row = first + tl.arange(0, tile)
            rows = row < num_rows
            grad = load_tile(d_sums + write * plan.view * num_rows, token, exist, row, rows, num_rows)
            d_weight += tl.sum(grad * load_tile(errors, source, exist, row, rows, num_rows), 1)
        add_to_vector(grads.accumulated + write * plan.sources, source, exist, d_weight)
    for first in range(0, num_rows, tile):
        row = first + tl.arange(0, tile)
        rows = row < num_rows
        total = zeros(plan.source_pad, tile)
        for write in range(0, plan.writes):
            weight = load_vector(inputs.accumulated + write * plan.sources, source, exist)
            grad = load_tile(d_sums + write * plan.view * num_rows, token, exist, row, rows, num_rows)
            total += weight[:, None] * grad
        store_tile(d_errors, source, exist, row, rows, num_rows, total)
