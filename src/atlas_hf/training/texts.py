"""Reading documents from text files, JSON files and folders of the `datasets` library."""

import tempfile
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import datasets

from atlas_hf.training.errors import InputError

TEXT_SUFFIXES = (".txt", ".text", ".md")
JSON_SUFFIXES = (".json", ".jsonl")
HELD_OUT_SPLITS = ("validation", "test")


@dataclass
class Corpus:
    """Documents to train on and, where the source names them, documents held out."""

    train: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)


def demo_texts() -> tuple[str, str]:
    """The two novels that ship with the package: the one to train on, the one to hold out."""
    folder = resources.files("atlas_hf") / "data"
    return (
        (folder / "prideprejudice.txt").read_text(encoding="utf-8"),
        (folder / "persuasion.txt").read_text(encoding="utf-8"),
    )


def read_corpus(paths: list[str | Path], text_column: str = "text") -> Corpus:
    """Documents of files and folders, in the order given.

    A text file is one document; a JSON or JSON-lines file holds one per record; a folder written by
    `Dataset.save_to_disk` or `DatasetDict.save_to_disk` one per row (of the split `train`; `validation`, or else `test`,
    is held out); any other folder stands for the text and JSON files in it, sorted by name.

    Raises:
        InputError: a path that does not exist, cannot be read, is not UTF-8 or holds no text.
    """
    corpus = Corpus()
    for path in map(Path, paths):
        found = _read_path(path, text_column)
        if not any(text.strip() for text in found.train):
            raise InputError(f"{path} holds no text: name a file with text in it, or leave it out")
        corpus.train += found.train
        corpus.held_out += found.held_out
    return corpus


def _read_path(path: Path, text_column: str) -> Corpus:
    if not path.exists():
        raise InputError(f"{path} does not exist: check the path")
    if path.is_file():
        if path.suffix in JSON_SUFFIXES:
            return Corpus(_read_json(path, text_column))
        return Corpus([_read_text(path)])
    if (path / "dataset_dict.json").exists() or (path / "dataset_info.json").exists():
        return _read_saved_dataset(path, text_column)
    files = sorted(p for p in path.iterdir() if p.is_file() and p.suffix in TEXT_SUFFIXES + JSON_SUFFIXES)
    if not files:
        raise InputError(
            f"{path} is a folder without a saved dataset and without files ending in "
            f"{', '.join(TEXT_SUFFIXES + JSON_SUFFIXES)}: name the files themselves, or save the dataset there"
        )
    return read_corpus(files, text_column)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 (byte {error.start} is 0x{error.object[error.start]:02x}): convert it, for example with "
            f"`iconv -f latin1 -t utf-8`"
        ) from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def _read_json(path: Path, text_column: str) -> list[str]:
    # A cache folder of its own: the texts go straight into memory, and nothing is left behind.
    with tempfile.TemporaryDirectory() as cache:
        try:
            rows = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=cache)
        except (datasets.exceptions.DatasetGenerationError, ValueError, OSError) as error:
            raise InputError(f"{path} cannot be read as JSON or JSON lines: {error}") from error
        return _column(rows, text_column, path)


def _read_saved_dataset(path: Path, text_column: str) -> Corpus:
    try:
        saved = datasets.load_from_disk(str(path))
    except (ValueError, OSError) as error:
        raise InputError(f"{path} looks like a saved dataset but cannot be loaded: {error}") from error
    if isinstance(saved, datasets.Dataset):
        return Corpus(_column(saved, text_column, path))
    if "train" not in saved:
        raise InputError(
            f"{path} has the splits {', '.join(saved)} but no train: rename one, or name a single split's folder"
        )
    held_out = next((saved[name] for name in HELD_OUT_SPLITS if name in saved), None)
    return Corpus(
        _column(saved["train"], text_column, path),
        [] if held_out is None else _column(held_out, text_column, path),
    )


def _column(rows: datasets.Dataset, text_column: str, path: Path) -> list[str]:
    if text_column not in rows.column_names:
        raise InputError(
            f"{path} has no column {text_column!r}, only {', '.join(rows.column_names)}: choose one with --text-column"
        )
    texts = list(rows[text_column])
    if any(text is not None and not isinstance(text, str) for text in texts):
        raise InputError(f"column {text_column!r} of {path} does not hold strings: choose another with --text-column")
    return [text for text in texts if text]
