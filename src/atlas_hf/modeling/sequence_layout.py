"""Which tokens of a batch are real and where sequences begin, worked out once per forward pass.

Legend: B rows, T tokens a row, N sequences, L tokens of the longest one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

# Places a sequence's tokens may take up for each of them, before sequences are parted by length.
MOST_PLACES = 2


@dataclass(frozen=True)
class SequenceLayout:
    """Places of the real tokens of every sequence, in order: a masked token does not exist.

    Attributes:
        index: `[N, L]`, place in the flattened `B * T` of the l-th real token of sequence `n` (any place for `l >= lengths`).
        lengths: `[N]`, real tokens of each sequence; may be zero.
        last_sequence_of_row: `[B]`, the sequence that a row's cache goes on with.
        mask: `[B, T]` bool, or `None` if all tokens are real.
        groups: numbers of sequences of like length, and how long the longest of them is; empty if all go together.
        segments: `[B, T]`, the packed documents' numbers that it was made from.
    """

    index: torch.Tensor
    lengths: torch.Tensor
    last_sequence_of_row: torch.Tensor
    mask: torch.Tensor | None
    groups: tuple[tuple[torch.Tensor, int], ...] = ()
    segments: torch.Tensor | None = None

    @classmethod
    def from_mask(cls, mask: torch.Tensor) -> "SequenceLayout":
        """One sequence a row, `mask [B, T]` true at its tokens, wherever they stand."""
        batch, num_tokens = mask.shape
        mask = mask.bool()
        # A stable sort brings the real tokens to the front and keeps their order.
        order = torch.sort((~mask).to(torch.uint8), dim=1, stable=True).indices
        rows = torch.arange(batch, device=mask.device)
        return cls(order + rows[:, None] * num_tokens, mask.sum(1), rows, mask)

    @classmethod
    def from_segments(cls, segments: torch.Tensor, mask: torch.Tensor | None = None) -> "SequenceLayout":
        """Packed documents: a new sequence wherever `segments [B, T]` changes along a row, and at every row's start."""
        batch, num_tokens = segments.shape
        device = segments.device
        begins = torch.ones(batch, num_tokens, dtype=torch.bool, device=device)
        begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
        sequence = begins.flatten().cumsum(0) - 1
        num_sequences = int(sequence[-1]) + 1
        real = (
            torch.ones(batch * num_tokens, dtype=torch.bool, device=device) if mask is None else mask.bool().flatten()
        )
        places = real.nonzero()[:, 0]
        owner = sequence[places]
        lengths = torch.bincount(owner, minlength=num_sequences)
        first = lengths.cumsum(0) - lengths
        offset = torch.arange(len(places), device=device) - first[owner]
        known = lengths.tolist()
        index = torch.zeros(num_sequences, max(*known, 1), dtype=torch.long, device=device)
        index[owner, offset] = places
        groups = tuple((torch.tensor(numbers, device=device), longest) for numbers, longest in groups_of(known))
        mask = None if mask is None else mask.bool()
        return cls(index, lengths, sequence.view(batch, num_tokens)[:, -1], mask, groups, segments)

    def to(self, device, non_blocking: bool = False) -> "SequenceLayout":
        """On another device: accelerate calls it where a model's layers lie on several."""

        def moved(x):
            return None if x is None else x.to(device, non_blocking=non_blocking)

        return SequenceLayout(
            *(moved(x) for x in (self.index, self.lengths, self.last_sequence_of_row, self.mask)),
            tuple((moved(numbers), longest) for numbers, longest in self.groups),
            moved(self.segments),
        )

    def parts(self) -> Iterator[tuple[torch.Tensor | None, "SequenceLayout"]]:
        """Numbers of the sequences and their own layout, group by group; `None`: all of them."""
        if not self.groups:
            yield None, self
        for numbers, longest in self.groups:
            index, lengths = self.index[numbers, :longest], self.lengths[numbers]
            yield numbers, replace(self, index=index, lengths=lengths, groups=())

    @property
    def _real(self) -> torch.Tensor:
        return torch.arange(self.index.shape[1], device=self.index.device) < self.lengths[:, None]

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, T, ...] -> [N, L, ...]`, zero beyond a sequence's end."""
        y = x.flatten(0, 1)[self.index]
        return torch.where(self._real.view(*self.index.shape, *[1] * (y.ndim - 2)), y, 0)

    def scatter(self, of_parts: list[torch.Tensor], batch: int, num_tokens: int) -> torch.Tensor:
        """`[N, L, ...]` of every part `-> [B, T, ...]`, zero at masked tokens."""
        shape = of_parts[0].shape[2:]
        x = of_parts[0].new_zeros(batch * num_tokens, *shape)
        for (_, part), y in zip(self.parts(), of_parts, strict=True):
            real = part._real
            x = x.index_put((part.index[real],), y[real])
        return x.view(batch, num_tokens, *shape)


def groups_of(lengths: list[int]) -> list[tuple[list[int], int]]:
    """Numbers of sequences whose lengths differ by no more than a factor of two, and the longest's; none if all go together.

    Sequences that are computed side by side are all as long as the longest.
    """
    if max(lengths) * len(lengths) <= MOST_PLACES * sum(lengths):
        return []
    groups = []
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        if groups and 2 * lengths[number] >= groups[-1][1]:
            groups[-1][0].append(number)
        else:
            groups.append(([number], max(lengths[number], 1)))
    return groups


def next_labels(labels: torch.Tensor, mask: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """What each token of `labels [B, T]` is to predict: the label of the next real token, whatever padding lies between.

    Masked tokens (zero in `mask [B, T]`) and each row's last real one predict nothing, which `ignore_index` says.
    """
    mask = mask.bool()
    order = torch.sort((~mask).to(torch.uint8), dim=1, stable=True).indices
    coming = labels.masked_fill(~mask, ignore_index).gather(1, order)[:, 1:]
    coming = torch.nn.functional.pad(coming, (0, 1), value=ignore_index)
    return torch.full_like(labels, ignore_index).scatter(1, order, coming).masked_fill(~mask, ignore_index)
