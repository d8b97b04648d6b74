"""The scan backwards: one program walks the chunks of one row (head and batch) from the last to the first.

Legend: as in `plan.py` and `gradients_reads.py`; N rows, n chunks.
"""

import triton
import triton.language as tl

from .chunk import load_start
from .gradients_errors import (
    activations_of_keys_backward,
    back_propagation_backward,
    entry_backward,
    first_errors_backward,
    hidden_errors_backward,
    hidden_of_keys_backward,
    system_backward,
)
from .gradients_reads import (
    attention_backward,
    end_of_hidden_backward,
    end_of_output_backward,
    hidden_reads_backward,
    output_reads_backward,
)
from .muon import read_steps_backward, step_errors_backward, sum_errors_backward, take_steps_backward
from .pairs import solve_transposed
from .plan import COUNTS, Inputs
from .reads import weigh_errors
from .tiles import add_to_tile, dot, load_tile, load_vector, store_tile, zeros
from .walk import at_chunk, gram_of_entry, take_chunk


@triton.jit
def set_to_zero(matrix, num_rows: tl.constexpr, num_columns: tl.constexpr, plan: tl.constexpr):
    """A matrix of at most a chunk's size."""
    row = tl.arange(0, plan.view_pad)
    none = zeros(plan.view_pad, plan.view_pad)
    store_tile(matrix, row, row < num_rows, row, row < num_columns, num_columns, none)


@triton.jit(noinline=True)
def start_of_matrix_backward(
    inputs,
    grads,
    matrix,
    momentum,
    d_matrix,
    d_momentum,
    read_grad,
    read,
    key_grad,
    carried_grad,
    key,
    taken,
    num_rows: tl.constexpr,
    num_columns: tl.constexpr,
    row_tile: tl.constexpr,
    column_tile: tl.constexpr,
    keys_see: tl.constexpr,
    momentum_sees: tl.constexpr,
    plan: tl.constexpr,
):
    """The gradient by a matrix `[rows, columns]` and its momentum: from after the chunk to before it, in place.

    Reads `a_t D z_t` had the gradients `read_grad [b, rows]` at `read [b, columns]`; `key_grad`, `carried_grad [R, rows]` are
    those of `D x`, `S x` at `key [R, columns]`. `taken`: whether the chunk's end was.
    """
    token = tl.arange(0, plan.view_pad)
    exist = token < plan.view
    position = tl.arange(0, plan.chunk_pad)
    positions = position < plan.chunk
    a = load_vector(inputs.a, position, positions)
    a_end = 1.0
    m_end = 0.0
    beta_end = 1.0
    if taken:
        a_end = tl.load(inputs.a_end)
        if plan.carry:
            m_end = tl.load(inputs.m_end)
            beta_end = tl.load(inputs.beta_end)
    d_a = zeros(column_tile)
    d_m = zeros(column_tile)
    d_beta = zeros(column_tile)
    for first in range(0, num_rows, row_tile):
        row = first + tl.arange(0, row_tile)
        rows = row < num_rows
        by_read = load_tile(read_grad, position, positions, row, rows, num_rows)
        for begin in range(0, num_columns, column_tile):
            column = begin + tl.arange(0, column_tile)
            columns = column < num_columns
            zero = zeros(row_tile, column_tile)
            z = load_tile(read, position, positions, column, columns, num_columns)
            after = load_tile(d_matrix, row, rows, column, columns, num_columns)
            d_a += tl.sum(after * load_tile(matrix, row, rows, column, columns, num_columns), 0)
            grad = dot(tl.trans(by_read * a[:, None]), z, a_end * after, plan)
            if keys_see:
                x = load_tile(key, token, exist, column, columns, num_columns)
                by_key = load_tile(key_grad, token, exist, row, rows, num_rows)
                grad = dot(tl.trans(by_key), x, grad, plan)
            if plan.carry:
                m = load_vector(inputs.m, position, positions)
                carried = load_tile(momentum, row, rows, column, columns, num_columns)
                last = load_tile(d_momentum, row, rows, column, columns, num_columns)
                d_m -= tl.sum(after * carried, 0)
                d_beta += tl.sum(last * carried, 0)
                by_momentum = beta_end * last - m_end * after - dot(tl.trans(by_read * m[:, None]), z, zero, plan)
                if momentum_sees:
                    x = load_tile(key, token, exist, column, columns, num_columns)
                    by_key = load_tile(carried_grad, token, exist, row, rows, num_rows)
                    by_momentum = dot(tl.trans(by_key), x, by_momentum, plan)
                store_tile(d_momentum, row, rows, column, columns, num_columns, by_momentum)
            store_tile(d_matrix, row, rows, column, columns, num_columns, grad)
    if taken:
        tl.store(grads.a_end, tl.load(grads.a_end) + tl.sum(d_a, 0))
        if plan.carry:
            tl.store(grads.m_end, tl.load(grads.m_end) + tl.sum(d_m, 0))
            tl.store(grads.beta_end, tl.load(grads.beta_end) + tl.sum(d_beta, 0))


