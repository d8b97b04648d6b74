"""Gradients of a chunk's reads and of its end, the first half of its way back.

Legend: as in `plan.py`; `dy [b, V]` is the gradient by the chunk's outputs, `d_memory` that by the state after the chunk,
laid out as the state; `grads` collects the gradients by the inputs, all from the chunk at hand on.
"""

import triton
import triton.language as tl

from .chunk import load_step, read_weights, selection, source_index
from .muon import end_of_steps_backward
from .tiles import (
    add_to_tile,
    add_to_vector,
    dot,
    gelu,
    gelu_slopes,
    load_tile,
    load_vector,
    rows_by_columns,
    rows_by_rows,
    store_tile,
    zeros,
)


@triton.jit(noinline=True)
def attention_backward(
    inputs,
    grads,
    gram,
    d_gram,
    grad,
    errors,
    d_errors,
    num_columns: tl.constexpr,
    tile: tl.constexpr,
    plan: tl.constexpr,
):
    """Of `-(weights * gram) errors`, whose gradient is `grad [b, columns]`: `d_errors` is set, `d_gram` added to."""
    source, exist, token, _ = source_index(plan)
    position = tl.arange(0, plan.chunk_pad)
    positions = position < plan.chunk
    weights = read_weights(inputs, gram, plan)
    for first in range(0, num_columns, tile):
        column = first + tl.arange(0, tile)
        columns = column < num_columns
        by_read = load_tile(grad, position, positions, column, columns, num_columns)
        by_error = -dot(tl.trans(weights), by_read, zeros(plan.source_pad, tile), plan)
        store_tile(d_errors, source, exist, column, columns, num_columns, by_error)
    d_weights = zeros(plan.chunk_pad, plan.source_pad)
    d_weights = -rows_by_rows(d_weights, grad, position, positions, errors, source, exist, num_columns, plan)
    spread = load_tile(gram, position, positions, token, exist, plan.view)
    add_to_tile(grads.weights, position, positions, source, exist, plan.sources, d_weights * spread)
    d_weights *= load_tile(inputs.weights, position, positions, source, exist, plan.sources)
    by_gram = dot(d_weights, tl.trans(selection(plan)), zeros(plan.chunk_pad, plan.view_pad), plan)
    view = tl.arange(0, plan.view_pad)
    add_to_tile(d_gram, position, positions, view, view < plan.view, plan.view, by_gram)


@triton.jit(noinline=True)
def output_reads_backward(inputs, grads, memory, start, work, dy, plan: tl.constexpr):
    """By what was read, and, of a deep memory, on to the reads' pre-activations and the stepped activations of the keys."""
    token = tl.arange(0, plan.view_pad)
    exist = token < plan.view
    position = tl.arange(0, plan.chunk_pad)
    positions = position < plan.chunk
    z = inputs.phi_q
    if plan.deep:
        z = work + plan.at.z
    a = load_vector(inputs.a, position, positions)
    d_a = zeros(plan.chunk_pad)
    d_m = zeros(plan.chunk_pad)
    for first in range(0, plan.entry_dim, plan.entry_tile):
        unit = first + tl.arange(0, plan.entry_tile)
        units = unit < plan.entry_dim
        zero = zeros(plan.chunk_pad, plan.entry_tile)
        read = load_tile(z, position, positions, unit, units, plan.entry_dim)
        back = rows_by_columns(zero, dy, position, positions, plan.value_dim, memory, unit, units, plan.entry_dim, plan)
        d_a += tl.sum(read * back, 1)
        dz = a[:, None] * back
        if plan.carry:
            momentum = memory + plan.output_size + plan.hidden_size
            back = rows_by_columns(
                zero, dy, position, positions, plan.value_dim, momentum, unit, units, plan.entry_dim, plan
            )
            d_m -= tl.sum(read * back, 1)
            dz -= load_vector(inputs.m, position, positions)[:, None] * back
        if plan.deep:
            if plan.to_init:
                dz = rows_by_columns(
                    dz, dy, position, positions, plan.value_dim, start, unit, units, plan.entry_dim, plan
                )
            d_gram = load_tile(work + plan.at.d_gram_q, position, positions, token, exist, plan.view)
            x = load_tile(work + plan.at.x, token, exist, unit, units, plan.entry_dim)
            dz = dot(d_gram, x * load_step(inputs, work, plan)[:, None], dz, plan)
            d_stepped = dot(tl.trans(d_gram), read, zeros(plan.view_pad, plan.entry_tile), plan)
            store_tile(work + plan.at.d_stepped, token, exist, unit, units, plan.entry_dim, d_stepped)
            activations_of_queries_backward(grads, work, dz, unit, units, plan)
        else:
            store_tile(grads.phi_q, position, positions, unit, units, plan.features, dz)
            none = zeros(plan.view_pad, plan.entry_tile)
            store_tile(work + plan.at.d_stepped, token, exist, unit, units, plan.entry_dim, none)
    add_to_vector(grads.a, position, positions, d_a)
    if plan.carry:
        add_to_vector(grads.m, position, positions, d_m)
    if plan.to_init and not plan.deep:
        for first in range(0, plan.value_dim, plan.value_tile):
            value = first + tl.arange(0, plan.value_tile)
            values = value < plan.value_dim
            grad = load_tile(dy, position, positions, value, values, plan.value_dim)
            store_tile(grads.base_q, position, positions, value, values, plan.value_dim, grad)


