"""How decoding holds its state while it works: one row a head and sequence, and what a token is in one row of its slot.

Legend: B batch, H heads, N = H B rows (head first, so that the shared `M_0` multiplies all of a head's rows at once), K key
width, V value width, F features, c window, b chunk, R = b + c - 1 slots: c - 1 tokens from before the chunk, then its own.

`tokens [N, R - 1, W]` holds what does not depend on the memory: gates, key, value, and before them the key's features,
unless these are the key itself. The public state's buffers are views of it. Only while a chunk's last token is taken do
tokens fill all R slots.
"""

import torch
from torch.nn.functional import pad

from .recurrence_state import INNER_NORM_EPS, State, Tokens, cast

GATES = ("log_alpha", "eta", "log_theta")
# A row's own tensor; Triton's kernel does not keep it up, so it is made again from the public buffers where it is missing.
TOKENS = "step_tokens"


def squared_length(x: torch.Tensor) -> torch.Tensor:
    """`|x|^2` of the normalised step, `[..., F] -> [..., 1]`."""
    return x.square().sum(-1, keepdim=True) + INNER_NORM_EPS


class OnePlace:
    """Slots of a token that stands at the same place of its chunk in every row: slices."""

    def __init__(self, phase: int, options, window: int):
        self.first, self.end = phase, phase + window
        self.ends_chunk, self.ended = phase + 1 == options.chunk_size, None  # all rows
        self.muon_writes = options.rule == "muon" and (phase + 1) % options.muon_interval == 0

    def put(self, buffer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`buffer [N, R, *]` with `x [N, 1, *]` in the newest slot; unchanged if it lacks the last slot and that is it."""
        return buffer if self.end > buffer.shape[1] else buffer.slice_scatter(x, 1, self.end - 1, self.end)

    def filled(self, buffer: torch.Tensor, newest: torch.Tensor | None = None) -> torch.Tensor:
        """All slots that anything may have been written to `[N, R, *]`; `newest`: what `put` had no slot for."""
        return buffer[:, : self.end] if self.end <= buffer.shape[1] else torch.cat([buffer, newest], 1)

    def in_window(self, filled: torch.Tensor) -> torch.Tensor:
        """The window's slots `[N, c, *]`, oldest first."""
        return filled[:, self.first :]

    def add(self, total: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`total [N, R, *]`, which nobody else holds, with `x [N, c, *]` times `weight [N, c, 1]` in the window's slots."""
        total.narrow(1, self.first, x.shape[1]).addcmul_(x, weight)
        return total

    def add_filled(self, total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`total`, which nobody else holds, with Muon's step `x` on its filled slots."""
        total.narrow(1, 0, x.shape[1]).add_(x)
        return total


class OwnPlaces:
    """Slots of a token that may stand at another place in each row: one-hot products and masks."""

    def __init__(self, phase: torch.Tensor, options, window: int, slots: int, heads: int, dtype: torch.dtype):
        # Slots of the window's tokens, oldest first: `m` stands at `phase + m`, the new one at `phase + c - 1`
        slot = torch.arange(slots, device=phase.device)
        places = ((slot - phase[:, None])[:, None] == slot[:window, None]).repeat(heads, 1, 1)  # [N, c, R]
        self.here, self.places = places[:, -1, :, None], places.to(dtype)
        self.muon_writes = options.rule == "muon"
        if self.muon_writes:
            writes = (phase + 1) % options.muon_interval == 0
            self.writes = writes.repeat(heads)[:, None, None]
            # Where none of the rows writes, nobody need compute it
            self.muon_writes = torch.compiler.is_compiling() or bool(writes.any())
        self.ended = (phase + 1) % options.chunk_size == 0
        self.ends_chunk = torch.compiler.is_compiling() or bool(self.ended.any())

    def put(self, buffer, x):
        return torch.where(self.here[:, : buffer.shape[1]], x, buffer)

    def filled(self, buffer, newest=None):
        # The last slot is the new token's, or nothing has been written there and what stands in it has no effect.
        return buffer if newest is None else torch.cat([buffer, newest], 1)

    def in_window(self, filled):
        return torch.bmm(self.places, filled)

    def add(self, total, x, weight):
        return torch.baddbmm(total, self.places.mT, x * weight)

    def add_filled(self, total, x):
        return total + torch.where(self.writes, x, 0.0)


class TokenLayout:
    """Columns of `tokens` for one call, and the way between public state and working state."""

    def __init__(self, key_dim: int, value_dim: int, feature_map, window: int, chunk_size: int, heads: int):
        self.heads, self.window, self.chunk_size = heads, window, chunk_size
        apart = feature_map is not None and feature_map.degree > 1
        features, gates = feature_map.num_features if apart else 0, 3 + window
        self.apart, self.widths = apart, (features, 1, 1, 1, window, key_dim, value_dim)
        self.gates = slice(features, features + gates)
        self.phi = slice(0, features) if apart else slice(gates, gates + key_dim)

    def rows(self, x):
        """`[B, H, ...] -> [N, ...]`."""
        return x.transpose(0, 1).flatten(0, 1)

    def public(self, x):
        """`[N, ...] -> [B, H, ...]`, a view."""
        return x.view(self.heads, x.shape[0] // self.heads, *x.shape[1:]).transpose(0, 1)

    def pack(self, tokens: Tokens, phi: torch.Tensor) -> torch.Tensor:
        """`[B, T, H, *]` tokens and their keys' features `[H, B, T, F]` to `[N, T, W]`."""
        gates = [getattr(tokens, n)[..., None] for n in GATES] + [tokens.gamma]
        others = torch.cat([*gates, tokens.k, tokens.v], -1).permute(2, 0, 1, 3)
        return (torch.cat([phi, others], -1) if self.apart else others).flatten(0, 1)

    def split(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Columns by name, views; a single gate keeps its last axis of one, and what is not there has a width of zero."""
        names = ("phi", *GATES, "gamma", "k", "v")
        return dict(zip(names, tokens.split_with_sizes(self.widths, -1), strict=True))

    def next_chunk(self, tokens: torch.Tensor) -> torch.Tensor:
        """The last c - 1 of R tokens in the first slots; their gates have had their effect."""
        last = tokens[:, self.chunk_size :]
        gates = torch.zeros_like(last[..., self.gates])
        kept = torch.cat([last[..., : self.gates.start], gates, last[..., self.gates.stop :]], -1)
        return pad(kept, (0, 0, 0, self.chunk_size - 1))

    def to_rows(self, state: State, feature_map, dtype) -> State:
        """The working state of a public one."""
        work = {"position": state["position"]}
        kept = ("matrix_", "momentum_", "step_")
        work |= {n: self.rows(cast(x, dtype)) for n, x in state.items() if n.startswith(kept)}
        # A chunked pass leaves matrices the other way round
        work |= {n: x.contiguous() for n, x in work.items() if n.startswith(kept[:2])}
        if TOKENS not in work:
            held = Tokens(*(cast(state[n], dtype) for n in Tokens._fields))
            k = held.k.permute(2, 0, 1, 3)
            work[TOKENS] = self.pack(held, k if feature_map is None else feature_map(k))
        return work

    def to_public(self, work: State, given: State | None = None, taken: State | None = None) -> State:
        """The public state of a working one; what `taken`, made from `given`, still holds unchanged is given back."""
        state = {"position": work["position"]}
        for name, x in work.items():
            if name == "position":
                continue
            # Laid out batch first, a tensor would be copied to rows again for the next token
            unchanged = given is not None and name in given and taken[name] is x
            unchanged = unchanged and given[name].dtype == x.dtype and given[name].transpose(0, 1).is_contiguous()
            state[name] = given[name] if unchanged else self.public(x)
        columns = self.split(state[TOKENS].transpose(1, 2))
        state |= {n: columns[n] for n in ("k", "v", "gamma")}
        return state | {n: columns[n][..., 0] for n in GATES}
