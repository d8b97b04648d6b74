"""What a kernel is compiled for: sizes, tiles and choices of one member of the family, and what its programs share.

Legend: b chunk, c window, R = b + c - 1 tokens in view, P error sources (the R tokens, or with exact errors the b c pairs of
a write and a token of its window), V value width, E hidden width, G hidden matrices, F features, W positions Muon writes at.
"""

import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import triton
import triton.language as tl

from ...modeling.chunk_inputs import ChunkInputs
from ...modeling.recurrence_state import INNER_NORM_EPS, RecurrenceOptions

# Pointers to a row's inputs, or to gradients by them. What is left out serves Muon with carried momentum alone.
Inputs = NamedTuple("Inputs", [(name, object) for name in ChunkInputs._fields if name not in ("beta", "complete")])
# Arguments that differ from call to call, and that no kernel should be compiled anew for
COUNTS = ("first_chunk", "last_chunk", "last_end", "num_chunks", "rows_per_head", "every", "num_kept")
NORM_EPS = tl.constexpr(INNER_NORM_EPS)


@dataclass(frozen=True)
class Plan:
    """A compile-time constant of every kernel."""

    chunk: int
    window: int
    value_dim: int
    hidden_dim: int  # a linear memory has none: 0
    groups: int
    features: int
    writes: int
    exact: bool  # errors follow the writes (docs/recurrence.md, section 5)
    hebbian: bool  # the inner loss is the dot product
    norm: bool
    carry: bool
    to_init: bool
    muon_hidden: bool
    muon_output: bool
    steps: int  # of Newton-Schulz
    widest_tile: int
    inner_tile: int
    output_rate: float
    hidden_rate: float
    quintic: tuple[float, float, float]
    precision: str

    def operands(self) -> tuple[list[int], list[float], str]:
        """As an operator takes it; see `plan_from`."""
        whole = [self.chunk, self.window, self.value_dim, self.hidden_dim, self.groups, self.features, self.writes]
        whole += [int(x) for x in (self.exact, self.hebbian, self.norm, self.carry, self.to_init)]
        whole += [int(self.muon_hidden), int(self.muon_output), self.steps, self.widest_tile, self.inner_tile]
        return whole, [self.output_rate, self.hidden_rate, *self.quintic], self.precision

    def launch(self) -> dict[str, int]:
        """Warps of a program, and how far the loads of a loop run ahead of its products.

        Not at all: loops are of two to eight turns, and loads ahead spilled up to five times as many registers.
        """
        wide = self.source_pad > 64 or (self.writes > 0 and self.view_pad > 16)
        # Without tensor cores every thread holds whole rows and columns of a product
        wide |= self.precision == "ieee"
        return {"num_warps": 8 if wide else 4, "num_stages": 1}

    @property
    def view(self) -> int:
        return self.chunk + self.window - 1

    @property
    def deep(self) -> bool:
        return self.hidden_dim > 0

    @property
    def pairwise(self) -> bool:
        return self.exact and self.window > 1

    @property
    def sources(self) -> int:
        return self.chunk * self.window if self.exact else self.view

    @property
    def stacked(self) -> int:
        """Rows of the hidden matrices, one below the other."""
        return self.groups * self.hidden_dim

    @property
    def entry_dim(self) -> int:
        """Width of what the output matrix reads."""
        return self.hidden_dim if self.deep else self.features

    @property
    def chunk_pad(self) -> int:
        return padded(self.chunk)

    @property
    def view_pad(self) -> int:
        return padded(self.view)

    @property
    def source_pad(self) -> int:
        return padded(self.sources)

    @property
    def value_tile(self) -> int:
        return min(padded(self.value_dim), self.widest_tile)

    @property
    def hidden_tile(self) -> int:
        return min(padded(self.hidden_dim), self.widest_tile)

    @property
    def entry_tile(self) -> int:
        return min(padded(self.entry_dim), self.widest_tile)

    @property
    def feature_tile(self) -> int:
        return min(padded(self.features), self.widest_tile)

    @cached_property
    def at(self) -> "Work":
        """Where the parts of a row's scratch memory begin."""
        return _offsets(self)

    @property
    def history_size(self) -> int:
        """Numbers in a row's float64 memory: Newton-Schulz's steps, and the Gram matrix of what the output matrix reads."""
        return (self.steps + 1) * self.view_pad**2 if self.writes else 0

    @property
    def output_size(self) -> int:
        return self.value_dim * self.entry_dim

    @property
    def hidden_size(self) -> int:
        return self.stacked * self.features

    @property
    def state_size(self) -> int:
        """Numbers in one row's state: `D_1, D_2`, then, if carried, `S_1, S_2`."""
        return (2 if self.carry else 1) * (self.output_size + self.hidden_size)