@triton.jit
def activations_of_queries_backward(grads, work, dz, unit, units, plan: tl.constexpr):
    """Some units' gradient by the pre-activations from that by the activations, `dz`."""
    position = tl.arange(0, plan.chunk_pad)
    positions = position < plan.chunk
    hidden = load_tile(work + plan.at.hidden_q, position, positions, unit, units, plan.stacked)
    slope, _ = gelu_slopes(hidden)
    if plan.groups == 2:
        other = unit + plan.hidden_dim
        factor = load_tile(work + plan.at.hidden_q, position, positions, other, units, plan.stacked)
        slope *= factor
        grad = dz * gelu(hidden)
        store_tile(work + plan.at.d_hidden_q, position, positions, other, units, plan.stacked, grad)
        if plan.to_init:
            store_tile(grads.base_q, position, positions, other, units, plan.stacked, grad)
    grad = dz * slope
    store_tile(work + plan.at.d_hidden_q, position, positions, unit, units, plan.stacked, grad)
    if plan.to_init:
        store_tile(grads.base_q, position, positions, unit, units, plan.stacked, grad)


@triton.jit(noinline=True)
def hidden_reads_backward(inputs, grads, memory, work, plan: tl.constexpr):
    """By the queries' features, `a` and `m`, from the gradient by the reads' pre-activations."""
    position = tl.arange(0, plan.chunk_pad)
    positions = position < plan.chunk
    a = load_vector(inputs.a, position, positions)
    matrix = memory + plan.output_size
    grad = work + plan.at.d_hidden_q
    d_a = zeros(plan.chunk_pad)
    d_m = zeros(plan.chunk_pad)
    for first in range(0, plan.features, plan.feature_tile):
        feature = first + tl.arange(0, plan.feature_tile)
        features = feature < plan.features
        zero = zeros(plan.chunk_pad, plan.feature_tile)
        phi = load_tile(inputs.phi_q, position, positions, feature, features, plan.features)
        back = rows_by_columns(
            zero, grad, position, positions, plan.stacked, matrix, feature, features, plan.features, plan
        )
        d_a += tl.sum(phi * back, 1)
        d_phi = a[:, None] * back
        if plan.carry:
            momentum = memory + 2 * plan.output_size + plan.hidden_size
            back = rows_by_columns(
                zero, grad, position, positions, plan.stacked, momentum, feature, features, plan.features, plan
            )
            d_m -= tl.sum(phi * back, 1)
            d_phi -= load_vector(inputs.m, position, positions)[:, None] * back
        store_tile(grads.phi_q, position, positions, feature, features, plan.features, d_phi)
    add_to_vector(grads.a, position, positions, d_a)
    if plan.carry:
        add_to_vector(grads.m, position, positions, d_m)


@triton.jit
def end_of_matrix_backward(
    d_weights,
    weights,
    sign,
    d_matrix,
    entry,
    step,
    errors,
    d_errors,
    num_rows: tl.constexpr,
    num_columns: tl.constexpr,
    tile: tl.constexpr,
    plan: tl.constexpr,
):
    """Of `sign sum_p weights_p e_p x_i(p)^T`: by the weights (added) and the errors (added)."""
    source, exist, _, _ = source_index(plan)
    token = tl.arange(0, plan.view_pad)
    view = token < plan.view
    spread = tl.trans(selection(plan))
    weight = load_vector(weights, source, exist)
    d_weight = zeros(plan.source_pad)
    for first in range(0, num_rows, tile):
        row = first + tl.arange(0, tile)
        rows = row < num_rows
        by_token = zeros(plan.view_pad, tile)
        by_token = rows_by_rows(by_token, entry, token, view, d_matrix, row, rows, num_columns, plan)
        by_source = dot(spread, by_token * (sign * step)[:, None], zeros(plan.source_pad, tile), plan)
        d_weight += tl.sum(by_source * load_tile(errors, source, exist, row, rows, num_rows), 1)
        add_to_tile(d_errors, source, exist, row, rows, num_rows, by_source * weight[:, None])
    add_to_vector(d_weights, source, exist, d_weight)


