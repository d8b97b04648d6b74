"""A chunk's place in the inputs, and its forward half in order; both directions walk like this.

Legend: as in `plan.py`.
"""

import triton
import triton.language as tl

from .chunk import (
    activations_of_keys,
    first_errors,
    hidden_errors,
    hidden_of_keys,
)
from .muon import keep_gram, step_errors, sum_errors, take_steps
from .pairs import set_up, solve
from .plan import Inputs
from .reads import activations_of_queries, hidden_of_queries


@triton.jit
def at_chunk(inputs, row, chunk, num_chunks, plan: tl.constexpr):
    """Inputs, or their gradients, of one row from one chunk on; of the tokens, from the first one in view."""
    place = row * num_chunks + chunk
    length = num_chunks * plan.chunk
    key = row * (length + plan.window - 1) + chunk * plan.chunk
    query = row * length + chunk * plan.chunk
    base: tl.constexpr = plan.stacked if plan.deep else plan.value_dim
    return Inputs(
        phi_k=inputs.phi_k + key * plan.features,
        base_k=inputs.base_k + key * base,
        step_k=inputs.step_k + key,
        target=inputs.target + key * plan.value_dim,
        phi_q=inputs.phi_q + query * plan.features,
        base_q=inputs.base_q + query * base,
        output_start=inputs.output_start,
        gram_kk=inputs.gram_kk + place * plan.view * plan.view,
        gram_qk=inputs.gram_qk + place * plan.chunk * plan.view,
        a=inputs.a + place * plan.chunk,
        a_before=inputs.a_before + place * plan.chunk,
        a_end=inputs.a_end + place,
        m=inputs.m + place * plan.chunk,
        m_before=inputs.m_before + place * plan.chunk,
        m_end=inputs.m_end + place,
        beta_end=inputs.beta_end + place,
        weights=inputs.weights + place * plan.chunk * plan.sources,
        end_weights=inputs.end_weights + place * plan.sources,
        end_momentum=inputs.end_momentum + place * plan.sources,
        accumulated=inputs.accumulated + place * plan.writes * plan.sources,
        sizes=inputs.sizes + place * plan.chunk * plan.writes,
        end_sizes=inputs.end_sizes + place * plan.writes,
    )


@triton.jit
def gram_of_entry(inputs, history, plan: tl.constexpr):
    """Where the inner products of what the output matrix reads of the keys lie, for Muon: `[R, R]` in float64."""
    return history + plan.steps * plan.view_pad * plan.view_pad if plan.deep else inputs.gram_kk


@triton.jit
def take_chunk(inputs, memory, start, work, history, plan: tl.constexpr, with_reads: tl.constexpr):
    """The chunk's intermediates: activations and errors of the keys, and on request those of the reads."""
    entry = work + plan.at.x if plan.deep else inputs.phi_k
    gram = work + plan.at.gram if plan.deep else inputs.gram_kk
    if plan.deep:
        hidden_of_keys(inputs, memory, work, plan)
        tl.debug_barrier()
        activations_of_keys(inputs, memory, start, work, plan)
        tl.debug_barrier()
    first_errors(inputs, memory, start, entry, work, plan)
    tl.debug_barrier()
    if plan.exact:
        set_up(inputs, gram, work, plan)
        tl.debug_barrier()
        solve(inputs, work, plan)
        tl.debug_barrier()
    if plan.muon_output:
        gram = gram_of_entry(inputs, history, plan)
        if plan.deep:
            keep_gram(work + plan.at.x, gram, plan)
            tl.debug_barrier()
        step_errors(inputs, work, plan)
        tl.debug_barrier()
        errors = work + plan.at.stepped_errors
        sum_errors(inputs, errors, work + plan.at.sums, plan.value_dim, plan.value_tile, plan)
        tl.debug_barrier()
        take_steps(gram, history, work + plan.at.sums, work + plan.at.steps, 1, plan.value_dim, plan.value_tile, plan)
        tl.debug_barrier()
    if plan.deep:
        hidden_errors(memory, start, work, plan)
        tl.debug_barrier()
        if plan.muon_hidden:
            sums = work + plan.at.hidden_sums
            sum_errors(inputs, work + plan.at.hidden_errors, sums, plan.stacked, plan.hidden_tile, plan)
            tl.debug_barrier()
            take_steps(
                inputs.gram_kk, history, sums, work + plan.at.hidden_steps,
                plan.groups, plan.hidden_dim, plan.hidden_tile, plan,
            )  # fmt: skip
            tl.debug_barrier()
        if with_reads:
            hidden_of_queries(inputs, memory, work, plan)
            tl.debug_barrier()
            activations_of_queries(inputs, work, plan)
            tl.debug_barrier()
