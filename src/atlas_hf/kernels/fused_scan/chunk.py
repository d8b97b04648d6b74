"""What both directions need of a chunk: activations, errors and writes (docs/recurrence.md, sections 5 and 6).

The mathematics is that of `modeling/chunk_scan.py`, step by step. One program has a row (head and batch) to itself. A step's
results go to the row's scratch memory, and a barrier stands before they are read; no matrix has to fit on chip.

Legend: as in `plan.py`; `D_1 [V, entry]` and `D_2 [G E, F]` are the matrices' deltas, `S_1`, `S_2` their momentum. `memory`
is where the row's state begins, `work` its scratch memory, `start` the head's output matrix `W_1`; all of `inputs` begin at
the chunk at hand.
"""

import triton
import triton.language as tl

from .plan import NORM_EPS
from .tiles import dot, gelu, gelu_slopes, load_tile, load_vector, rows_by_rows, store_tile, zeros


@triton.jit
def source_index(plan: tl.constexpr):
    """The error sources, whether they exist, the token in view that each belongs to, and the write."""
    source = tl.arange(0, plan.source_pad)
    exist = source < plan.sources
    write = source // plan.window if plan.exact else source * 0
    token = write + source % plan.window if plan.exact else source
    return source, exist, token, write


@triton.jit
def load_start(memory, start, rows, rows_exist, columns, columns_exist, plan: tl.constexpr):
    """A tile of `W_1` as it stands at the chunk's start."""
    tile = load_tile(memory, rows, rows_exist, columns, columns_exist, plan.hidden_dim)
    if plan.to_init:
        tile += load_tile(start, rows, rows_exist, columns, columns_exist, plan.hidden_dim)
    return tile


@triton.jit(noinline=True)
def hidden_of_keys(inputs, memory, work, plan: tl.constexpr):
    """Pre-activations `(M_0 + D) phi(k)` at the chunk's start."""
    token = tl.arange(0, plan.view_pad)
    exist = token < plan.view
    for first in range(0, plan.stacked, plan.hidden_tile):
        unit = first + tl.arange(0, plan.hidden_tile)
        units = unit < plan.stacked
        hidden = zeros(plan.view_pad, plan.hidden_tile)
        if plan.to_init:
            hidden += load_tile(inputs.base_k, token, exist, unit, units, plan.stacked)
        matrix = memory + plan.output_size
        hidden = rows_by_rows(hidden, inputs.phi_k, token, exist, matrix, unit, units, plan.features, plan)
        store_tile(work + plan.at.hidden_k, token, exist, unit, units, plan.stacked, hidden)


@triton.jit(noinline=True)
def activations_of_keys(inputs, memory, start, work, plan: tl.constexpr):
    """Activations, their slopes and inner products, and the normalised steps of both sorts of matrices."""
    token = tl.arange(0, plan.view_pad)
    exist = token < plan.view
    gram = zeros(plan.view_pad, plan.view_pad)
    squares = zeros(plan.view_pad)
    gain = zeros(plan.view_pad)
    for first in range(0, plan.hidden_dim, plan.hidden_tile):
        unit = first + tl.arange(0, plan.hidden_tile)
        units = unit < plan.hidden_dim
        hidden = load_tile(work + plan.at.hidden_k, token, exist, unit, units, plan.stacked)
        slope, _ = gelu_slopes(hidden)
        x = gelu(hidden)
        squared_slopes = slope * slope
        if plan.groups == 2:
            factor = load_tile(work + plan.at.hidden_k, token, exist, unit + plan.hidden_dim, units, plan.stacked)
            store_tile(work + plan.at.slope, token, exist, unit + plan.hidden_dim, units, plan.stacked, x)
            slope *= factor
            squared_slopes = slope * slope + x * x
            x *= factor
        store_tile(work + plan.at.slope, token, exist, unit, units, plan.stacked, slope)
        store_tile(work + plan.at.x, token, exist, unit, units, plan.hidden_dim, x)
        squares += tl.sum(x * x, 1)
        if plan.exact:
            gram = dot(x, tl.trans(x), gram, plan)
        if plan.norm:
            columns = zeros(plan.hidden_tile)
            for row in range(0, plan.value_dim, plan.value_tile):
                value = row + tl.arange(0, plan.value_tile)
                current = load_start(memory, start, value, value < plan.value_dim, unit, units, plan)
                columns += tl.sum(current * current, 0)
            tl.store(work + plan.at.columns + unit, columns, mask=units)
            # A token that does not exist has a slope at zero all the same
            gain += tl.sum(tl.where(exist[:, None], squared_slopes * columns[None, :], 0.0), 1)
    step = zeros(plan.view_pad) + 1.0
    scale = zeros(plan.view_pad) + 1.0
    if plan.norm:
        step = 1.0 / (squares + NORM_EPS)
        scale = load_vector(inputs.step_k, token, exist) / tl.maximum(gain, 1.0)
        tl.store(work + plan.at.gain + token, gain, mask=exist)
    if not plan.muon_hidden:
        scale *= plan.hidden_rate
    tl.store(work + plan.at.step + token, step, mask=exist)
    tl.store(work + plan.at.scale + token, scale, mask=exist)
    if plan.exact:
        store_tile(work + plan.at.gram, token, exist, token, exist, plan.view, gram * step[None, :])


