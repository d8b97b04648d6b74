"""What the twins of the recurrence share: options, checks, the state between calls and the sequence's chunk grid.

Legend: B batch, T new tokens, H heads, K key width, V value width, E hidden width, F features, c window, b chunk.

The state is a dictionary of tensors with the batch first, float32 (float64 for float64 inputs):

    matrix_0 [B, H, out, in] ...    D = M - M_0 (decay_to = "init") or M itself ("zero") at the start of the current chunk
    momentum_0 [B, H, out, in] ...  S there, with momentum = "carry" only
    k [B, c+b-2, H, K], v, log_alpha, eta, log_theta [B, c+b-2, H], gamma [B, c+b-2, H, c]
                                    tokens: c-1 from before the chunk, then those of the chunk so far
    position [B] int64              tokens of the sequence seen so far; position % b is the place in the chunk

Names that begin with `step_` are `step_atlas`'s own: products of those tokens that it need not take again.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .memory_network import memory_kind

State = dict[str, torch.Tensor]


class FixedState(dict):
    """A state whose tensors keep their addresses: a step may write into them where that saves copies of matrices."""


CHOICES = {
    "rule": ("gd", "muon"),
    "momentum": ("carry", "restart", "none"),
    "inner_loss": ("l2", "dot"),
    "output_errors": ("exact", "anchored"),
    "decay_to": ("init", "zero"),
}
INNER_NORM_EPS = 1e-6


@dataclass(frozen=True)
class RecurrenceOptions:
    """The choices that select one member of the family; see `chunk_atlas` for their meaning."""

    chunk_size: int
    rule: str
    momentum: str
    inner_loss: str
    output_errors: str
    muon_interval: int
    newton_schulz_steps: int
    newton_schulz_coefficients: tuple[float, float, float]
    inner_norm: bool
    hidden_rate: float
    decay_to: str

    def __post_init__(self):
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        for name, low in (("chunk_size", 1), ("muon_interval", 1), ("newton_schulz_steps", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")
        if self.muon_interval > self.chunk_size:
            raise ValueError(
                f"muon_interval ({self.muon_interval}) must not exceed chunk_size ({self.chunk_size}): "
                "the memory would never be written"
            )
        if self.rule == "gd" and self.muon_interval != 1:
            raise ValueError(
                f"muon_interval ({self.muon_interval}) has no meaning with rule='gd', which writes at every token: set it "
                "to 1"
            )
        if not 0 <= self.hidden_rate < math.inf:
            raise ValueError(f"hidden_rate must be a number, 0 or more, got {self.hidden_rate}")
        if not isinstance(self.newton_schulz_coefficients, tuple) or len(self.newton_schulz_coefficients) != 3:
            raise ValueError(
                f"newton_schulz_coefficients must be three numbers (a, b, c), got {self.newton_schulz_coefficients!r}"
            )

    @property
    def output_by_muon(self) -> bool:
        """With exact output errors Muon is left to the hidden matrices, and the output matrix is written by gd."""
        return self.rule == "muon" and self.output_errors == "anchored"

    @property
    def errors_follow_writes(self) -> bool:
        """The Hebbian error `-v` does not depend on the memory, so there is nothing to be exact about."""
        return self.output_errors == "exact" and self.inner_loss == "l2"

    def rates(self, hidden_dim: int) -> tuple[float, float]:
        """Rate of the output matrix and of the hidden matrices (docs/recurrence.md, section 2)."""
        return 1.0, self.hidden_rate * (hidden_dim**0.5 if self.rule == "muon" else 1.0)


class Tokens(NamedTuple):
    """Keys, values and gates with one leading layout; `gamma` has the window last."""

    k: torch.Tensor
    v: torch.Tensor
    log_alpha: torch.Tensor
    eta: torch.Tensor
    log_theta: torch.Tensor
    gamma: torch.Tensor

    def map(self, fn) -> "Tokens":
        return Tokens(*(fn(x) for x in self))


class Fast(NamedTuple):
    """Fast weights in the scan's layout `[H, B, out, in]`: deltas `D` and, if carried, momentum `S`."""

    delta: tuple[torch.Tensor, ...]
    momentum: tuple[torch.Tensor, ...]


