"""What a forward pass is told about its tokens: which exist, and where documents begin.

Legend: B rows, T new tokens a row.
"""

import torch
from transformers.utils import TransformersKwargs, logging

from .configuration_atlas import LAYER_TYPE, check_near_misses

logger = logging.get_logger("transformers.models.atlas")

# What transformers' own models take beside `TransformersKwargs`, all without an effect on a memory
_KNOWN = {
    *TransformersKwargs.__annotations__,
    "return_dict",
    "shift_labels",
    "ignore_index",
    "cache_position",
    "cu_seqlens",
}
_ARGUMENTS = ("attention_mask", "position_ids", "cache", "past_key_values", "inputs_embeds", "use_cache", "labels")
_ARGUMENTS += ("logits_to_keep", "skip_logits")


def check_names(kwargs: dict) -> None:
    """Refuse misspelt arguments, and say once which others have no effect."""
    unknown = [name for name, value in kwargs.items() if name not in _KNOWN and value is not None]
    if not unknown or torch.compiler.is_compiling():
        return
    check_near_misses(unknown, [*_ARGUMENTS, *_KNOWN], "an argument of an Atlas model")
    logger.warning_once(f"Atlas has no use for the argument(s) {', '.join(unknown)}, which are ignored")


def check_mask(attention_mask, batch: int, num_tokens: int, past) -> torch.Tensor | None:
    """The current tokens' part of a 2D mask as booleans, or `None` if every token is real."""
    if attention_mask is None:
        return None
    if isinstance(attention_mask, dict):
        if LAYER_TYPE not in attention_mask:
            raise ValueError(
                f"attention_mask is a dictionary with {', '.join(map(str, attention_mask)) or 'nothing'} and without "
                f"{LAYER_TYPE!r}, the type of Atlas' layers: add it, or pass the mask itself"
            )
        attention_mask = attention_mask[LAYER_TYPE]
        if attention_mask is None:
            return None
    if not isinstance(attention_mask, torch.Tensor):
        raise TypeError(f"attention_mask must be a tensor [batch, tokens], got {type(attention_mask).__name__}")
    if attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask must be [batch, tokens], got {tuple(attention_mask.shape)}: a memory has no pairs of tokens "
            "to mask, only tokens that exist or do not"
        )
    length, compiling = attention_mask.shape[1], torch.compiler.is_compiling()
    fits = length >= num_tokens if compiling else length in (num_tokens, int(past) + num_tokens)
    if attention_mask.shape[0] != batch or not fits:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, but there are {batch} rows of {num_tokens} new tokens"
            f" after {int(past)} cached ones: give [{batch}, {int(past) + num_tokens}], or only the new tokens' part"
        )
    mask = attention_mask[:, length - num_tokens :]
    # Not every dtype that holds a mask can be compared
    if not compiling and mask.dtype != torch.bool and not bool((mask.float() >= 0).all()):
        raise ValueError(
            f"attention_mask holds {mask.float().min().item():g}: give 1 (or true) for tokens that exist and 0 for others, "
            "not terms to add to attention scores"
        )
    mask = mask.bool()
    if not compiling and bool(mask.all()):
        return None
    return mask


def _begins(numbers, mask, steps):
    """Tokens `[B, T]` at which a document begins after another: where `steps` finds one in the differences of `numbers`.

    A masked token does not exist: differences are those between neighbouring real tokens.
    """
    begins = torch.zeros(numbers.shape, dtype=torch.bool, device=numbers.device)
    if mask is None:
        begins[:, 1:] = steps(numbers.diff())
        return begins
    order = torch.sort((~mask).to(torch.uint8), dim=1, stable=True).indices  # the real ones first
    found = steps(numbers.gather(1, order).diff()) & mask.gather(1, order)[:, 1:]
    return begins.scatter(1, order[:, 1:], found)


def packed_segments(kwargs, position_ids, mask, batch, num_tokens, device, past):
    """Document numbers `[B, T]` of a packed batch.

    From `seq_idx`, from `cu_seq_lens_q` (`cu_seqlens` in flash-linear-attention) or from `position_ids` that restart.
    """
    seq_idx, cu, cu_k = (kwargs.pop(name, None) for name in ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"))
    as_in_fla = kwargs.pop("cu_seqlens", None)
    if cu is not None and as_in_fla is not None:
        raise ValueError("cu_seq_lens_q and cu_seqlens are the same argument: pass one of them")
    cu = as_in_fla if cu is None else cu
    for name in ("max_length_q", "max_length_k"):
        kwargs.pop(name, None)
    cu, cu_k = (None if x is None else torch.as_tensor(x, device=device) for x in (cu, cu_k))
    if cu is not None and cu_k is not None and not torch.equal(cu, cu_k):
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k differ: an Atlas token reads the document that it stands in")
    cu = cu_k if cu is None else cu
    if cu is not None and cu.is_floating_point():
        raise ValueError(f"cu_seq_lens_q must be whole numbers, got {cu.dtype}: convert them")
    told = {}
    if seq_idx is not None:
        seq_idx = torch.as_tensor(seq_idx, device=device)
        if tuple(seq_idx.shape) != (batch, num_tokens):
            raise ValueError(f"seq_idx must be {(batch, num_tokens)}, got {tuple(seq_idx.shape)}")
        told["seq_idx"] = _begins(seq_idx, mask, lambda step: step != 0)
    if cu is not None:
        fits = cu.ndim == 1 and len(cu) > 1 and batch == 1 and bool((cu.diff() >= 0).all())
        if not fits or int(cu[0]) != 0 or int(cu[-1]) != num_tokens:
            raise ValueError(
                f"cu_seq_lens_q must rise from 0 to the number of tokens of a batch of one row, got {cu.tolist()} for "
                f"{batch} rows of {num_tokens} tokens"
            )
        marks = torch.zeros(1, num_tokens + 1, dtype=torch.long, device=device)
        marks[:, cu[1:].long()] = 1
        told["cu_seq_lens_q"] = _begins(marks[:, :-1].cumsum(-1), mask, lambda step: step != 0)
    if (
        position_ids is not None
        and int(past) == 0
        and tuple(position_ids.shape)
        not in (
            (batch, num_tokens),
            (1, num_tokens),
        )
    ):
        raise ValueError(f"position_ids must be {(batch, num_tokens)}, got {tuple(position_ids.shape)}")
    if position_ids is not None and num_tokens > 1 and int(past) == 0:
        # Between real tokens padding may have left gaps, so that there only a step back is a restart.
        restarts = (lambda step: step != 1) if mask is None else (lambda step: step <= 0)
        from_positions = _begins(position_ids.expand(batch, -1), mask, restarts)
        # Positions that simply go on are what callers pass who know of no documents.
        if bool(from_positions.any()):
            told["position_ids"] = from_positions
    if not told:
        return None
    (name, begins), *others = told.items()
    for other, claimed in others:
        if not torch.equal(begins, claimed):
            raise ValueError(f"{name} and {other} name different document boundaries: pass one of them")
    if not bool(begins.any()):
        return None
    if int(past) > 0:
        raise ValueError("packed documents cannot go on from a cache that has seen tokens: pass a fresh one, or none")
    return begins.cumsum(1)
