"""Loads, stores and products of tiles of matrices that lie in global memory, rows by row.

A tile is named by its rows, its columns (index vectors of padded, power-of-two size) and masks of those that exist; what does
not exist reads as zero. Rows may be gathered: any index vector will do. Everything is computed in float32.
"""

import triton
import triton.language as tl


@triton.jit
def load_tile(matrix, rows, rows_exist, columns, columns_exist, stride):
    mask = rows_exist[:, None] & columns_exist[None, :]
    return tl.load(matrix + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_tile(matrix, rows, rows_exist, columns, columns_exist, stride, value):
    mask = rows_exist[:, None] & columns_exist[None, :]
    tl.store(matrix + rows[:, None] * stride + columns[None, :], value, mask=mask)


@triton.jit
def add_to_tile(matrix, rows, rows_exist, columns, columns_exist, stride, value):
    mask = rows_exist[:, None] & columns_exist[None, :]
    at = matrix + rows[:, None] * stride + columns[None, :]
    tl.store(at, tl.load(at, mask=mask, other=0.0) + value, mask=mask)


@triton.jit
def zeros(rows: tl.constexpr, columns: tl.constexpr = 0):
    """A tile, or with one size a vector."""
    if columns == 0:
        return tl.zeros((rows,), tl.float32)
    else:
        return tl.zeros((rows, columns), tl.float32)


@triton.jit
def load_vector(vector, index, exists):
    return tl.load(vector + index, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def add_to_vector(vector, index, exists, value):
    tl.store(vector + index, tl.load(vector + index, mask=exists, other=0.0) + value, mask=exists)


@triton.jit
def dot(x, y, total, plan: tl.constexpr):
    """`total + x y`."""
    return tl.dot(x, y, total, input_precision=plan.precision)


@triton.jit
def rows_by_rows(total, x, x_rows, x_exist, y, y_rows, y_exist, size, plan: tl.constexpr):
    """`total[i, j] + sum_k x[i, k] y[j, k]`, both matrices `size` wide."""
    for first in range(0, size, plan.inner_tile):
        k = first + tl.arange(0, plan.inner_tile)
        left = load_tile(x, x_rows, x_exist, k, k < size, size)
        right = load_tile(y, y_rows, y_exist, k, k < size, size)
        total = dot(left, tl.trans(right), total, plan)
    return total


@triton.jit
def rows_by_columns(total, x, x_rows, x_exist, size, y, columns, columns_exist, y_stride, plan: tl.constexpr):
    """`total[i, j] + sum_k x[i, k] y[k, j]`, with `x` `size` wide."""
    for first in range(0, size, plan.inner_tile):
        k = first + tl.arange(0, plan.inner_tile)
        left = load_tile(x, x_rows, x_exist, k, k < size, size)
        right = load_tile(y, k, k < size, columns, columns_exist, y_stride)
        total = dot(left, right, total, plan)
    return total


@triton.jit
def gelu(u):
    return 0.5 * u * (1.0 + tl.erf(u * 0.7071067811865476))


@triton.jit
def gelu_slopes(u):
    """First and second derivative of gelu."""
    density = tl.exp(-0.5 * u * u) * 0.3989422804014327
    return 0.5 * (1.0 + tl.erf(u * 0.7071067811865476)) + u * density, (2.0 - u * u) * density
