"""The scan forwards: one program walks the chunks of one row (head and batch).

Legend: as in `plan.py`; N rows, n chunks, L tokens on the grid.
"""

import triton
import triton.language as tl

from .chunk import load_step
from .plan import COUNTS, Inputs
from .reads import outputs, weigh_errors
from .tiles import dot, load_tile, store_tile, zeros
from .walk import at_chunk, take_chunk


@triton.jit
def end_of_matrix(
    inputs,
    matrix,
    momentum,
    ends,
    lasts,
    entry,
    step,
    num_rows: tl.constexpr,
    num_columns: tl.constexpr,
    row_tile: tl.constexpr,
    column_tile: tl.constexpr,
    plan: tl.constexpr,
):
    """A matrix `[rows, columns]` and its momentum after the chunk, in place.

    `ends`, `lasts [R, rows]`: errors as the matrix and its momentum weigh them; `entry [R, columns]`, times `step [R]`.
    """
    token = tl.arange(0, plan.view_pad)
    exist = token < plan.view
    a = tl.load(inputs.a_end)
    for first in range(0, num_rows, row_tile):
        row = first + tl.arange(0, row_tile)
        rows = row < num_rows
        for begin in range(0, num_columns, column_tile):
            column = begin + tl.arange(0, column_tile)
            columns = column < num_columns
            x = load_tile(entry, token, exist, column, columns, num_columns) * step[:, None]
            zero = zeros(row_tile, column_tile)
            new = a * load_tile(matrix, row, rows, column, columns, num_columns)
            new -= dot(tl.trans(load_tile(ends, token, exist, row, rows, num_rows)), x, zero, plan)
            if plan.carry:
                carried = load_tile(momentum, row, rows, column, columns, num_columns)
                new -= tl.load(inputs.m_end) * carried
                error = tl.trans(load_tile(lasts, token, exist, row, rows, num_rows))
                carried = tl.load(inputs.beta_end) * carried + dot(error, x, zero, plan)
                store_tile(momentum, row, rows, column, columns, num_columns, carried)
            store_tile(matrix, row, rows, column, columns, num_columns, new)


@triton.jit(noinline=True)
def end_of_chunk(inputs, memory, work, plan: tl.constexpr):
    """The state after the chunk, in place; `weigh_errors` has been called."""
    momentum = memory + plan.output_size + plan.hidden_size
    end_of_matrix(
        inputs,
        memory,
        momentum,
        work + plan.at.end_errors,
        work + plan.at.last_errors,
        work + plan.at.x if plan.deep else inputs.phi_k,
        load_step(inputs, work, plan),
        plan.value_dim,
        plan.entry_dim,
        plan.value_tile,
        plan.entry_tile,
        plan,
    )
    if plan.deep:
        end_of_matrix(
            inputs,
            memory + plan.output_size,
            momentum + plan.output_size,
            work + plan.at.end_hidden_errors,
            work + plan.at.last_hidden_errors,
            inputs.phi_k,
            zeros(plan.view_pad) + 1.0,
            plan.stacked,
            plan.features,
            plan.hidden_tile,
            plan.feature_tile,
            plan,
        )


@triton.jit
def keep(memory, kept, plan: tl.constexpr, block: tl.constexpr):
    """Copy one row's state."""
    for first in range(0, plan.state_size, block):
        index = first + tl.arange(0, block)
        tl.store(kept + index, tl.load(memory + index, mask=index < plan.state_size), mask=index < plan.state_size)


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    phi_k,
    base_k,
    step_k,
    target,
    phi_q,
    base_q,
    output_start,
    gram_kk,
    gram_qk,
    a,
    a_before,
    a_end,
    m,
    m_before,
    m_end,
    beta_end,
    weights,
    end_weights,
    end_momentum,
    accumulated,
    sizes,
    end_sizes,
    memory,
    kept,
    scratch,
    precise,
    y,
    first_chunk,
    last_chunk,
    last_end,
    num_chunks,
    rows_per_head,
    every,
    num_kept,
    plan: tl.constexpr,
    with_outputs: tl.constexpr,
    with_starts: tl.constexpr,
):
    """Chunks `first_chunk` to `last_chunk` of every row; `memory [N, state]` goes from the state before to that after.

    `with_starts`: every `every`-th chunk's start is written to `kept [N, num_kept, state]`. Chunks from `last_end` on leave
    the state alone.
    """
    row = tl.program_id(0).to(tl.int64)
    everything = Inputs(
        phi_k,
        base_k,
        step_k,
        target,
        phi_q,
        base_q,
        output_start,
        gram_kk,
        gram_qk,
        a,
        a_before,
        a_end,
        m,
        m_before,
        m_end,
        beta_end,
        weights,
        end_weights,
        end_momentum,
        accumulated,
        sizes,
        end_sizes,
    )
    memory += row * plan.state_size
    work = scratch + row * plan.at.end
    history = precise + row * plan.history_size
    start = output_start + row // rows_per_head * plan.output_size
    for chunk in tl.range(first_chunk, last_chunk, disable_licm=True):
        inputs = at_chunk(everything, row, chunk, num_chunks, plan)
        if with_starts:  # noqa: SIM102 (the first is decided when it is compiled)
            if (chunk - first_chunk) % every == 0:
                place = row * num_kept + (chunk - first_chunk) // every
                keep(memory, kept + place * plan.state_size, plan, 1024)
        if with_outputs:
            take_chunk(inputs, memory, start, work, history, plan, True)
            outputs(inputs, memory, start, work, y + (row * num_chunks + chunk) * plan.chunk * plan.value_dim, plan)
        elif chunk < last_end:
            take_chunk(inputs, memory, start, work, history, plan, False)
        if chunk < last_end:
            tl.debug_barrier()
            weigh_errors(inputs, work, plan)
            tl.debug_barrier()
            end_of_chunk(inputs, memory, work, plan)
        tl.debug_barrier()
