"""Gradients of a chunk's errors and activations, the second half of its way back.

Legend: as in `plan.py` and `gradients_reads.py`.
"""

import triton
import triton.language as tl

from .chunk import errors_back, load_step, load_step_of, selection, source_index
from .pairs import BLOCK
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
def hidden_errors_backward(inputs, grads, memory, start, work, plan: tl.constexpr):
    """By the slopes, the hidden matrices' step, and the back-propagated errors."""
    source, exist, token, _ = source_index(plan)
    view = tl.arange(0, plan.view_pad)
    in_view = view < plan.view
    gathered = selection(plan)
    scale = load_vector(work + plan.at.scale, view, in_view)
    scale_of_source = load_vector(work + plan.at.scale, token, exist)
    d_scale = zeros(plan.view_pad)
    groups: tl.constexpr = plan.groups
    for first in range(0, plan.hidden_dim, plan.hidden_tile):
        unit = first + tl.arange(0, plan.hidden_tile)
        units = unit < plan.hidden_dim
        back = errors_back(memory, start, work, unit, units, plan)
        d_back = zeros(plan.source_pad, plan.hidden_tile)
        for group in tl.static_range(groups):
            place = unit + group * plan.hidden_dim
            grad = load_tile(work + plan.at.d_hidden_errors, source, exist, place, units, plan.stacked)
            slope = load_tile(work + plan.at.slope, token, exist, place, units, plan.stacked)
            d_back += grad * slope
            d_scaled = dot(gathered, grad * back, zeros(plan.view_pad, plan.hidden_tile), plan)
            slope = load_tile(work + plan.at.slope, view, in_view, place, units, plan.stacked)
            d_scale += tl.sum(d_scaled * slope, 1)
            store_tile(work + plan.at.d_slope, view, in_view, place, units, plan.stacked, d_scaled * scale[:, None])
        d_back *= scale_of_source[:, None]
        store_tile(work + plan.at.d_back, source, exist, unit, units, plan.hidden_dim, d_back)
    if plan.norm:
        step = load_vector(inputs.step_k, view, in_view)
        add_to_vector(grads.step_k, view, in_view, d_scale * scale / tl.where(in_view, step, 1.0))
        gain = load_vector(work + plan.at.gain, view, in_view)
        d_gain = tl.where(gain >= 1.0, -d_scale * scale / tl.maximum(gain, 1.0), 0.0)
        tl.store(work + plan.at.d_gain + view, d_gain, mask=in_view)


@triton.jit(noinline=True)
def back_propagation_backward(memory, start, work, plan: tl.constexpr):
    """By the errors that were back-propagated through `W_1`, added."""
    source = tl.arange(0, plan.source_pad)
    exist = source < plan.sources
    grad = work + plan.at.d_back
    for first in range(0, plan.value_dim, plan.value_tile):
        value = first + tl.arange(0, plan.value_tile)
        values = value < plan.value_dim
        total = zeros(plan.source_pad, plan.value_tile)
        total = rows_by_rows(total, grad, source, exist, memory, value, values, plan.hidden_dim, plan)
        if plan.to_init:
            total = rows_by_rows(total, grad, source, exist, start, value, values, plan.hidden_dim, plan)
        add_to_tile(work + plan.at.d_errors, source, exist, value, values, plan.value_dim, total)


