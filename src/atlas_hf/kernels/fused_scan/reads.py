"""The reads of a chunk, and its errors as its end weighs them.

Legend: as in `plan.py` and `chunk.py`.
"""

import triton
import triton.language as tl

from .chunk import load_step, read_weights, source_index, weigh
from .muon import combine_steps, read_steps
from .tiles import dot, gelu, load_tile, load_vector, rows_by_rows, store_tile, zeros


@triton.jit(noinline=True)
def hidden_of_queries(inputs, memory, work, plan: tl.constexpr):
    """Pre-activations of the reads: the hidden matrices as written by each read's own token."""
    source, exist, _, _ = source_index(plan)
    position = tl.arange(0, plan.chunk_pad)
    positions = position < plan.chunk
    a = load_vector(inputs.a, position, positions)
    matrix = memory + plan.output_size
    for first in range(0, plan.stacked, plan.hidden_tile):
        unit = first + tl.arange(0, plan.hidden_tile)
        units = unit < plan.stacked
        zero = zeros(plan.chunk_pad, plan.hidden_tile)
        if plan.muon_hidden:
            steps = work + plan.at.hidden_steps
            hidden = -read_steps(
                inputs, inputs.gram_qk, steps, plan.hidden_rate, unit, units, plan.stacked, plan.hidden_tile, plan
            )
        else:
            errors = load_tile(work + plan.at.hidden_errors, source, exist, unit, units, plan.stacked)
            hidden = -dot(read_weights(inputs, inputs.gram_qk, plan), errors, zero, plan)
        moved = rows_by_rows(zero, inputs.phi_q, position, positions, matrix, unit, units, plan.features, plan)
        hidden += a[:, None] * moved
        if plan.carry:
            momentum = memory + 2 * plan.output_size + plan.hidden_size
            m = load_vector(inputs.m, position, positions)
            carried = rows_by_rows(zero, inputs.phi_q, position, positions, momentum, unit, units, plan.features, plan)
            hidden -= m[:, None] * carried
        if plan.to_init:
            hidden += load_tile(inputs.base_q, position, positions, unit, units, plan.stacked)
        store_tile(work + plan.at.hidden_q, position, positions, unit, units, plan.stacked, hidden)


@triton.jit(noinline=True)
def activations_of_queries(inputs, work, plan: tl.constexpr):
    """Activations of the reads, and their inner products with those of the keys."""
    token = tl.arange(0, plan.view_pad)
    exist = token < plan.view
    position = tl.arange(0, plan.chunk_pad)
    positions = position < plan.chunk
    gram = zeros(plan.chunk_pad, plan.view_pad)
    for first in range(0, plan.hidden_dim, plan.hidden_tile):
        unit = first + tl.arange(0, plan.hidden_tile)
        units = unit < plan.hidden_dim
        z = gelu(load_tile(work + plan.at.hidden_q, position, positions, unit, units, plan.stacked))
        if plan.groups == 2:
            z *= load_tile(work + plan.at.hidden_q, position, positions, unit + plan.hidden_dim, units, plan.stacked)
        store_tile(work + plan.at.z, position, positions, unit, units, plan.hidden_dim, z)
        x = load_tile(work + plan.at.x, token, exist, unit, units, plan.hidden_dim)
        gram = dot(z, tl.trans(x), gram, plan)
    gram *= load_step(inputs, work, plan)[None, :]
    store_tile(work + plan.at.gram_q, position, positions, token, exist, plan.view, gram)


@triton.jit(noinline=True)
def outputs(inputs, memory, start, work, y, plan: tl.constexpr):
    """Reads of the output matrix, as written by each read's own token: `y [b, V]`."""
    source, exist, _, _ = source_index(plan)
    position = tl.arange(0, plan.chunk_pad)
    positions = position < plan.chunk
    a = load_vector(inputs.a, position, positions)
    z = inputs.phi_q
    gram = inputs.gram_qk
    if plan.deep:
        z = work + plan.at.z
        gram = work + plan.at.gram_q
    for first in range(0, plan.value_dim, plan.value_tile):
        value = first + tl.arange(0, plan.value_tile)
        values = value < plan.value_dim
        zero = zeros(plan.chunk_pad, plan.value_tile)
        if plan.muon_output:
            steps = work + plan.at.steps
            total = -read_steps(
                inputs, gram, steps, plan.output_rate, value, values, plan.value_dim, plan.value_tile, plan
            )
        else:
            errors = load_tile(work + plan.at.errors, source, exist, value, values, plan.value_dim)
            total = -dot(read_weights(inputs, gram, plan), errors, zero, plan)
        total += a[:, None] * rows_by_rows(zero, z, position, positions, memory, value, values, plan.entry_dim, plan)
        if plan.carry:
            momentum = memory + plan.output_size + plan.hidden_size
            m = load_vector(inputs.m, position, positions)
            total -= m[:, None] * rows_by_rows(
                zero, z, position, positions, momentum, value, values, plan.entry_dim, plan
            )
        if plan.to_init:
            if plan.deep:
                total = rows_by_rows(total, z, position, positions, start, value, values, plan.entry_dim, plan)
            else:
                total += load_tile(inputs.base_q, position, positions, value, values, plan.value_dim)
        store_tile(y, position, positions, value, values, plan.value_dim, total)


@triton.jit(noinline=True)
def weigh_errors(inputs, work, plan: tl.constexpr):
    """All errors as the chunk's end weighs them."""
    errors = work + plan.at.errors
    if plan.muon_output:
        result = work + plan.at.end_errors
        combine_steps(inputs, work + plan.at.steps, plan.output_rate, result, plan.value_dim, plan.value_tile, plan)
    else:
        weigh(inputs.end_weights, errors, work + plan.at.end_errors, plan.value_dim, plan.value_tile, plan)
    if plan.carry:
        weigh(inputs.end_momentum, errors, work + plan.at.last_errors, plan.value_dim, plan.value_tile, plan)
    if plan.muon_hidden:
        result = work + plan.at.end_hidden_errors
        combine_steps(
            inputs, work + plan.at.hidden_steps, plan.hidden_rate, result, plan.stacked, plan.hidden_tile, plan
        )
    elif plan.deep:
        errors = work + plan.at.hidden_errors
        weigh(inputs.end_weights, errors, work + plan.at.end_hidden_errors, plan.stacked, plan.hidden_tile, plan)
        if plan.carry:
            weigh(inputs.end_momentum, errors, work + plan.at.last_hidden_errors, plan.stacked, plan.hidden_tile, plan)