def check_inputs(q, k, v, memory, tokens: Tokens, feature_map, residual_scale, options, lengths, initial_state):
    """Raise `ValueError` naming the argument, its shape and the one wanted."""
    if q.ndim != 4 or q.shape[0] == 0 or q.shape[1] == 0:
        raise ValueError(f"q must be [B, T, H, K] with B >= 1 and T >= 1, got {tuple(q.shape)}")
    batch, _, heads, key_dim = q.shape
    if k.shape != q.shape:
        raise ValueError(f"k must have q's shape {tuple(q.shape)}, got {tuple(k.shape)}")
    if v.shape[:3] != q.shape[:3] or v.ndim != 4:
        raise ValueError(f"v must be [B, T, H, V] with q's B, T, H {tuple(q.shape[:3])}, got {tuple(v.shape)}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.is_floating_point():
            raise ValueError(f"{name} must be of a floating-point dtype, got {x.dtype}: convert it")
    for name in ("log_alpha", "eta", "log_theta"):
        if getattr(tokens, name).shape != q.shape[:3]:
            raise ValueError(f"{name} must be {tuple(q.shape[:3])}, got {tuple(getattr(tokens, name).shape)}")
    if tokens.gamma.shape[:3] != q.shape[:3] or tokens.gamma.ndim != 4 or tokens.gamma.shape[-1] < 1:
        raise ValueError(f"gamma must be [B, T, H, window] with q's B, T, H, got {tuple(tokens.gamma.shape)}")
    if feature_map is not None and (feature_map.num_heads, feature_map.key_dim) != (heads, key_dim):
        raise ValueError(
            f"feature_map is made for {feature_map.num_heads} heads of width {feature_map.key_dim}, and q has {heads} of "
            f"width {key_dim}: make one for these"
        )
    features = key_dim if feature_map is None else feature_map.num_features
    value_dim = v.shape[-1]
    kind = memory_kind(memory)
    hidden = memory[0].shape[-1]
    wanted = [(heads, value_dim, features)] if kind == "linear" else [(heads, value_dim, hidden)]
    wanted += [(heads, hidden, features)] * (len(memory) - 1)
    for i, (matrix, shape) in enumerate(zip(memory, wanted, strict=True)):
        if tuple(matrix.shape) != shape:
            raise ValueError(f"memory[{i}] of a {kind} memory must be {shape}, got {tuple(matrix.shape)}")
    if kind == "linear" and options.rule == "muon" and options.output_errors == "exact":
        raise ValueError(
            "rule='muon' with output_errors='exact' leaves Muon to the hidden matrices, and a linear memory has none: "
            "use output_errors='anchored' or a deep memory"
        )
    if residual_scale is not None:
        if tuple(residual_scale.shape) != (heads,):
            raise ValueError(
                f"residual_scale must be ({heads},), one number per head, got {tuple(residual_scale.shape)}"
            )
        if value_dim != key_dim:
            raise ValueError(f"residual_scale needs equal key and value widths, got {key_dim} and {value_dim}")
    if lengths is not None:
        check_lengths(lengths, batch, q.shape[1])
    if initial_state is not None:
        check_state(initial_state, batch, tokens, memory, options)


def check_lengths(lengths: torch.Tensor, batch: int, num_tokens: int) -> None:
    """Their values only where that takes no waiting for a GPU, and no graph is made."""
    if tuple(lengths.shape) != (batch,):
        raise ValueError(f"lengths must be ({batch},), one per row, got {tuple(lengths.shape)}")
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise ValueError(f"lengths must be whole numbers, got {lengths.dtype}: convert them")
    if lengths.device.type != "cpu" or torch.compiler.is_compiling():
        return
    if ((lengths < 0) | (lengths > num_tokens)).any():
        raise ValueError(f"lengths must lie between 0 and the T = {num_tokens} tokens of q, got {lengths.tolist()}")


def check_state(state: State, batch: int, tokens: Tokens, memory, options: RecurrenceOptions) -> None:
    """Refuse a state that another memory, window, chunk or momentum wrote."""
    slots = tokens.gamma.shape[-1] - 1 + options.chunk_size - 1
    shapes = {"position": (batch,)}
    shapes |= {f"matrix_{i}": (batch, *m.shape) for i, m in enumerate(memory)}
    if options.momentum == "carry":
        shapes |= {f"momentum_{i}": (batch, *m.shape) for i, m in enumerate(memory)}
    shapes |= {name: (batch, slots, *x.shape[2:]) for name, x in tokens._asdict().items()}
    for name, shape in shapes.items():
        found = tuple(state[name].shape) if name in state else "nothing"
        if found != shape:
            raise ValueError(
                f"initial_state[{name!r}] must be {shape} for this batch, memory, window and chunk_size, got {found}: "
                "a state goes on only where it began"
            )


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x.to(dtype)`; asked first, since of a decoded token's many casts hardly any has anything to do."""
    return x if x.dtype == dtype else x.to(dtype)


def dense_dtype(q: torch.Tensor) -> torch.dtype:
    """The recurrence runs in float32 whatever the model's dtype, in float64 for float64 inputs."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def initial_fast(memory, options: RecurrenceOptions, batch: int, state: State | None, dtype) -> Fast:
    """Deltas and momentum in the scan's layout, from a state or from the learned start."""
    if state is not None:
        delta = tuple(state[f"matrix_{i}"].transpose(0, 1).to(dtype).contiguous() for i in range(len(memory)))
    elif options.decay_to == "zero":
        # Its own: a state must not change with the weights
        delta = tuple(m.to(dtype)[:, None].repeat(1, batch, 1, 1) for m in memory)
    else:
        delta = tuple(m.new_zeros(m.shape[0], batch, *m.shape[1:], dtype=dtype) for m in memory)
    momentum = ()
    if options.momentum == "carry":
        if state is not None:
            momentum = tuple(state[f"momentum_{i}"].transpose(0, 1).to(dtype).contiguous() for i in range(len(memory)))
        else:
            momentum = tuple(torch.zeros_like(d) for d in delta)
    return Fast(delta, momentum)


@dataclass
class Grid:
    """New tokens laid on each row's chunk grid: row `i`'s first token here is the first of its current chunk.

    `tokens` hold `c - 1` earlier tokens and then `num_chunks * b` places, `[B, c - 1 + L, H, *]`; places without a
    token have neutral gates. `complete [B]` counts a row's chunks that end here; `None`: `length // b` for every row.
    """

    tokens: Tokens
    q: torch.Tensor
    num_chunks: int
    length: int
    complete: torch.Tensor | None
    phase: torch.Tensor | None
    position: torch.Tensor


def lay_on_grid(q, tokens: Tokens, options: RecurrenceOptions, lengths, state: State | None) -> Grid:
    """Put a row's unfinished chunk (from the state) before its new tokens and neutralise what does not exist."""
    batch, length = q.shape[:2]
    b, earlier = options.chunk_size, tokens.gamma.shape[-1] - 1
    phase = start = None
    total = length
    if state is not None:
        total = b - 1 + length
        start = state["position"] - state["position"] % b
        phase = state["position"] - start
    num_chunks = -(-total // b)
    places = num_chunks * b
    if phase is None:
        pad = places - length
        tokens = tokens.map(lambda x: F.pad(x, (0, 0) * (x.ndim - 2) + (earlier, pad)))
        q = F.pad(q, (0, 0, 0, 0, 0, pad))
    else:
        slots = earlier + b - 1
        place = torch.arange(earlier + places, device=q.device)
        held = earlier + phase[:, None]
        source = torch.where(place < held, place, place - held + slots).clamp_max(slots + length - 1)
        tokens = Tokens(
            *(take_tokens(torch.cat([state[n].to(x.dtype), x], 1), source) for n, x in tokens._asdict().items())
        )
        q = take_tokens(q, (place[earlier:] - held).clamp(0, length - 1))
    place = torch.arange(-earlier, places, device=q.device)  # negative: tokens before the grid
    end = None if phase is None and lengths is None else torch.full((batch,), length, device=q.device)
    if lengths is not None:
        end = lengths.to(q.device)
    if phase is not None:
        end = end + phase
    if end is not None or places != length:
        real = (place >= 0) & (place < (length if end is None else end[:, None]))
        real = real.expand(batch, len(place))[..., None]
        gates = {n: torch.where(real, getattr(tokens, n), 0.0) for n in ("log_alpha", "eta", "log_theta")}
        tokens = tokens._replace(**gates, gamma=torch.where(real[..., None], tokens.gamma, 0.0))
    # Tokens before the sequence's first do not exist: their places in a window weigh nothing.
    if earlier:
        ago = torch.arange(earlier + 1, device=q.device)
        first = place if start is None else place + start[:, None]
        exists = (place >= 0)[:, None] & (first[..., None] >= ago)
        exists = exists[None, :, None] if start is None else exists[:, :, None]
        tokens = tokens._replace(gamma=torch.where(exists, tokens.gamma, 0.0))
    complete = None if end is None else end // b
    position = torch.full((batch,), length, device=q.device) if end is None else end
    position = position if start is None else position + start
    return Grid(tokens, q, num_chunks, length, complete, phase, position)


def take_tokens(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`x [B, N, ...]` at each row's own places: `index [B, M] -> [B, M, ...]`."""
    return torch.gather(x, 1, index.view(*index.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:]))


def final_state(grid: Grid, fast: Fast, options: RecurrenceOptions) -> State:
    """The state after the grid's tokens: `fast` is what stood at the start of each row's unfinished chunk."""
    state = {f"matrix_{i}": d.transpose(0, 1) for i, d in enumerate(fast.delta)}
    state |= {f"momentum_{i}": s.transpose(0, 1) for i, s in enumerate(fast.momentum)}
    b, earlier = options.chunk_size, grid.tokens.gamma.shape[-1] - 1
    slot = torch.arange(earlier + b - 1, device=grid.q.device)
    phase = grid.position % b
    complete = grid.length // b if grid.complete is None else grid.complete[:, None]
    index = (slot + complete * b).expand(len(phase), -1).clamp_max(grid.tokens.k.shape[1] - 1)
    held = slot < earlier + phase[:, None]
    for name, x in grid.tokens._asdict().items():
        # Gates of earlier chunks have had their effect: only their keys and values are seen again.
        kept = held if name in ("k", "v") else held & (slot >= earlier)
        state[name] = torch.where(kept.view(*kept.shape, *[1] * (x.ndim - 2)), take_tokens(x, index), 0.0)
    state["position"] = grid.position
    return state