@triton.jit(noinline=True)
def end_of_output_backward(inputs, grads, d_memory, work, plan: tl.constexpr):
    """Of the output matrix after the chunk: by the errors, their weights, and what it reads of the keys, times its step."""
    token = tl.arange(0, plan.view_pad)
    exist = token < plan.view
    entry = inputs.phi_k
    if plan.deep:
        entry = work + plan.at.x
    step = load_step(inputs, work, plan)
    momentum = d_memory + plan.output_size + plan.hidden_size
    errors = work + plan.at.errors
    d_errors = work + plan.at.d_errors
    if plan.muon_output:
        end_of_steps_backward(
            inputs, grads, d_memory, entry, work + plan.at.steps, work + plan.at.d_steps, plan.output_rate,
            plan.value_dim, plan.entry_dim, plan.value_tile, plan,
        )  # fmt: skip
    else:
        end_of_matrix_backward(
            grads.end_weights, inputs.end_weights, -1.0, d_memory, entry, step, errors, d_errors,
            plan.value_dim, plan.entry_dim, plan.value_tile, plan,
        )  # fmt: skip
    if plan.carry:
        tl.debug_barrier()
        end_of_matrix_backward(
            grads.end_momentum, inputs.end_momentum, 1.0, momentum, entry, step, errors, d_errors,
            plan.value_dim, plan.entry_dim, plan.value_tile, plan,
        )  # fmt: skip
    for first in range(0, plan.entry_dim, plan.entry_tile):
        unit = first + tl.arange(0, plan.entry_tile)
        units = unit < plan.entry_dim
        ends = work + plan.at.end_errors
        grad = zeros(plan.view_pad, plan.entry_tile)
        grad = -rows_by_columns(grad, ends, token, exist, plan.value_dim, d_memory, unit, units, plan.entry_dim, plan)
        if plan.carry:
            lasts = work + plan.at.last_errors
            grad = rows_by_columns(
                grad, lasts, token, exist, plan.value_dim, momentum, unit, units, plan.entry_dim, plan
            )
        add_to_tile(work + plan.at.d_stepped, token, exist, unit, units, plan.entry_dim, grad)


@triton.jit(noinline=True)
def end_of_hidden_backward(inputs, grads, d_memory, work, plan: tl.constexpr):
    """Of the hidden matrices after the chunk: by the errors, their weights, and the keys' features."""
    token = tl.arange(0, plan.view_pad)
    exist = token < plan.view
    d_matrix = d_memory + plan.output_size
    momentum = d_matrix + plan.output_size + plan.hidden_size
    step = zeros(plan.view_pad) + 1.0
    errors = work + plan.at.hidden_errors
    d_errors = work + plan.at.d_hidden_errors
    if plan.muon_hidden:
        end_of_steps_backward(
            inputs, grads, d_matrix, inputs.phi_k, work + plan.at.hidden_steps, work + plan.at.d_hidden_steps,
            plan.hidden_rate, plan.stacked, plan.features, plan.hidden_tile, plan,
        )  # fmt: skip
    else:
        end_of_matrix_backward(
            grads.end_weights, inputs.end_weights, -1.0, d_matrix, inputs.phi_k, step, errors, d_errors,
            plan.stacked, plan.features, plan.hidden_tile, plan,
        )  # fmt: skip
    if plan.carry:
        tl.debug_barrier()
        end_of_matrix_backward(
            grads.end_momentum, inputs.end_momentum, 1.0, momentum, inputs.phi_k, step, errors, d_errors,
            plan.stacked, plan.features, plan.hidden_tile, plan,
        )  # fmt: skip
    for first in range(0, plan.features, plan.feature_tile):
        feature = first + tl.arange(0, plan.feature_tile)
        features = feature < plan.features
        ends = work + plan.at.end_hidden_errors
        grad = zeros(plan.view_pad, plan.feature_tile)
        grad = -rows_by_columns(
            grad, ends, token, exist, plan.stacked, d_matrix, feature, features, plan.features, plan
        )
        if plan.carry:
            lasts = work + plan.at.last_hidden_errors
            grad = rows_by_columns(
                grad, lasts, token, exist, plan.stacked, momentum, feature, features, plan.features, plan
            )
        add_to_tile(grads.phi_k, token, exist, feature, features, plan.features, grad)
