"""Which form of the recurrence runs: decided here, and nowhere else."""

from .recurrence_chunk import chunk_atlas
from .recurrence_step import step_atlas


def select_form(num_tokens: int, has_state: bool):
    """`step_atlas` for one token that goes on from a state; `chunk_atlas` for everything else.

    The two agree to rounding, so the choice is one of speed: the chunk form lays out at least one whole chunk.
    """
    return step_atlas if has_state and num_tokens == 1 else chunk_atlas