def plan_of(
    options: RecurrenceOptions,
    num_hidden: int,
    window: int,
    hidden_dim: int,
    value_dim: int,
    features: int,
    precision: str = "ieee",
) -> Plan:
    """The plan of a recurrence with `num_hidden` hidden matrices."""
    output_rate, hidden_rate = options.rates(hidden_dim)
    return Plan(
        chunk=options.chunk_size,
        window=window,
        value_dim=value_dim,
        hidden_dim=hidden_dim if num_hidden else 0,
        groups=num_hidden,
        features=features,
        writes=options.chunk_size // options.muon_interval if options.rule == "muon" else 0,
        exact=options.errors_follow_writes,
        hebbian=options.inner_loss == "dot",
        norm=options.inner_norm,
        carry=options.momentum == "carry",
        to_init=options.decay_to == "init",
        muon_hidden=options.rule == "muon" and num_hidden > 0,
        muon_output=options.output_by_muon,
        steps=options.newton_schulz_steps,
        widest_tile=32,
        inner_tile=16 if precision == "ieee" else 32,
        output_rate=output_rate,
        hidden_rate=hidden_rate,
        quintic=tuple(options.newton_schulz_coefficients),
        precision=precision,
    )


@cache
def plan_from(whole: tuple[int, ...], rates: tuple[float, ...], precision: str) -> Plan:
    """The inverse of `Plan.operands`."""
    flags = map(bool, whole[7:14])
    return Plan(*whole[:7], *flags, *whole[14:], rates[0], rates[1], rates[2:], precision)


def padded(size: int) -> int:
    """The least size of a tile that holds `size`: a power of two, and for a product at least 16."""
    return max(16, triton.next_power_of_2(size))


class Work(NamedTuple):
    """A row's own scratch memory, float32: the intermediates of the chunk at hand, and their gradients."""

    hidden_k: int  # [R, G E]
    x: int  # hidden activations of the keys [R, E]
    slope: int  # [R, G E]
    columns: int  # squared norms of W_1's columns [E]
    step: int  # normalised step of the output matrix [R]
    scale: int  # of the hidden matrices [R]
    gain: int  # [R]
    gram: int  # x x^T times the step of its columns [R, R]
    system: int  # [P, P], strictly lower
    blocks: int  # inverses of its diagonal blocks [P, 16]
    begin: int  # error that the memory's start makes [R, V]
    moved: int  # x D_1^T [R, V]
    carried: int  # x S_1^T [R, V]
    errors: int  # [P, V]
    hidden_errors: int  # [P, G E]
    hidden_q: int  # [b, G E]
    z: int  # hidden activations of the queries [b, E]
    gram_q: int  # z x^T times the step of its columns [b, R]
    end_errors: int  # errors as the chunk's end weighs them, token by token [R, V]
    last_errors: int  # and as its momentum does
    end_hidden_errors: int  # [R, G E]
    last_hidden_errors: int
    # Muon: see `muon.py`
    stepped_errors: int  # [P, V]
    sums: int  # [W, R, V]
    steps: int
    hidden_sums: int  # [W, R, G E]
    hidden_steps: int
    # Gradients; by what is named like a part above
    d_hidden_k: int
    d_hidden_q: int
    d_gram_q: int
    d_errors: int
    d_hidden_errors: int
    d_back: int  # by the back-propagated errors [P, E]
    d_x: int  # [R, entry]
    d_stepped: int  # by x times its step [R, entry]
    d_slope: int
    d_step: int
    d_gain: int
    d_columns: int
    d_gram: int
    d_moved: int
    d_carried: int
    d_begin: int
    d_steps: int
    d_hidden_steps: int
    end: int


def _offsets(plan: Plan) -> Work:
    view, sources, chunk = plan.view, plan.sources, plan.chunk
    shapes = {
        "hidden_k": (view, plan.stacked),
        "x": (view, plan.hidden_dim),
        "columns": (plan.hidden_dim,),
        "step": (view,),
        "gram": (view, view),
        "system": (sources, sources),
        "blocks": (sources, 16),
        "begin": (view, plan.value_dim),
        "errors": (sources, plan.value_dim),
        "hidden_errors": (sources, plan.stacked),
        "hidden_q": (chunk, plan.stacked),
        "z": (chunk, plan.hidden_dim),
        "gram_q": (chunk, view),
        "steps": (plan.writes * view, plan.value_dim),
        "hidden_steps": (plan.writes * view, plan.stacked),
        "d_back": (sources, plan.hidden_dim),
        "d_x": (view, plan.entry_dim),
    }
    same = {"slope": "hidden_k", "scale": "step", "gain": "step", "moved": "begin", "carried": "begin"}
    same |= {"end_errors": "begin", "last_errors": "begin", "d_stepped": "d_x"}
    same |= {"end_hidden_errors": "hidden_k", "last_hidden_errors": "hidden_k", "stepped_errors": "errors"}
    same |= {"sums": "steps", "hidden_sums": "hidden_steps"}
    at, places = 0, {}
    for name in Work._fields:
        places[name] = at
        if name != "end":
            like = name if name in shapes else same.get(name, name.removeprefix("d_"))
            # Parts begin at multiples of 128 bytes
            at += -(-math.prod(shapes[same.get(like, like)]) // 32) * 32
    return Work(**places)
