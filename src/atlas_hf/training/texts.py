"""Reading documents from text, JSON and parquet files and from folders of the `datasets` library."""

import codecs
import tempfile
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import datasets
import pyarrow

from atlas_hf.training.errors import InputError

TEXT_SUFFIXES = (".txt", ".text", ".md")
JSON_SUFFIXES = (".json", ".jsonl")
PARQUET_SUFFIXES = (".parquet",)
SUFFIXES = TEXT_SUFFIXES + JSON_SUFFIXES + PARQUET_SUFFIXES
HELD_OUT_SPLITS = ("validation", "test")


# What the `datasets` library raises for files that it cannot read.
UNREADABLE = (OSError, ValueError, pyarrow.ArrowException, datasets.exceptions.DatasetGenerationError)


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

    A text file is one document; a JSON, JSON-lines or parquet file holds one per record; a folder written by
    `Dataset.save_to_disk` or `DatasetDict.save_to_disk` one per row (of the split `train`; `validation`, or else `test`,
    is held out); any other folder stands for the files of these kinds in it, sorted by name.

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


def read_measured(paths: list[str | Path], text_column: str = "text") -> list[str]:
    """Documents to measure a model on: those of `read_corpus`, but of a saved dataset's splits those held out.

    A line says which split it is: `validation`, or else `test`.

    Raises:
        InputError: as `read_corpus`, or a dataset whose splits are others.
    """
    texts = []
    for path in map(Path, paths):
        if (path / "dataset_dict.json").exists():
            texts += _read_held_out_split(path, text_column)
        else:
            texts += read_corpus([path], text_column).train
    return texts


def _read_held_out_split(path: Path, text_column: str) -> list[str]:
    saved = _load_saved_dataset(path)
    split = next((name for name in HELD_OUT_SPLITS if name in saved), None)
    if split is None:
        raise InputError(
            f"{path} has the splits {', '.join(saved)}, none of {', '.join(HELD_OUT_SPLITS)} to measure on: name a single "
            f"split's folder, such as {path / next(iter(saved))}"
        )
    print(f"{path}: measured on its split {split}")
    texts = texts_of(saved[split], text_column, path)
    if not any(text.strip() for text in texts):
        raise InputError(f"{path} holds no text in its split {split}: name another, or leave it out")
    return texts


def _read_path(path: Path, text_column: str) -> Corpus:
    if not path.exists():
        raise InputError(f"{path} does not exist: check the path")
    if not path.is_dir():  # a pipe too
        if builder_of(path) != "text":
            return Corpus(_read_records(path, text_column))
        return Corpus([_read_text(path)])
    if (path / "dataset_dict.json").exists() or (path / "dataset_info.json").exists():
        return _read_saved_dataset(path, text_column)
    files = sorted(p for p in path.iterdir() if p.is_file() and p.suffix.lower() in SUFFIXES)
    if not files:
        raise InputError(
            f"{path} is a folder without a saved dataset and without files ending in "
            f"{', '.join(SUFFIXES)}: name the files themselves, or save the dataset there"
        )
    return read_corpus(files, text_column)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        marked = error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        raise InputError(
            f"{path} is not UTF-8 (byte {error.start} is 0x{error.object[error.start]:02x}): convert it, for example with "
            f"`iconv -f {'utf-16' if marked else 'latin1'} -t utf-8`"
        ) from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def builder_of(path: Path) -> str:
    """Which of the `datasets` library's builders reads a file; what is neither JSON nor parquet is text."""
    suffix = path.suffix.lower()
    return "json" if suffix in JSON_SUFFIXES else "parquet" if suffix in PARQUET_SUFFIXES else "text"


def _read_records(path: Path, text_column: str) -> list[str]:
    kind = {"json": "JSON or JSON lines", "parquet": "parquet"}[builder_of(path)]
    # A cache folder of its own: the texts go straight into memory, and nothing is left behind.
    with tempfile.TemporaryDirectory() as cache:
        try:
            rows = datasets.load_dataset(builder_of(path), data_files=str(path), split="train", cache_dir=cache)
        except UNREADABLE as error:
            raise InputError(f"{path} cannot be read as {kind}: {error.__cause__ or error}") from error
        except StopIteration as error:  # what `datasets` raises for a file without a row
            raise InputError(f"{path} holds no text: name a file with text in it, or leave it out") from error
        return texts_of(rows, text_column, path)


def _load_saved_dataset(path: Path) -> datasets.Dataset | datasets.DatasetDict:
    try:
        return datasets.load_from_disk(str(path))
    except (ValueError, OSError) as error:
        raise InputError(f"{path} looks like a saved dataset but cannot be loaded: {error}") from error


def _read_saved_dataset(path: Path, text_column: str) -> Corpus:
    saved = _load_saved_dataset(path)
    if isinstance(saved, datasets.Dataset):
        return Corpus(texts_of(saved, text_column, path))
    if "train" not in saved:
        raise InputError(
            f"{path} has the splits {', '.join(saved)} but no train: rename one, or name a single split's folder"
        )
    held_out = next((saved[name] for name in HELD_OUT_SPLITS if name in saved), None)
    return Corpus(
        texts_of(saved["train"], text_column, path),
        [] if held_out is None else texts_of(held_out, text_column, path),
    )


def check_column(columns: list[str], text_column: str, source) -> None:
    if text_column not in columns:
        raise InputError(
            f"{source} has no column {text_column!r}, only {', '.join(columns)}: choose one with --text-column"
        )


def texts_of(rows: datasets.Dataset, text_column: str, source) -> list[str]:
    """The texts of a column, without empty ones.

    Raises:
        InputError: no such column, or one that does not hold strings.
    """
    check_column(rows.column_names, text_column, source)
    texts = list(rows[text_column])
    if any(text is not None and not isinstance(text, str) for text in texts):
        raise InputError(f"column {text_column!r} of {source} does not hold strings: choose another with --text-column")
    return [text for text in texts if text]