@triton.jit(noinline=True)
def first_errors(inputs, memory, start, entry, work, plan: tl.constexpr):
    """The error that the memory's start makes, `x D_1^T` and `x S_1^T`, of every token; anchored, these are the errors.

    `entry [R, entry]`: what the output matrix reads of the keys.
    """
    token = tl.arange(0, plan.view_pad)
    exist = token < plan.view
    for first in range(0, plan.value_dim, plan.value_tile):
        value = first + tl.arange(0, plan.value_tile)
        values = value < plan.value_dim
        begin = -load_tile(inputs.target, token, exist, value, values, plan.value_dim)
        if not plan.hebbian:
            if plan.to_init:
                if plan.deep:
                    begin = rows_by_rows(begin, entry, token, exist, start, value, values, plan.entry_dim, plan)
                else:
                    begin += load_tile(inputs.base_k, token, exist, value, values, plan.value_dim)
            moved = zeros(plan.view_pad, plan.value_tile)
            moved = rows_by_rows(moved, entry, token, exist, memory, value, values, plan.entry_dim, plan)
            if plan.exact:
                store_tile(work + plan.at.moved, token, exist, value, values, plan.value_dim, moved)
            else:
                begin += moved
            if plan.exact and plan.carry:
                carried = zeros(plan.view_pad, plan.value_tile)
                momentum = memory + plan.output_size + plan.hidden_size
                carried = rows_by_rows(carried, entry, token, exist, momentum, value, values, plan.entry_dim, plan)
                store_tile(work + plan.at.carried, token, exist, value, values, plan.value_dim, carried)
        target = work + (plan.at.begin if plan.exact else plan.at.errors)
        store_tile(target, token, exist, value, values, plan.value_dim, begin)


@triton.jit
def pair_errors(inputs, work, value, values, plan: tl.constexpr):
    """Right-hand side of the pairs' system: the error at the latest write, were the chunk's own writes left out."""
    _, exist, token, write = source_index(plan)
    errors = load_tile(work + plan.at.begin, token, exist, value, values, plan.value_dim)
    moved = load_tile(work + plan.at.moved, token, exist, value, values, plan.value_dim)
    errors += load_vector(inputs.a_before, write, exist)[:, None] * moved
    if plan.carry:
        carried = load_tile(work + plan.at.carried, token, exist, value, values, plan.value_dim)
        errors -= load_vector(inputs.m_before, write, exist)[:, None] * carried
    return errors


@triton.jit(noinline=True)
def hidden_errors(memory, start, work, plan: tl.constexpr):
    """Errors back-propagated through `W_1` at the chunk's start, times slopes and step of their tokens."""
    source, exist, token, _ = source_index(plan)
    scale = load_vector(work + plan.at.scale, token, exist)
    for first in range(0, plan.hidden_dim, plan.hidden_tile):
        unit = first + tl.arange(0, plan.hidden_tile)
        units = unit < plan.hidden_dim
        back = errors_back(memory, start, work, unit, units, plan) * scale[:, None]
        groups: tl.constexpr = plan.groups
        for group in tl.static_range(groups):
            place = unit + group * plan.hidden_dim
            slope = load_tile(work + plan.at.slope, token, exist, place, units, plan.stacked)
            store_tile(work + plan.at.hidden_errors, source, exist, place, units, plan.stacked, back * slope)


@triton.jit
def errors_back(memory, start, work, unit, units, plan: tl.constexpr):
    """`e W_1` at the chunk's start, some units of it."""
    source = tl.arange(0, plan.source_pad)
    exist = source < plan.sources
    back = zeros(plan.source_pad, plan.hidden_tile)
    for row in range(0, plan.value_dim, plan.inner_tile):
        value = row + tl.arange(0, plan.inner_tile)
        values = value < plan.value_dim
        errors = load_tile(work + plan.at.errors, source, exist, value, values, plan.value_dim)
        back = dot(errors, load_start(memory, start, value, values, unit, units, plan), back, plan)
    return back


@triton.jit
def load_step(inputs, work, plan: tl.constexpr):
    """The normalised step of each token in view, by which gd on the output matrix multiplies what it reads."""
    token = tl.arange(0, plan.view_pad)
    return load_step_of(inputs, work, token, token < plan.view, plan)


@triton.jit
def load_step_of(inputs, work, token, exist, plan: tl.constexpr):
    step = tl.where(exist, 1.0, 1.0)
    if plan.norm and not plan.muon_output:
        step = load_vector(work + plan.at.step if plan.deep else inputs.step_k, token, exist)
    return step


@triton.jit
def selection(plan: tl.constexpr):
    """`[R, P]`: one where a source belongs to a token. A product with it adds up each token's sources."""
    _, exist, token, _ = source_index(plan)
    view = tl.arange(0, plan.view_pad)
    return tl.where((view[:, None] == token[None, :]) & exist[None, :], 1.0, 0.0)


@triton.jit
def weigh(weights, errors, result, num_columns: tl.constexpr, tile: tl.constexpr, plan: tl.constexpr):
    """`result [R, columns]`: each token's errors, weighted and added up."""
    source, exist, _, _ = source_index(plan)
    token = tl.arange(0, plan.view_pad)
    spread = selection(plan) * load_vector(weights, source, exist)[None, :]
    for first in range(0, num_columns, tile):
        column = first + tl.arange(0, tile)
        columns = column < num_columns
        error = load_tile(errors, source, exist, column, columns, num_columns)
        total = dot(spread, error, zeros(plan.view_pad, tile), plan)
        store_tile(result, token, token < plan.view, column, columns, num_columns, total)


@triton.jit
def read_weights(inputs, gram, plan: tl.constexpr):
    """How much of each source's error each read sees, `[b, P]`: its weight at `t` times an inner product."""
    source, exist, token, _ = source_index(plan)
    position = tl.arange(0, plan.chunk_pad)
    positions = position < plan.chunk
    weights = load_tile(inputs.weights, position, positions, source, exist, plan.sources)
    return weights * load_tile(gram, position, positions, token, exist, plan.view)