@triton.jit(noinline=True)
def system_backward(inputs, grads, gram, d_gram, work, plan: tl.constexpr):
    """Of the pairs' system, whose place its gradient takes: by the weights, and by the tokens' inner products, added."""
    source, exist, token, write = source_index(plan)
    local = tl.arange(0, BLOCK)
    errors = work + plan.at.errors
    for first in range(0, plan.sources, BLOCK):
        row = first + local
        rows = row < plan.sources
        grad = zeros(BLOCK, plan.source_pad)
        grad = rows_by_rows(grad, work + plan.at.d_errors, row, rows, errors, source, exist, plan.value_dim, plan)
        grad = tl.where(write[None, :] < (row // plan.window)[:, None], -grad, 0.0)
        store_tile(work + plan.at.system, row, rows, source, exist, plan.sources, grad)
    tl.debug_barrier()
    position = tl.arange(0, plan.chunk_pad)
    of_write = tl.where((position[:, None] + 1 == write[None, :]) & exist[None, :], 1.0, 0.0)
    view = tl.arange(0, plan.view_pad)
    by_gram = zeros(plan.view_pad, plan.view_pad)
    for first in range(0, plan.sources, BLOCK):
        column = first + local
        columns = column < plan.sources
        column_token = column // plan.window + column % plan.window
        grad = load_tile(work + plan.at.system, source, exist, column, columns, plan.sources)
        inner = load_tile(gram, token, exist, column_token, columns, plan.view)
        by_weight = dot(of_write, grad * inner, zeros(plan.chunk_pad, BLOCK), plan)
        add_to_tile(grads.weights, position, position < plan.chunk, column, columns, plan.sources, by_weight)
        weights = load_tile(inputs.weights, write - 1, exist & (write > 0), column, columns, plan.sources)
        by_token = dot(selection(plan), grad * weights, zeros(plan.view_pad, BLOCK), plan)
        of_token = tl.where((column_token[:, None] == view[None, :]) & columns[:, None], 1.0, 0.0)
        by_gram = dot(by_token, of_token, by_gram, plan)
    add_to_tile(d_gram, view, view < plan.view, view, view < plan.view, plan.view, by_gram)


@triton.jit(noinline=True)
def first_errors_backward(inputs, grads, work, plan: tl.constexpr):
    """By the targets, and by the predictions of start, `D_1` and `S_1`, which the scratch memory takes."""
    source, exist, token, write = source_index(plan)
    view = tl.arange(0, plan.view_pad)
    in_view = view < plan.view
    gathered = selection(plan)
    d_a = zeros(plan.source_pad)
    d_m = zeros(plan.source_pad)
    for first in range(0, plan.value_dim, plan.value_tile):
        value = first + tl.arange(0, plan.value_tile)
        values = value < plan.value_dim
        grad = load_tile(work + plan.at.d_errors, source, exist, value, values, plan.value_dim)
        zero = zeros(plan.view_pad, plan.value_tile)
        d_begin = dot(gathered, grad, zero, plan)
        add_to_tile(grads.target, view, in_view, value, values, plan.value_dim, -d_begin)
        if not plan.hebbian:
            d_moved = d_begin
            if plan.exact:
                moved = load_tile(work + plan.at.moved, token, exist, value, values, plan.value_dim)
                d_a += tl.sum(grad * moved, 1)
                a = load_vector(inputs.a_before, write, exist)
                d_moved = dot(gathered, grad * a[:, None], zero, plan)
                if plan.carry:
                    carried = load_tile(work + plan.at.carried, token, exist, value, values, plan.value_dim)
                    d_m -= tl.sum(grad * carried, 1)
                    m = load_vector(inputs.m_before, write, exist)
                    d_carried = -dot(gathered, grad * m[:, None], zero, plan)
                    store_tile(work + plan.at.d_carried, view, in_view, value, values, plan.value_dim, d_carried)
            store_tile(work + plan.at.d_begin, view, in_view, value, values, plan.value_dim, d_begin)
            store_tile(work + plan.at.d_moved, view, in_view, value, values, plan.value_dim, d_moved)
            if plan.to_init and not plan.deep:
                add_to_tile(grads.base_k, view, in_view, value, values, plan.value_dim, d_begin)
    if plan.exact:
        position = tl.arange(0, plan.chunk_pad)
        of_write = (position[:, None] == write[None, :]) & exist[None, :]
        by_write = tl.sum(tl.where(of_write, d_a[None, :], 0.0), 1)
        add_to_vector(grads.a_before, position, position < plan.chunk, by_write)
        if plan.carry:
            by_write = tl.sum(tl.where(of_write, d_m[None, :], 0.0), 1)
            add_to_vector(grads.m_before, position, position < plan.chunk, by_write)


@triton.jit(noinline=True)
def entry_backward(inputs, grads, memory, start, work, plan: tl.constexpr):
    """By what the output matrix reads of the keys, but for the part through its step's size, and by that step."""
    token = tl.arange(0, plan.view_pad)
    exist = token < plan.view
    entry = inputs.phi_k
    if plan.deep:
        entry = work + plan.at.x
    step = load_step(inputs, work, plan)
    d_step = zeros(plan.view_pad)
    for first in range(0, plan.entry_dim, plan.entry_tile):
        unit = first + tl.arange(0, plan.entry_tile)
        units = unit < plan.entry_dim
        dx = zeros(plan.view_pad, plan.entry_tile)
        x = load_tile(entry, token, exist, unit, units, plan.entry_dim)
        d_stepped = load_tile(work + plan.at.d_stepped, token, exist, unit, units, plan.entry_dim)
        if not plan.hebbian:
            grad = work + plan.at.d_moved
            dx = rows_by_columns(dx, grad, token, exist, plan.value_dim, memory, unit, units, plan.entry_dim, plan)
            if plan.deep and plan.to_init:
                grad = work + plan.at.d_begin
                dx = rows_by_columns(dx, grad, token, exist, plan.value_dim, start, unit, units, plan.entry_dim, plan)
            if plan.exact and plan.carry:
                grad = work + plan.at.d_carried
                momentum = memory + plan.output_size + plan.hidden_size
                dx = rows_by_columns(
                    dx, grad, token, exist, plan.value_dim, momentum, unit, units, plan.entry_dim, plan
                )
        if plan.deep and (plan.exact or plan.muon_output):
            d_gram = work + plan.at.d_gram
            for begin in range(0, plan.view, plan.inner_tile):
                other = begin + tl.arange(0, plan.inner_tile)
                others = other < plan.view
                right = load_tile(work + plan.at.x, other, others, unit, units, plan.entry_dim)
                left = load_tile(d_gram, other, others, token, exist, plan.view)
                d_stepped = dot(tl.trans(left), right, d_stepped, plan)
                right *= load_step_of(inputs, work, other, others, plan)[:, None]
                dx = dot(load_tile(d_gram, token, exist, other, others, plan.view), right, dx, plan)
        if not plan.muon_output:
            d_step += tl.sum(d_stepped * x, 1)
        dx += d_stepped * step[:, None]
        if plan.deep:
            store_tile(work + plan.at.d_x, token, exist, unit, units, plan.entry_dim, dx)
        else:
            add_to_tile(grads.phi_k, token, exist, unit, units, plan.features, dx)
    if not plan.muon_output:
        if plan.deep:
            tl.store(work + plan.at.d_step + token, d_step, mask=exist)
        elif plan.norm:
            add_to_vector(grads.step_k, token, exist, d_step)


@triton.jit(noinline=True)
def activations_of_keys_backward(grads, work, plan: tl.constexpr):
    """By the pre-activations of the keys, from the gradients by activations, slopes, step and gain."""
    token = tl.arange(0, plan.view_pad)
    exist = token < plan.view
    step = load_vector(work + plan.at.step, token, exist)
    through_step = zeros(plan.view_pad)
    d_gain = zeros(plan.view_pad)
    if plan.norm:
        through_step = -2.0 * load_vector(work + plan.at.d_step, token, exist) * step * step
        d_gain = load_vector(work + plan.at.d_gain, token, exist)
    for first in range(0, plan.hidden_dim, plan.hidden_tile):
        unit = first + tl.arange(0, plan.hidden_tile)
        units = unit < plan.hidden_dim
        x = load_tile(work + plan.at.x, token, exist, unit, units, plan.hidden_dim)
        dx = load_tile(work + plan.at.d_x, token, exist, unit, units, plan.hidden_dim) + through_step[:, None] * x
        hidden = load_tile(work + plan.at.hidden_k, token, exist, unit, units, plan.stacked)
        slope = load_tile(work + plan.at.slope, token, exist, unit, units, plan.stacked)
        d_slope = load_tile(work + plan.at.d_slope, token, exist, unit, units, plan.stacked)
        columns = zeros(plan.hidden_tile)
        d_columns = zeros(plan.hidden_tile)
        if plan.norm:
            columns = load_vector(work + plan.at.columns, unit, units)
            d_slope += 2.0 * columns[None, :] * slope * d_gain[:, None]
            d_columns += tl.sum(slope * slope * d_gain[:, None], 0)
        first_slope, second_slope = gelu_slopes(hidden)
        if plan.groups == 1:
            grad = dx * first_slope + d_slope * second_slope
        else:
            other = unit + plan.hidden_dim
            factor = load_tile(work + plan.at.hidden_k, token, exist, other, units, plan.stacked)
            d_other = load_tile(work + plan.at.d_slope, token, exist, other, units, plan.stacked)
            value = gelu(hidden)
            if plan.norm:
                d_other += 2.0 * columns[None, :] * value * d_gain[:, None]
                d_columns += tl.sum(value * value * d_gain[:, None], 0)
            grad = dx * value + d_slope * first_slope
            store_tile(work + plan.at.d_hidden_k, token, exist, other, units, plan.stacked, grad)
            if plan.to_init:
                add_to_tile(grads.base_k, token, exist, other, units, plan.stacked, grad)
            grad = (dx * factor + d_other) * first_slope + d_slope * factor * second_slope
        if plan.norm:
            tl.store(work + plan.at.d_columns + unit, d_columns, mask=units)
        store_tile(work + plan.at.d_hidden_k, token, exist, unit, units, plan.stacked, grad)
        if plan.to_init:
            add_to_tile(grads.base_k, token, exist, unit, units, plan.stacked, grad)


@triton.jit(noinline=True)
def hidden_of_keys_backward(grads, memory, work, plan: tl.constexpr):
    """By the keys' features, from the gradient by the pre-activations."""
    token = tl.arange(0, plan.view_pad)
    exist = token < plan.view
    grad = work + plan.at.d_hidden_k
    matrix = memory + plan.output_size
    for first in range(0, plan.features, plan.feature_tile):
        feature = first + tl.arange(0, plan.feature_tile)
        features = feature < plan.features
        total = zeros(plan.view_pad, plan.feature_tile)
        total = rows_by_columns(total, grad, token, exist, plan.stacked, matrix, feature, features, plan.features, plan)
        add_to_tile(grads.phi_k, token, exist, feature, features, plan.features, total)
