"""The fused scan as PyTorch sees it: two custom operators, and the walk over a sequence's chunks made of them.

Legend: N rows (head and batch), n chunks, b chunk, L = n b tokens on the grid, c window, V value width.
"""

import math

import torch

from ..modeling.chunk_inputs import ChunkInputs
from .fused_scan.backward import backward_kernel
from .fused_scan.forward import forward_kernel
from .fused_scan.plan import Inputs, Plan, plan_from, plan_of

# What a program keeps on chip at once grows with these squared; beyond them it would be on the stack instead
MOST_PAIRS, MOST_IN_VIEW, MOST_IN_VIEW_OF_MUON = 128, 64, 32


def supports(options, num_matrices: int, window: int, **widths: int) -> str | None:
    """What of a call these kernels cannot do: the option, its value and the remedy. None: nothing, they can.

    Args:
        options: `RecurrenceOptions`.
        num_matrices: 1, 2 or 3, of a linear, mlp or gated memory; each will do.
        window: the Omega window `c`.
        widths: of one head; each will do.
    """
    chunk, view = options.chunk_size, options.chunk_size + window - 1
    if options.rule == "muon" and options.momentum == "carry":
        return "rule='muon' with momentum='carry' has no kernel: set momentum='restart' or 'none'"
    if options.rule == "muon" and view > MOST_IN_VIEW_OF_MUON:
        return (
            f"chunk_size={chunk} and omega_window={window} keep {view} tokens in view, and with rule='muon' the kernels keep "
            f"at most {MOST_IN_VIEW_OF_MUON}: set a smaller chunk_size or omega_window"
        )
    if options.errors_follow_writes and chunk * window > MOST_PAIRS:
        return (
            f"chunk_size={chunk} and omega_window={window} make {chunk * window} pairs of a write and a token, and with "
            f"output_errors='exact' the kernels take at most {MOST_PAIRS}: set a smaller chunk_size or omega_window"
        )
    if view > MOST_IN_VIEW:
        return (
            f"chunk_size={chunk} and omega_window={window} keep {view} tokens in view, and the kernels at most "
            f"{MOST_IN_VIEW}: set a smaller chunk_size or omega_window"
        )
    return None


def walk(settings, num_state: int, *tensors):
    """As `_Walk.apply` of `modeling/recurrence_chunk.py`: `y [N, L, V]` and the state after the chunks."""
    state, inputs = tensors[:num_state], ChunkInputs(*tensors[num_state:])
    names = [name for name in Inputs._fields if getattr(inputs, name) is not None]
    given = [getattr(inputs, name).contiguous() for name in names]
    plan = plan_of(
        *settings.arguments, inputs.target.shape[-1], inputs.phi_k.shape[-1], dot_precision(inputs.target.device)
    )
    memory = torch.cat([x.flatten(1) for x in state], 1)
    every = 0
    if torch.is_grad_enabled() and any(x.requires_grad for x in (memory, *given)):
        every = math.isqrt(settings.num_chunks)
    y, memory, _ = scan_forward(
        memory, given, ",".join(names), *plan.operands(), settings.num_chunks, settings.last_end, every
    )
    parts = memory.split([math.prod(x.shape[1:]) for x in state], 1)
    return y, *(part.view_as(x) for part, x in zip(parts, state, strict=True))


def dot_precision(device: torch.device) -> str:
    """How products of float32 tiles are taken: as `torch.set_float32_matmul_precision` has it for PyTorch's own.

    `"highest"` gives float32 ("ieee"), `"high"` three products of TF32 parts, with rounding about that of float32, on tensor
    cores, and `"medium"` plain TF32. `torch.backends.cuda.matmul.fp32_precision = "tf32"` counts as `"high"`.
    """
    if device.type != "cuda":
        return "ieee"
    if torch.backends.cuda.matmul.fp32_precision != "tf32":
        return "ieee"
    try:
        named = torch.get_float32_matmul_precision()
    except RuntimeError:  # TF32 was asked for by the name of the backend, which the older setting does not know
        return "tf32x3"
    return {"medium": "tf32"}.get(named, "tf32x3")


def _plan(whole: list[int], rates: list[float], precision: str) -> Plan:
    return plan_from(tuple(whole), tuple(rates), precision)


def _pointers(tensors: list[torch.Tensor], names: str) -> list[torch.Tensor]:
    """All of `Inputs`; for those left out some tensor that the kernel won't touch."""
    given = dict(zip(names.split(","), tensors, strict=True))
    return [given.get(name, given["target"]) for name in Inputs._fields]


def _rows_per_head(tensors: list[torch.Tensor], names: str) -> int:
    given = dict(zip(names.split(","), tensors, strict=True))
    return len(given["target"]) // len(given.get("output_start", given["target"]))


