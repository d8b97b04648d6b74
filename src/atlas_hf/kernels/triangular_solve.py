"""Unit lower-triangular systems of the exact output errors (recurrence, section 5), and their transposes.

Legend: N systems (a chunk of a row), P unknowns (error sources), V right-hand sides (value width).

flash-linear-attention's `solve_tril` inverts such matrices, for chunks of 16, 32 or 64 rows and without a backward pass. This
one substitutes, as `torch.linalg.solve_triangular` does, for any P: sources come by pairs of a write and a token of its
window. One program solves for up to 64 columns; 16 rows at a time are substituted one by one, whatever the earlier ones
contribute comes as products.
"""

import torch
import triton
import triton.language as tl

ROWS = 16
COLUMNS = 64


@triton.jit
def _load_part(system, rows, columns, size, TRANSPOSED: tl.constexpr):
    """Entries `(rows, columns)` of the system, or of its transpose."""
    i, j = rows[:, None], columns[None, :]
    place = j * size + i if TRANSPOSED else i * size + j
    return tl.load(system + place, mask=(i < size) & (j < size), other=0.0)


@triton.jit
def _solve_kernel(
    system, rhs, result, size, width, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64)
    system += n * size * size
    rhs += n * size * width
    result += n * size * width
    index = tl.arange(0, ROWS)
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    num_blocks = tl.cdiv(size, ROWS)
    for step in range(num_blocks):
        block = num_blocks - 1 - step if TRANSPOSED else step
        rows = block * ROWS + index
        place = rows[:, None] * width + columns
        inside = (rows[:, None] < size) & (columns < width)
        x = tl.load(rhs + place, mask=inside, other=0.0)
        for other in range(step):
            earlier = (num_blocks - 1 - other if TRANSPOSED else other) * ROWS + index
            part = _load_part(system, rows, earlier, size, TRANSPOSED)
            known = (earlier[:, None] < size) & (columns < width)
            solved = tl.load(result + earlier[:, None] * width + columns, mask=known, other=0.0)
            x -= tl.dot(part, solved, input_precision="ieee", out_dtype=x.dtype)
        diagonal = _load_part(system, rows, rows, size, TRANSPOSED)
        later = index[:, None] < index[None, :] if TRANSPOSED else index[:, None] > index[None, :]
        diagonal = tl.where(later, diagonal, 0.0)
        for k in range(ROWS):
            i = ROWS - 1 - k if TRANSPOSED else k
            solved_row = tl.sum(tl.where(index[:, None] == i, x, 0.0), 0)
            factors = tl.sum(tl.where(index[None, :] == i, diagonal, 0.0), 1)
            x -= factors[:, None] * solved_row[None, :]
        tl.store(result + place, x, mask=inside)
        # Other threads read these rows for the next ones
        tl.debug_barrier()


@torch.library.custom_op("atlas_hf::unit_lower_solve", mutates_args=())
def _solve(system: torch.Tensor, rhs: torch.Tensor, transposed: bool) -> torch.Tensor:
    result = torch.empty_like(rhs)
    count, size, width = rhs.shape
    if rhs.numel():
        with torch.cuda.device_of(rhs):
            _solve_kernel[(count, triton.cdiv(width, COLUMNS))](
                system, rhs, result, size, width, TRANSPOSED=transposed, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4
            )
    return result


@_solve.register_fake
def _(system, rhs, transposed):
    return torch.empty_like(rhs)


def _setup(ctx, inputs, output):
    system, _, ctx.transposed = inputs
    ctx.save_for_backward(system, output)


def _backward(ctx, grad):
    system, result = ctx.saved_tensors
    d_rhs = _solve(system, grad.contiguous(), not ctx.transposed)
    d_system = result @ d_rhs.mT if ctx.transposed else d_rhs @ result.mT
    return -d_system.tril(-1), d_rhs, None


_solve.register_autograd(_backward, setup_context=_setup)


def unit_lower_solve(system: torch.Tensor, rhs: torch.Tensor, *, transposed: bool = False) -> torch.Tensor:
    """The `X` in `L X = rhs`, or in `L^T X = rhs`, where `L` is unit lower triangular.

    Equal to `torch.linalg.solve_triangular(L, rhs, upper=False, unitriangular=True)` (or `L.mT`, `upper=True`) to rounding.

    Args:
        system: `[..., P, P]`, float32 or float64; its diagonal and what lies above are not read.
        rhs: `[..., P, V]`, of the same dtype and leading axes.

    Returns:
        `[..., P, V]`. Differentiable any number of times.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    fits = system.shape[:-1] == rhs.shape[:-1] and system.shape[-1] == system.shape[-2]
    if not fits or system.dtype != rhs.dtype or rhs.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            "system must be [..., P, P] and rhs [..., P, V], both float32 or float64, got "
            f"{tuple(system.shape)} {system.dtype} and {tuple(rhs.shape)} {rhs.dtype}"
        )
    flat = system.reshape(-1, *system.shape[-2:]).contiguous(), rhs.reshape(-1, *rhs.shape[-2:]).contiguous()
    return _solve(*flat, transposed).view(rhs.shape)