@triton.jit(noinline=True)
def start_of_output_backward(d_memory, d_start, memory, start, work, dy, plan: tl.constexpr):
    """By the output matrix as the hidden errors went back through it (to delta and start), and by `W_1` itself."""
    token = tl.arange(0, plan.view_pad)
    exist = token < plan.view
    source = tl.arange(0, plan.source_pad)
    sources = source < plan.sources
    position = tl.arange(0, plan.chunk_pad)
    positions = position < plan.chunk
    for first in range(0, plan.value_dim, plan.value_tile):
        value = first + tl.arange(0, plan.value_tile)
        values = value < plan.value_dim
        errors = load_tile(work + plan.at.errors, source, sources, value, values, plan.value_dim)
        for begin in range(0, plan.hidden_dim, plan.hidden_tile):
            unit = begin + tl.arange(0, plan.hidden_tile)
            units = unit < plan.hidden_dim
            back = load_tile(work + plan.at.d_back, source, sources, unit, units, plan.hidden_dim)
            grad = dot(tl.trans(errors), back, zeros(plan.value_tile, plan.hidden_tile), plan)
            if plan.norm:
                d_columns = load_vector(work + plan.at.d_columns, unit, units)
                grad += 2.0 * load_start(memory, start, value, values, unit, units, plan) * d_columns[None, :]
            add_to_tile(d_memory, value, values, unit, units, plan.hidden_dim, grad)
            if plan.to_init:
                z = load_tile(work + plan.at.z, position, positions, unit, units, plan.hidden_dim)
                by_read = load_tile(dy, position, positions, value, values, plan.value_dim)
                grad = dot(tl.trans(by_read), z, grad, plan)
                if not plan.hebbian:
                    x = load_tile(work + plan.at.x, token, exist, unit, units, plan.hidden_dim)
                    by_key = load_tile(work + plan.at.d_begin, token, exist, value, values, plan.value_dim)
                    grad = dot(tl.trans(by_key), x, grad, plan)
                add_to_tile(d_start, value, values, unit, units, plan.hidden_dim, grad)


@triton.jit
def chunk_backward(inputs, grads, memory, start, work, history, dy, d_memory, d_start, taken, plan: tl.constexpr):
    """`d_memory` from after the chunk to before it; `take_chunk` has been called."""
    deep: tl.constexpr = plan.deep
    x = work + plan.at.x if deep else inputs.phi_k
    z = work + plan.at.z if deep else inputs.phi_q
    gram = work + plan.at.gram if deep else inputs.gram_kk
    d_gram = work + plan.at.d_gram if deep else grads.gram_kk
    gram_q = work + plan.at.gram_q if deep else inputs.gram_qk
    d_gram_q = work + plan.at.d_gram_q if deep else grads.gram_qk
    if deep:
        set_to_zero(d_gram_q, plan.chunk, plan.view, plan)
        set_to_zero(d_gram, plan.view, plan.view, plan)
        tl.debug_barrier()
    if plan.muon_output:
        read_steps_backward(
            inputs, grads, gram_q, d_gram_q, dy, work + plan.at.steps, work + plan.at.d_steps,
            plan.output_rate, plan.value_dim, plan.value_tile, plan,
        )  # fmt: skip
    else:
        attention_backward(
            inputs, grads, gram_q, d_gram_q, dy, work + plan.at.errors, work + plan.at.d_errors,
            plan.value_dim, plan.value_tile, plan,
        )  # fmt: skip
    tl.debug_barrier()
    output_reads_backward(inputs, grads, memory, start, work, dy, plan)
    tl.debug_barrier()
    if deep:
        if plan.muon_hidden:
            read_steps_backward(
                inputs, grads, inputs.gram_qk, grads.gram_qk, work + plan.at.d_hidden_q, work + plan.at.hidden_steps,
                work + plan.at.d_hidden_steps, plan.hidden_rate, plan.stacked, plan.hidden_tile, plan,
            )  # fmt: skip
        else:
            attention_backward(
                inputs, grads, inputs.gram_qk, grads.gram_qk, work + plan.at.d_hidden_q,
                work + plan.at.hidden_errors, work + plan.at.d_hidden_errors, plan.stacked, plan.hidden_tile, plan,
            )  # fmt: skip
        tl.debug_barrier()
        hidden_reads_backward(inputs, grads, memory, work, plan)
        tl.debug_barrier()
    if taken:
        weigh_errors(inputs, work, plan)
        tl.debug_barrier()
        end_of_output_backward(inputs, grads, d_memory, work, plan)
        if deep:
            tl.debug_barrier()
            end_of_hidden_backward(inputs, grads, d_memory, work, plan)
    tl.debug_barrier()
    if plan.muon_output:
        d_gram_x = work + plan.at.d_gram if deep else grads.gram_kk
        take_steps_backward(
            gram_of_entry(inputs, history, plan), d_gram_x, history, work + plan.at.sums, work + plan.at.d_steps,
            1, plan.value_dim, plan.value_tile, plan,
        )  # fmt: skip
        tl.debug_barrier()
        sum_errors_backward(
            inputs, grads, work + plan.at.stepped_errors, work + plan.at.d_steps, work + plan.at.d_errors,
            plan.value_dim, plan.value_tile, plan,
        )  # fmt: skip
        tl.debug_barrier()
        step_errors_backward(inputs, grads, work, plan)
        tl.debug_barrier()
    if plan.muon_hidden:
        take_steps_backward(
            inputs.gram_kk, grads.gram_kk, history, work + plan.at.hidden_sums, work + plan.at.d_hidden_steps,
            plan.groups, plan.hidden_dim, plan.hidden_tile, plan,
        )  # fmt: skip
        tl.debug_barrier()
        sum_errors_backward(
            inputs, grads, work + plan.at.hidden_errors, work + plan.at.d_hidden_steps,
            work + plan.at.d_hidden_errors, plan.stacked, plan.hidden_tile, plan,
        )  # fmt: skip
        tl.debug_barrier()
    if deep:
        hidden_errors_backward(inputs, grads, memory, start, work, plan)
        tl.debug_barrier()
        back_propagation_backward(memory, start, work, plan)
        tl.debug_barrier()
    if plan.exact:
        solve_transposed(work, plan)
        tl.debug_barrier()
        system_backward(inputs, grads, gram, d_gram, work, plan)
        tl.debug_barrier()
    first_errors_backward(inputs, grads, work, plan)
    tl.debug_barrier()
    entry_backward(inputs, grads, memory, start, work, plan)
    tl.debug_barrier()
    momentum = memory + plan.output_size + plan.hidden_size
    d_momentum = d_memory + plan.output_size + plan.hidden_size
    start_of_matrix_backward(
        inputs, grads, memory, momentum, d_memory, d_momentum, dy, z,
        work + plan.at.d_moved, work + plan.at.d_carried, x, taken,
        plan.value_dim, plan.entry_dim, plan.value_tile, plan.entry_tile, not plan.hebbian, plan.exact, plan,
    )  # fmt: skip
    if deep:
        tl.debug_barrier()
        activations_of_keys_backward(grads, work, plan)
        tl.debug_barrier()
        hidden_of_keys_backward(grads, memory, work, plan)
        tl.debug_barrier()
        start_of_output_backward(d_memory, d_start, memory, start, work, dy, plan)
        tl.debug_barrier()
        hidden_grad = work + plan.at.d_hidden_k
        start_of_matrix_backward(
            inputs, grads, memory + plan.output_size, momentum + plan.output_size, d_memory + plan.output_size,
            d_momentum + plan.output_size, work + plan.at.d_hidden_q, inputs.phi_q, hidden_grad, hidden_grad,
            inputs.phi_k, taken, plan.stacked, plan.features, plan.hidden_tile, plan.feature_tile, True, False, plan,
        )  # fmt: skip


