"""How decoding holds its state while it works: one row a head and sequence, and what a token is in one row of its slot.

Legend: B batch, H heads, N = H B rows (head first, so that the shared `M_0` multiplies all of a head's rows at once), K key
width, V value width, F features, c window, b chunk, R = b + c - 1 slots: c - 1 tokens from before the chunk, then its own.

`tokens [N, R - 1, W]` holds what does not depend on the memory: gates, key, value, and before and after them the key's
features and their squared length, unless the features are the key itself. The public state's buffers are views of it. Only
while a chunk's last token is taken do tokens fill all R slots.
"""

import torch
from torch.nn.functional import pad

from .recurrence_state import INNER_NORM_EPS, State, Tokens

GATES = ("log_alpha", "eta", "log_theta")
# A row's own tensor; Triton's kernel does not keep it up, so it is made again from the public buffers where it is missing.
TOKENS = "step_tokens"


def squared_length(phi: torch.Tensor) -> torch.Tensor:
    """`|phi|^2` of the normalised step, `[..., F] -> [..., 1]`."""
    return phi.square().sum(-1, keepdim=True) + INNER_NORM_EPS


class TokenLayout:
    """Columns of `tokens` for one call, and the way between public state and working state."""

    def __init__(self, key_dim: int, value_dim: int, feature_map, window: int, chunk_size: int, heads: int):
        self.heads, self.window, self.chunk_size = heads, window, chunk_size
        apart = feature_map is not None and feature_map.degree > 1
        features, gates = feature_map.num_features if apart else 0, 3 + window
        self.apart, self.widths = apart, (features, 1, 1, 1, window, key_dim, value_dim, int(apart))
        self.gates, self.seen = slice(features, features + gates), slice(features + gates, None)
        self.phi = slice(0, features) if apart else slice(gates, gates + key_dim)

    def rows(self, x):
        """`[B, H, ...] -> [N, ...]`."""
        return x.transpose(0, 1).flatten(0, 1)

    def public(self, x):
        """`[N, ...] -> [B, H, ...]`, a view."""
        return x.unflatten(0, (self.heads, -1)).transpose(0, 1)

    def pack(self, tokens: Tokens, phi: torch.Tensor) -> torch.Tensor:
        """`[B, T, H, *]` tokens and their keys' features `[H, B, T, F]` to `[N, T, W]`."""
        gates = [getattr(tokens, n)[..., None] for n in GATES] + [tokens.gamma]
        others = torch.cat([*gates, tokens.k, tokens.v], -1).permute(2, 0, 1, 3)
        if self.apart:
            others = torch.cat([phi, others, squared_length(phi)], -1)
        return others.flatten(0, 1)

    def split(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Columns by name, views; a single gate keeps its last axis of one, and what is not there has a width of zero."""
        names = ("phi", *GATES, "gamma", "k", "v", "size")
        return dict(zip(names, tokens.split_with_sizes(self.widths, -1), strict=True))

    def window_of(self, places: torch.Tensor, tokens: torch.Tensor):
        """Keys, values and `|phi(k)|^2` of the window's tokens, `[N, c, *]`; `places [N, c, R]` are ones at their slots."""
        k, v, size = torch.bmm(places, tokens[..., self.seen]).split_with_sizes(self.widths[-3:], -1)
        return k, v, size if self.apart else squared_length(k)

    def next_chunk(self, tokens: torch.Tensor) -> torch.Tensor:
        """The last c - 1 of R tokens in the first slots; their gates have had their effect."""
        last = tokens[:, self.chunk_size :]
        gates = torch.zeros_like(last[..., self.gates])
        kept = torch.cat([last[..., : self.gates.start], gates, last[..., self.gates.stop :]], -1)
        return pad(kept, (0, 0, 0, self.chunk_size - 1))

    def to_rows(self, state: State, feature_map, dtype) -> State:
        """The working state of a public one."""
        work = {"position": state["position"]}
        work |= {n: self.rows(x.to(dtype)) for n, x in state.items() if n.startswith(("matrix_", "momentum_", "step_"))}
        if TOKENS not in work:
            held = Tokens(*(state[n].to(dtype) for n in Tokens._fields))
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