@torch.library.custom_op("atlas_hf::scan_forward", mutates_args=())
def scan_forward(
    memory: torch.Tensor,
    inputs: list[torch.Tensor],
    names: str,
    whole: list[int],
    rates: list[float],
    precision: str,
    num_chunks: int,
    last_end: int,
    every: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All chunks of all rows.

    Args:
        memory: `[N, state]`, every row's state, its matrices one after the other.
        inputs: those of `Inputs` that `names` lists, separated by commas.
        whole, rates, precision: the `Plan`, as `Plan.operands` gives it.
        last_end: chunks from this one on leave the state alone.
        every: the state at the start of every `every`-th chunk is kept for the backward pass; 0: at none.

    Returns:
        `y [N, L, V]`, the state after the chunks, and what is kept, `[N, kept chunks, state]`.
    """
    plan = _plan(whole, rates, precision)
    y, after, kept = _empty_results(memory, plan, num_chunks, every)
    after.copy_(memory)
    _run_forward(plan, _pointers(inputs, names), after, kept, y, (0, num_chunks), last_end, num_chunks,
                 _rows_per_head(inputs, names), every)  # fmt: skip
    return y, after, kept


def _scratch(like: torch.Tensor, plan: Plan):
    """Every row's memory for a chunk's intermediates, and in float64 for Newton-Schulz."""
    rows = len(like)
    return like.new_empty(rows, plan.at.end), like.new_empty(rows, plan.history_size, dtype=torch.float64)


def _run_forward(plan, pointers, memory, kept, y, chunks, last_end, num_chunks, rows_per_head, every):
    rows = len(memory)
    with torch.cuda.device_of(memory):
        forward_kernel[(rows,)](
            *pointers,
            memory,
            kept,
            *_scratch(memory, plan),
            memory if y is None else y,
            *chunks,
            last_end,
            num_chunks,
            rows_per_head,
            every,
            kept.shape[1],
            plan=plan,
            with_outputs=y is not None,
            with_starts=every > 0,
            **plan.launch(),
        )


def _empty_results(memory, plan: Plan, num_chunks: int, every: int):
    num_kept = -(-num_chunks // every) if every else 0
    return (
        memory.new_empty(len(memory), num_chunks * plan.chunk, plan.value_dim),
        torch.empty_like(memory),
        memory.new_empty(len(memory), num_kept, plan.state_size),
    )


@scan_forward.register_fake
def _(memory, inputs, names, whole, rates, precision, num_chunks, last_end, every):
    return _empty_results(memory, _plan(whole, rates, precision), num_chunks, every)


@torch.library.custom_op("atlas_hf::scan_backward", mutates_args=())
def scan_backward(
    dy: torch.Tensor,
    d_memory: torch.Tensor,
    kept: torch.Tensor,
    inputs: list[torch.Tensor],
    names: str,
    whole: list[int],
    rates: list[float],
    precision: str,
    num_chunks: int,
    last_end: int,
    every: int,
) -> list[torch.Tensor]:
    """Gradients by `memory` and by each of `inputs`, from those by the outputs and the state after the chunks.

    Group by group of `every` chunks, from the last: the forward pass again for the state at each chunk's start, then the
    chunks backwards.
    """
    plan = _plan(whole, rates, precision)
    pointers, rows_per_head = _pointers(inputs, names), _rows_per_head(inputs, names)
    d_memory, *grads = [x.clone() if x is d_memory else x.zero_() for x in (d_memory, *_empty_gradients(inputs, names))]
    scratch = _scratch(kept, plan)
    for group in reversed(range(kept.shape[1])):
        first, last = group * every, min((group + 1) * every, num_chunks)
        starts = kept.new_empty(len(kept), last - first, plan.state_size)
        before = kept[:, group].clone()  # goes on from chunk to chunk
        _run_forward(plan, pointers, before, starts, None, (first, last), min(last_end, last - 1), num_chunks,
                     rows_per_head, 1)  # fmt: skip
        with torch.cuda.device_of(kept):
            backward_kernel[(len(kept),)](
                *pointers,
                *_pointers(grads, names),
                starts,
                *scratch,
                dy,
                d_memory,
                first,
                last,
                last_end,
                num_chunks,
                rows_per_head,
                last - first,
                plan=plan,
                **plan.launch(),
            )
    grads = [g.unflatten(0, (len(x), -1)).sum(1) if n == "output_start" else g
             for n, x, g in zip(names.split(","), inputs, grads, strict=True)]  # fmt: skip
    return [d_memory, *grads]


def _empty_gradients(inputs, names: str):
    """One tensor for each of the inputs; the shared matrix's gradient has a part for every row."""
    target = dict(zip(names.split(","), inputs, strict=True))["target"]
    return [
        x.new_empty(len(target), *x.shape[1:]) if name == "output_start" else torch.empty_like(x)
        for name, x in zip(names.split(","), inputs, strict=True)
    ]


@scan_backward.register_fake
def _(dy, d_memory, kept, inputs, names, whole, rates, precision, num_chunks, last_end, every):
    return [torch.empty_like(d_memory), *(torch.empty_like(x) for x in inputs)]


def _setup_context(ctx, inputs, output):
    _, tensors, *ctx.settings = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[2], *tensors)


def _backward(ctx, dy, d_memory, _):
    kept, *inputs = ctx.saved_tensors
    _, whole, rates, precision, num_chunks, *_ = ctx.settings
    plan = _plan(whole, rates, precision)
    rows = len(kept)
    if dy is None:
        dy = kept.new_zeros(rows, num_chunks * plan.chunk, plan.value_dim)
    if d_memory is None:
        d_memory = kept.new_zeros(rows, plan.state_size)
    d_memory, *grads = scan_backward(dy.contiguous(), d_memory.contiguous(), kept, inputs, *ctx.settings)
    return d_memory, grads, *(None,) * len(ctx.settings)


scan_forward.register_autograd(_backward, setup_context=_setup_context)