@triton.jit(do_not_specialize=tuple(name for name in COUNTS if name != "every"))
def backward_kernel(
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
    d_phi_k,
    d_base_k,
    d_step_k,
    d_target,
    d_phi_q,
    d_base_q,
    d_output_start,
    d_gram_kk,
    d_gram_qk,
    d_a,
    d_a_before,
    d_a_end,
    d_m,
    d_m_before,
    d_m_end,
    d_beta_end,
    d_weights,
    d_end_weights,
    d_end_momentum,
    d_accumulated,
    d_sizes,
    d_end_sizes,
    kept,
    scratch,
    precise,
    dy,
    d_memory,
    first_chunk,
    last_chunk,
    last_end,
    num_chunks,
    rows_per_head,
    num_kept,
    plan: tl.constexpr,
):
    """Chunks `last_chunk` to `first_chunk` of every row; `d_memory [N, state]` goes from after them to before them.

    `kept [N, num_kept, state]` holds the state at each of these chunks' starts; `d_output_start [N, V, E]` has a part for
    each row. All gradients by inputs start from zero.
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
    every_grad = Inputs(
        d_phi_k,
        d_base_k,
        d_step_k,
        d_target,
        d_phi_q,
        d_base_q,
        d_output_start,
        d_gram_kk,
        d_gram_qk,
        d_a,
        d_a_before,
        d_a_end,
        d_m,
        d_m_before,
        d_m_end,
        d_beta_end,
        d_weights,
        d_end_weights,
        d_end_momentum,
        d_accumulated,
        d_sizes,
        d_end_sizes,
    )
    work = scratch + row * plan.at.end
    history = precise + row * plan.history_size
    start = output_start + row // rows_per_head * plan.output_size
    d_start = d_output_start + row * plan.output_size
    d_memory += row * plan.state_size
    for step in tl.range(0, last_chunk - first_chunk, disable_licm=True):
        chunk = last_chunk - 1 - step
        inputs = at_chunk(everything, row, chunk, num_chunks, plan)
        grads = at_chunk(every_grad, row, chunk, num_chunks, plan)
        memory = kept + (row * num_kept + chunk - first_chunk) * plan.state_size
        take_chunk(inputs, memory, start, work, history, plan, True)
        chunk_dy = dy + (row * num_chunks + chunk) * plan.chunk * plan.value_dim
        chunk_backward(inputs, grads, memory, start, work, history, chunk_dy, d_memory, d_start, chunk < last_end, plan)
        tl.debug_barrier()
