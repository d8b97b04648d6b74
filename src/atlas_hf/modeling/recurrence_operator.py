"""The one signature of the recurrence's twins: checks, dtypes, packing and the chunk grid around a scan.

Legend: B batch, T tokens, H heads, K key width, V value width, c window.
"""

import functools
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from .dispatch import check_kernels
from .newton_schulz import COEFFICIENTS
from .recurrence_state import (
    Fast,
    RecurrenceOptions,
    State,
    Tokens,
    cast,
    check_inputs,
    dense_dtype,
    final_state,
    initial_fast,
    lay_on_grid,
    take_tokens,
)


@dataclass
class Call:
    """Checked arguments of one call, floating tensors in the recurrence's dtype."""

    q: torch.Tensor
    tokens: Tokens
    memory: tuple[torch.Tensor, ...]
    feature_map: object | None
    residual_scale: torch.Tensor | None
    options: RecurrenceOptions
    lengths: torch.Tensor | None
    state: State | None
    needs_state: bool
    kernels: str


def atlas_operator(scan):
    """Give `scan(call) -> (y, state)` the public signature; see `chunk_atlas` for its meaning."""

    @functools.wraps(scan)
    def operator(
        q,
        k,
        v,
        memory,
        *,
        log_alpha,
        eta,
        gamma,
        log_theta=None,
        feature_map=None,
        residual_scale=None,
        chunk_size=16,
        rule="gd",
        momentum="none",
        inner_loss="l2",
        output_errors="exact",
        muon_interval=1,
        newton_schulz_steps=5,
        newton_schulz_coefficients=COEFFICIENTS,
        inner_norm=True,
        hidden_rate=0.1,
        decay_to="init",
        lengths=None,
        initial_state=None,
        output_final_state=False,
        cu_seqlens=None,
        kernels="auto",
    ):
        check_kernels(kernels)
        options = RecurrenceOptions(
            chunk_size,
            rule,
            momentum,
            inner_loss,
            output_errors,
            muon_interval,
            newton_schulz_steps,
            tuple(newton_schulz_coefficients)
            if isinstance(newton_schulz_coefficients, list)
            else newton_schulz_coefficients,
            inner_norm,
            hidden_rate,
            decay_to,
        )
        _check_tensors(
            {"q": q, "k": k, "v": v, "log_alpha": log_alpha, "eta": eta, "gamma": gamma},
            {"log_theta": log_theta, "residual_scale": residual_scale, "lengths": lengths, "cu_seqlens": cu_seqlens},
        )
        if log_theta is None:
            if momentum != "none":
                raise ValueError(f"log_theta is needed with momentum={momentum!r}; momentum='none' goes without")
            log_theta = torch.zeros_like(eta)
        memory = (memory,) if isinstance(memory, torch.Tensor) else tuple(memory)
        _check_tensors({f"memory[{i}]": matrix for i, matrix in enumerate(memory)}, {})
        tokens = Tokens(k, v, log_alpha, eta, log_theta, gamma)
        where = None
        if cu_seqlens is not None:
            if lengths is not None:
                raise ValueError("lengths and cu_seqlens both give the sequences' ends: pass one of them")
            where, lengths = _packed_index(cu_seqlens, q, tokens)
            q, tokens = _unpack(q, where), tokens.map(lambda x: _unpack(x, where))
        check_inputs(
            q, tokens.k, tokens.v, memory, tokens, feature_map, residual_scale, options, lengths, initial_state
        )
        if feature_map is not None and torch.is_grad_enabled():
            feature_map = feature_map.as_it_stands()
        dtype = dense_dtype(q)
        call = Call(
            cast(q, dtype),
            tokens.map(lambda x: cast(x, dtype)),
            tuple(cast(m, dtype) for m in memory),
            feature_map,
            None if residual_scale is None else residual_scale.to(dtype),
            options,
            lengths,
            initial_state,
            output_final_state,
            kernels,
        )
        # Under autocast the products below would fall back to half precision.
        on_meta = q.device.type == "meta"  # where there is no autocast
        with nullcontext() if on_meta else torch.autocast(device_type=q.device.type, enabled=False):
            y, state = scan(call)
        y = y.to(v.dtype)
        if where is not None:
            y = _repack(y, where, cu_seqlens)
        return y, state if output_final_state else None

    # Show the public signature, not the scan's.
    del operator.__wrapped__
    return operator


