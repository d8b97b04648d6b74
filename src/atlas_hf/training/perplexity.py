"""Perplexity of a model and of n-gram baselines, over the same targets.

The targets are every token of every block but the block's first, which has nothing before it in the block; with `positions`,
every token but the first of each document. Perplexity is `exp` of the mean negative log probability of the targets, in nats.
"""

import math

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from atlas_hf.training.errors import InputError
from atlas_hf.training.tokenizer import IGNORED, packed_labels

ADDED_COUNT = 0.1


@torch.inference_mode()
def model_perplexity(
    model: PreTrainedModel, blocks: torch.Tensor, batch_size: int = 8, positions: torch.Tensor | None = None
) -> float:
    """Perplexity of `blocks [N, L]`, each read by itself from the model's initial memory.

    `positions [N, L]`: places of the tokens within their documents, where the memory starts anew at each.

    Raises:
        InputError: no token is a target.
    """
    _check_targets(blocks, positions)
    was_training = model.training
    model.eval()
    total, num_targets = 0.0, 0
    # Silent where transformers' progress bars are switched off
    for start in logging.tqdm(range(0, len(blocks), batch_size), desc="held-out perplexity", leave=False):
        batch = blocks[start : start + batch_size].to(model.device)
        places = None if positions is None else positions[start : start + batch_size].to(model.device)
        labels = batch if places is None else packed_labels(batch, places)
        count = int((labels[:, 1:] != IGNORED).sum())
        if count:
            loss = model(input_ids=batch, position_ids=places, labels=labels, use_cache=False).loss
            total, num_targets = total + loss.item() * count, num_targets + count
    model.train(was_training)
    return _exponential(total / num_targets)


def unigram_perplexity(
    train: torch.Tensor, blocks: torch.Tensor, vocab_size: int, positions: torch.Tensor | None = None
) -> float:
    """`p(b) = (n(b) + 0.1) / (N + 0.1 V)`, counted over the tokens `train [N]`."""
    _check_targets(blocks, positions)
    counts = torch.bincount(train, minlength=vocab_size).double()
    probabilities = (counts + ADDED_COUNT) / (counts.sum() + ADDED_COUNT * vocab_size)
    return _perplexity(probabilities[blocks[:, 1:]], positions)


def bigram_perplexity(
    train: torch.Tensor, blocks: torch.Tensor, vocab_size: int, positions: torch.Tensor | None = None
) -> float:
    """`p(b | a) = (n(a, b) + 0.1) / (n(a, .) + 0.1 V)`, counted over neighbouring tokens of `train [N]`."""
    _check_targets(blocks, positions)
    # Counts are looked up in the sorted list of pairs that occur: a table of V * V would not fit for a large vocabulary.
    pairs, pair_counts = (train[:-1] * vocab_size + train[1:]).unique(return_counts=True)
    first_counts = torch.bincount(train[:-1], minlength=vocab_size).double()
    first, wanted = blocks[:, :-1], blocks[:, :-1] * vocab_size + blocks[:, 1:]
    place = torch.searchsorted(pairs, wanted).clamp_(max=pairs.numel() - 1)
    counts = torch.where(pairs[place] == wanted, pair_counts[place], 0).double()
    probabilities = (counts + ADDED_COUNT) / (first_counts[first] + ADDED_COUNT * vocab_size)
    return _perplexity(probabilities, positions)


def _check_targets(blocks: torch.Tensor, positions: torch.Tensor | None) -> None:
    targets = blocks[:, 1:] if positions is None else positions[:, 1:].nonzero()
    if not targets.numel():
        raise InputError(
            f"the held-out text of shape {tuple(blocks.shape)} has no token to predict, since each is the first of a "
            "document or block: give other text, or longer blocks"
        )


def _perplexity(probabilities: torch.Tensor, positions: torch.Tensor | None) -> float:
    if positions is not None:
        probabilities = probabilities[positions[:, 1:] != 0]
    return _exponential(-probabilities.log().mean().item())


def _exponential(mean_loss: float) -> float:
    return math.exp(mean_loss) if mean_loss < 700 else math.inf
