"""The language modelling loss without the logits of all tokens, which at a large vocabulary outweigh everything else."""

import torch
import torch.nn.functional as F
from torch import nn

from .dispatch import select_fused
from .recompute import recomputed

# Tokens whose logits stand in memory at one time.
TOKENS_AT_ONCE = 1024


def _sum_of_losses(head, weight, hidden_states, targets, ignore_index: int):
    logits = head(hidden_states) if weight is None else F.linear(hidden_states, weight)
    return F.cross_entropy(logits.float(), targets, ignore_index=ignore_index, reduction="sum")


def linear_cross_entropy(
    head: nn.Module,
    hidden_states: torch.Tensor,
    targets: torch.Tensor,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    kernels: str = "torch",
    **kwargs,
) -> torch.Tensor:
    """Mean cross entropy of `head(hidden_states)` against `targets`, equal to that of transformers' loss to rounding.

    Logits are made for some tokens at a time, and once more for the backward pass. On a GPU fla's fused loss takes the place
    of a plain `head`: it makes them once, and the gradients with them.

    Args:
        head: `[n, D] -> [n, vocab]`.
        hidden_states: `[..., D]`.
        targets: `[...]`, `ignore_index` where nothing is to be predicted.
        num_items_in_batch: what the sum is divided by; `None`: the number of targets.

    Returns:
        A float32 scalar; zero without any target.
    """
    hidden_states = hidden_states.flatten(0, -2)
    targets = targets.flatten().to(hidden_states.device)
    plain = type(head) is nn.Linear and head.bias is None and not hasattr(head, "_hf_hook")
    # Hooks may have to fetch the weight, of a model whose parameters are spread over processes
    plain = plain and not (head._forward_pre_hooks or head._forward_hooks)
    fused = None
    if plain and head.weight.dtype == hidden_states.dtype:
        fused = select_fused(kernels, hidden_states)
    if fused is not None:
        total = fused.linear_cross_entropy(hidden_states, head.weight, targets, ignore_index)
    else:
        total = sum(
            recomputed(_sum_of_losses, head, head.weight if plain else None, x, t, ignore_index)
            for x, t in zip(hidden_states.split(TOKENS_AT_ONCE), targets.split(TOKENS_AT_ONCE), strict=True)
        )
    if num_items_in_batch is None:
        num_items_in_batch = (targets != ignore_index).sum().clamp_min(1)
    elif isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch
