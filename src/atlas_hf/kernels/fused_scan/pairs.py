"""The unit lower-triangular system of the exact output errors (docs/recurrence.md, section 5), solved both ways.

A pair at write `n` sees the writes before `n`. The system is solved by blocks of 16 sources: what stands before a block is
one product, the block itself its inverse, found row by row once for all columns.

Legend: as in `plan.py`.
"""

import triton
import triton.language as tl

from .chunk import pair_errors, source_index
from .tiles import dot, load_tile, store_tile, zeros

BLOCK = tl.constexpr(16)


@triton.jit(noinline=True)
def set_up(inputs, gram, work, plan: tl.constexpr):
    """The system's part below its diagonal, and the inverses of its diagonal blocks; `gram [R, R]` of the tokens."""
    source, exist, token, write = source_index(plan)
    local = tl.arange(0, BLOCK)
    for first in range(0, plan.sources, BLOCK):
        row = first + local
        rows = row < plan.sources
        row_write = row // plan.window
        # The weight of every source's error in the memory that the row's write sees
        weights = load_tile(inputs.weights, row_write - 1, rows & (row_write > 0), source, exist, plan.sources)
        weights = tl.where(write[None, :] < row_write[:, None], weights, 0.0)
        inner = load_tile(gram, row_write + row % plan.window, rows, token, exist, plan.view)
        store_tile(work + plan.at.system, row, rows, source, exist, plan.sources, weights * inner)
    tl.debug_barrier()
    for first in range(0, plan.sources, BLOCK):
        row = first + local
        rows = row < plan.sources
        block = load_tile(work + plan.at.system, row, rows, row, rows, plan.sources)
        inverse = -block
        for i in range(2, BLOCK):
            new = -tl.sum(tl.where(local[:, None] == i, block, 0.0), 0)
            new += tl.sum(new[:, None] * inverse, 0)
            inverse = tl.where(local[:, None] == i, new[None, :], inverse)
        inverse += tl.where(local[:, None] == local[None, :], 1.0, 0.0)
        store_tile(work + plan.at.blocks, row, rows, local, local < BLOCK, BLOCK, inverse)


@triton.jit(noinline=True)
def solve(inputs, work, plan: tl.constexpr):
    """`errors` from the first errors, of all pairs."""
    source, exist, _, _ = source_index(plan)
    for first in range(0, plan.value_dim, plan.value_tile):
        value = first + tl.arange(0, plan.value_tile)
        values = value < plan.value_dim
        errors = pair_errors(inputs, work, value, values, plan)
        store_tile(work + plan.at.errors, source, exist, value, values, plan.value_dim, errors)
    local = tl.arange(0, BLOCK)
    for start in range(0, plan.sources, BLOCK):
        tl.debug_barrier()
        row = start + local
        rows = row < plan.sources
        earlier = source < start
        inverse = load_tile(work + plan.at.blocks, row, rows, local, local < BLOCK, BLOCK)
        system = load_tile(work + plan.at.system, row, rows, source, earlier, plan.sources)
        for first in range(0, plan.value_dim, plan.value_tile):
            value = first + tl.arange(0, plan.value_tile)
            values = value < plan.value_dim
            zero = zeros(BLOCK, plan.value_tile)
            known = load_tile(work + plan.at.errors, source, earlier, value, values, plan.value_dim)
            errors = load_tile(work + plan.at.errors, row, rows, value, values, plan.value_dim)
            errors -= dot(system, known, zero, plan)
            errors = dot(inverse, errors, zero, plan)
            store_tile(work + plan.at.errors, row, rows, value, values, plan.value_dim, errors)


@triton.jit(noinline=True)
def solve_transposed(work, plan: tl.constexpr):
    """`d_errors`, in place: from the gradient by the errors to that by the right-hand side."""
    source, exist, _, _ = source_index(plan)
    local = tl.arange(0, BLOCK)
    count = (plan.sources + BLOCK - 1) // BLOCK
    for step in range(0, count):
        start = (count - 1 - step) * BLOCK
        row = start + local
        rows = row < plan.sources
        later = exist & (source >= start + BLOCK)
        inverse = load_tile(work + plan.at.blocks, row, rows, local, local < BLOCK, BLOCK)
        system = load_tile(work + plan.at.system, source, later, row, rows, plan.sources)
        for first in range(0, plan.value_dim, plan.value_tile):
            value = first + tl.arange(0, plan.value_tile)
            values = value < plan.value_dim
            zero = zeros(BLOCK, plan.value_tile)
            known = load_tile(work + plan.at.d_errors, source, later, value, values, plan.value_dim)
            grad = load_tile(work + plan.at.d_errors, row, rows, value, values, plan.value_dim)
            grad -= dot(tl.trans(system), known, zero, plan)
            grad = dot(tl.trans(inverse), grad, zero, plan)
            store_tile(work + plan.at.d_errors, row, rows, value, values, plan.value_dim, grad)
        tl.debug_barrier()