def _check_tensors(needed: dict, optional: dict) -> None:
    given = {name: x for name, x in optional.items() if x is not None}
    for name, x in (needed | given).items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}: make one of it by torch.tensor")


def on_grid(scan):
    """Turn `scan(grid, fast, call) -> (y [B, L, H, V], Fast)` into `scan(call)`: lays out tokens, cuts the outputs."""

    @functools.wraps(scan)
    def run(call: Call):
        grid = lay_on_grid(call.q, call.tokens, call.options, call.lengths, call.state)
        fast = initial_fast(call.memory, call.options, call.q.shape[0], call.state, call.q.dtype)
        y, fast = scan(grid, fast, call)
        length = call.q.shape[1]
        if grid.phase is None:
            y = y[:, :length]
        else:
            y = take_tokens(y, grid.phase[:, None] + torch.arange(length, device=y.device))
        if call.lengths is not None:
            real = torch.arange(length, device=y.device) < call.lengths[:, None].to(y.device)
            y = torch.where(real[..., None, None], y, 0.0)
        return y, final_state(grid, fast, call.options) if call.needs_state else None

    return run


def complete_rows(grid, chunk):
    """Which rows' chunk number `chunk` ends inside the grid: `True`, `False` or a `[B]` mask. Numbers may be `[n, 1]`."""
    if grid.complete is None:
        return (chunk + 1) * (grid.q.shape[1] // grid.num_chunks) <= grid.length
    return grid.complete > chunk


def fold_rows(complete, new: Fast, old: Fast) -> Fast:
    """Take the chunk's end for complete rows and keep the start for the others (matrices `[H, B, out, in]`)."""
    if isinstance(complete, bool):
        return new if complete else old
    mask = complete[None, :, None, None]
    return Fast(
        *(tuple(torch.where(mask, n, o) for n, o in zip(*pair, strict=True)) for pair in zip(new, old, strict=True))
    )


def _packed_index(cu_seqlens, q, tokens):
    if q.ndim != 4 or q.shape[0] != 1:
        raise ValueError(
            f"cu_seqlens packs documents in a batch of one row: q must be [1, T, H, K], got {tuple(q.shape)}"
        )
    for name, x in tokens._asdict().items():
        if x.shape[:2] != q.shape[:2]:  # the index below would leave out what is too much
            raise ValueError(
                f"{name} must be packed as q is, [1, {q.shape[1]}, ...] with cu_seqlens, got {tuple(x.shape)}"
            )
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or cu_seqlens.is_floating_point():
        raise ValueError(
            f"cu_seqlens must be whole numbers [N + 1], got shape {tuple(cu_seqlens.shape)} of {cu_seqlens.dtype}"
        )
    cu = cu_seqlens.to(q.device).long()
    lengths = cu.diff()
    if cu[0] != 0 or cu[-1] != q.shape[1] or (lengths < 0).any():
        raise ValueError(f"cu_seqlens must rise from 0 to T = {q.shape[1]}, got {cu_seqlens.tolist()}")
    place = torch.arange(max(int(lengths.max()), 1), device=q.device)
    return (cu[:-1, None] + place).clamp_max(q.shape[1] - 1), lengths


def _unpack(x, where):
    return x[0][where]


def _repack(y, where, cu_seqlens):
    place = torch.arange(where.shape[1], device=y.device)
    real = place < cu_seqlens.to(y.device).diff()[:, None]
    return y[real][None]
