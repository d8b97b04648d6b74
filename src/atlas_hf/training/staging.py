"""Output folders that appear complete or not at all."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atlas_hf.training.errors import InputError
from atlas_hf.training.processes import ALONE, Processes

RUN_FILE = "run.json"
CHECKPOINTS = "checkpoints"
# Among the results that a run writes to its file when all else is written.
RESULTS = "losses"


def partial_folder(output: Path) -> Path:
    """Where a run is written until it is complete: beside `output`, or what it links to, so that a rename can finish it."""
    output = output.resolve()
    return output.with_name(output.name + ".partial")


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint in a folder that was saved whole: `Trainer` writes its own state last."""
    found = [path for path in folder.glob("checkpoint-*") if _read(path / "trainer_state.json") is not None]
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def _read(path: Path):
    """What a JSON file holds; `None` where there is none, or not a whole one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def check_output(output: Path, *, overwrite: bool = False, resume: bool = False, overwritable: bool = True) -> None:
    """Look before the long work whether `staged` will be able to write.

    `overwritable`: whether the command has an `--overwrite` to advise.

    Raises:
        InputError: the folder cannot be replaced, holds something that may not be, or an earlier run is in the way, or there
            is none to resume.
    """
    place = output.resolve()
    if place == Path.cwd() or place in Path.cwd().parents:
        raise InputError(
            f"output {output} is the folder you are in, or above it, and replaced at the end: name one inside"
        )
    if place.is_mount():
        raise InputError(f"output {output} is a mount point, which cannot be replaced: name a folder inside it")
    partial = partial_folder(output)
    if output.exists() and not output.is_dir():
        raise InputError(f"output {output} is a file: name a folder")
    if output.is_dir() and any(output.iterdir()):
        if not overwrite:
            remedy = "name another folder, or pass --overwrite to replace an old run"
            raise InputError(f"output {output} is not empty: {remedy if overwritable else 'name another folder'}")
        if not (output / RUN_FILE).exists():
            raise InputError(
                f"output {output} is not empty and not a run of atlas-hf (no {RUN_FILE}): name another folder"
            )
    _check_partial(partial, output, overwrite, resume)


def _check_partial(partial: Path, output: Path, overwrite: bool, resume: bool) -> None:
    try:
        partial.exists()
    except OSError as error:
        raise InputError(f"output {output} cannot be written: {error.strerror}; name another folder") from error
    has_checkpoint = last_checkpoint(partial / CHECKPOINTS) is not None
    if partial.exists() and not (partial / RUN_FILE).exists():
        raise InputError(
            f"{partial} is needed while the run lasts, and holds something else: move it, or name another output"
        )
    if RESULTS in (_read(partial / RUN_FILE) or ()):
        raise InputError(f"{partial} holds a finished run that was not moved to {output}: move it there, or remove it")
    if resume and not has_checkpoint:
        raise InputError(
            f"there is no interrupted run to resume at {partial}: leave out --resume (checkpoints need --save-steps)"
        )
    if has_checkpoint and not resume and not overwrite:
        raise InputError(
            f"{partial} holds an interrupted run: pass --resume to go on, --overwrite to drop it, or remove it"
        )


@contextmanager
def staged(
    output: Path, *, overwrite: bool = False, resume: bool = False, processes: Processes = ALONE
) -> Iterator[Path]:
    """A folder to write into, renamed to `output` when the block ends well.

    When it ends in an error nothing stays, except a folder that holds a checkpoint to resume from. Of several processes all
    look, and the main one makes, renames and removes.
    """
    check_output(output, overwrite=overwrite, resume=resume)
    partial = partial_folder(output)
    processes.wait()
    if processes.is_main:
        try:
            if partial.exists() and not resume:
                shutil.rmtree(partial)
            partial.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"output {output} cannot be written: {error.strerror}; name another folder") from error
    processes.wait()
    try:
        yield partial
    except BaseException:
        if processes.is_main and last_checkpoint(partial / CHECKPOINTS) is None:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    processes.wait()
    if processes.is_main:
        _move(partial, output)
    processes.wait()


def _move(partial: Path, output: Path) -> None:
    place = output.resolve()
    try:
        shutil.rmtree(partial / CHECKPOINTS, ignore_errors=True)
        if place.exists():
            shutil.rmtree(place)
        partial.rename(place)
    except OSError as error:
        raise InputError(
            f"output {output} cannot be replaced: {error.strerror}; all was written to {partial}: move it from there"
        ) from error
