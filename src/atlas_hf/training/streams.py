"""Documents read while training goes on, from any source that the `datasets` library can stream."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import datasets
import torch
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerBase

from atlas_hf.training.errors import InputError
from atlas_hf.training.texts import HELD_OUT_SPLITS, UNREADABLE, builder_of, check_column
from atlas_hf.training.tokenizer import document_positions, packed_labels

# Without a split of its own, one document in so many is held out.
HELD_OUT_EVERY = 20
# Read ahead for the tokenizer and for counting tokens.
SAMPLE_CHARACTERS = 2_000_000
SHUFFLED_DOCUMENTS = 1000
# Documents of a source that are looked at before the work begins.
LOOKED_AT = 16


@dataclass
class DocumentStream:
    """Texts to train on and held-out ones, read anew at every iteration."""

    train: datasets.IterableDataset
    held_out: datasets.IterableDataset

    def sample(self) -> list[str]:
        """The first training documents, up to about two million characters."""
        return list(_until(self.train, SAMPLE_CHARACTERS))

    def held_out_texts(self, characters: int = SAMPLE_CHARACTERS // HELD_OUT_EVERY) -> list[str]:
        return list(_until(self.held_out, characters))


def _until(rows, characters: int) -> Iterator[str]:
    for row in _readable(rows):
        yield row["text"]
        characters -= len(row["text"])
        if characters <= 0:
            return


def _readable(rows) -> Iterator[dict]:
    """`rows`, of which only the first were looked at before."""
    try:
        yield from rows
    except UNREADABLE as error:
        raise InputError(
            f"the stream cannot be read to its end: {error}; correct the source, or name another"
        ) from error


def open_stream(
    paths: list[Path], name: str | None, subset: str | None, text_column: str, *, hold_out: bool
) -> DocumentStream:
    """Stream local text, JSON and parquet files, or a data set by its name on the Hub or its folder.

    `hold_out`: keep documents back to measure on, those of a split `validation` or `test`, or else one in twenty.

    Raises:
        InputError: a source that cannot be opened, or that lacks the column.
    """
    parts = [_open_file(path, text_column) for path in paths]
    held_out = None
    if name is not None:
        splits = load_by_name(name, subset, streaming=True)
        parts.append(_texts(splits["train"], text_column, name))
        split = next((s for s in HELD_OUT_SPLITS if s in splits), None) if hold_out else None
        if split is not None:
            held_out = _texts(splits[split], text_column, f"the split {split} of {name}")
    train = parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
    if hold_out and held_out is None:
        held_out, train = train.filter(_is_held_out), train.filter(lambda row: not _is_held_out(row))
    return DocumentStream(train, held_out)


def _is_held_out(row: dict) -> bool:
    """By the text itself: its place differs with the order of shards, between workers, and from one epoch to another."""
    return zlib.crc32(row["text"].encode()) % HELD_OUT_EVERY == 0


def load_by_name(name: str, subset: str | None, *, streaming: bool):
    """All splits of a data set on the Hub, or of a folder of data files.

    Raises:
        InputError: it cannot be loaded, or has no split `train`.
    """
    try:
        splits = datasets.load_dataset(name, subset, streaming=streaming)
    except UNREADABLE as error:
        reason = error.__cause__ or error
        raise InputError(f"the data set {name!r} cannot be loaded: {reason}; check --dataset and --subset") from error
    except ImportError as error:  # of a package that reads files of that kind
        raise InputError(f"the data set {name!r} cannot be read: {error}; or name its text files themselves") from error
    except StopIteration as error:  # what `datasets` raises for files without a row
        raise InputError(f"the data set {name!r} holds no documents: name another source") from error
    if "train" not in splits:
        raise InputError(
            f"the data set {name!r} has the splits {', '.join(splits)} but no train: name another data set"
        )
    return splits


def _open_file(path: Path, text_column: str) -> datasets.IterableDataset:
    if not path.is_file():
        raise InputError(
            f"{path} is not a file, which --stream reads at every pass again: give a folder's data set with --dataset {path}"
        )
    if not path.stat().st_size:
        raise InputError(f"{path} holds no documents: name another source")
    builder = builder_of(path)
    options = {"sample_by": "document"} if builder == "text" else {}
    try:
        rows = datasets.load_dataset(builder, data_files=str(path), split="train", streaming=True, **options)
    except UNREADABLE as error:
        raise InputError(f"{path} cannot be read as {builder}: {error}") from error
    except StopIteration as error:  # what `datasets` raises for a file without a row
        raise InputError(f"{path} holds no documents: name another source") from error
    return _texts(rows, "text" if builder == "text" else text_column, path)


def _texts(rows: datasets.IterableDataset, text_column: str, source) -> datasets.IterableDataset:
    try:
        first = list(rows.take(LOOKED_AT))
    except UNREADABLE as error:
        raise InputError(f"{source} cannot be read: {error}; correct it, or name another source") from error
    if not first:
        raise InputError(f"{source} holds no documents: name another source")
    check_column(list(first[0]), text_column, source)
    if any(not isinstance(row[text_column], str | None) for row in first):
        raise InputError(f"column {text_column!r} of {source} does not hold strings: choose another with --text-column")
    if len(first) < LOOKED_AT and not any((row[text_column] or "").strip() for row in first):
        raise InputError(f"{source} holds no text: name a source with text in it, or leave it out")
    rows = rows.select_columns([text_column])
    rows = rows if text_column == "text" else rows.rename_column(text_column, "text")
    # Sources can be joined only if their columns have one type, and parquet has several for texts
    rows = rows.cast(datasets.Features({"text": datasets.Value("string")}))
    return rows.filter(lambda row: bool(row["text"]))


class StreamedBlocks(IterableDataset):
    """Blocks of `block_size` tokens from a stream of documents, each document ended by the end-of-text token.

    Without end: documents come again and again, in another order at every pass (a shuffled buffer, decided by `seed`). With
    `packed`, blocks say where documents begin, and the memory starts anew there.
    """

    def __init__(
        self,
        rows: datasets.IterableDataset,
        tokenizer: PreTrainedTokenizerBase,
        block_size: int,
        *,
        packed: bool,
        seed: int,
    ):
        self.rows, self.tokenizer, self.block_size = rows, tokenizer, block_size
        self.packed, self.seed = packed, seed

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        # Passes are counted here: a resumed Trainer, which knows no length, would leave out batches of the first one only.
        for number in count():
            blocks = self.one_pass(number)
            first = next(blocks, None)
            if first is None:
                return  # a worker that has no part of the source
            yield first
            yield from blocks

    def one_pass(self, number: int) -> Iterator[dict[str, torch.Tensor]]:
        """The blocks of all documents once, in the order of that pass; what fills no block at its end is left out."""
        end, held = self.tokenizer.eos_token_id, []
        rows = _readable(self.rows.shuffle(seed=self.seed + number, buffer_size=SHUFFLED_DOCUMENTS))
        while batch := [row["text"] for row in islice(rows, 64)]:
            for ids in self.tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
                held += [*ids, end]
                whole = len(held) // self.block_size * self.block_size
                if whole:
                    yield from self._blocks(torch.tensor(held[:whole]))
                    held = held[whole:]

    def _blocks(self, ids: torch.Tensor) -> Iterator[dict[str, torch.Tensor]]:
        for block in ids.view(-1, self.block_size):
            example = {"input_ids": block, "labels": block}
            if self.packed:
                example["position_ids"] = document_positions(block[None], self.tokenizer.eos_token_id)[0]
                example["labels"] = packed_labels(block, example["position_ids"])
            yield example
