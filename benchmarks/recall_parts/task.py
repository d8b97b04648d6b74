"""Multi-query associative recall, after Zoology (Arora et al., 2023): store key-value pairs, then answer queries.

A sequence holds `num_pairs` keys, each followed by its value, and then every key once more at a random place, filler
tokens between. Only the queries are answered: the label at a query's place is its key's value. Keys come from the lower
half of the vocabulary, values from the upper half; token 0 is the filler.
"""

from dataclasses import dataclass

import torch

IGNORE = -100


@dataclass(frozen=True)
class Setting:
    """Size of a task."""

    vocab_size: int
    num_pairs: int
    length: int


SETTINGS = {
    "small": Setting(64, 8, 48),
    "medium": Setting(96, 16, 96),
    "large": Setting(256, 64, 256),
}


def sample(setting: Setting, batch_size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch: `input_ids [B, T]` and `labels [B, T]`, `IGNORE` everywhere but at the queries."""
    half, pairs = setting.vocab_size // 2, setting.num_pairs
    gap = setting.length - 2 * pairs
    if pairs > half - 1 or gap < pairs:
        raise ValueError(f"{setting} has no room for {pairs} distinct keys and their queries")

    def ranks(count, width):
        return torch.rand(batch_size, width, generator=generator).argsort(1)[:, :count]

    keys = 1 + ranks(pairs, half - 1)
    values = half + torch.randint(0, setting.vocab_size - half, (batch_size, pairs), generator=generator)
    ids = torch.zeros(batch_size, setting.length, dtype=torch.long)
    labels = torch.full_like(ids, IGNORE)
    ids[:, 0 : 2 * pairs : 2], ids[:, 1 : 2 * pairs : 2] = keys, values
    places = 2 * pairs + ranks(pairs, gap)
    ids.scatter_(1, places, keys)
    labels.scatter_(1, places, values)
    return ids, labels
