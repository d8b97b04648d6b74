"""Output folders that appear complete or not at all."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from atlas_hf.training.errors import InputError
from atlas_hf.training.processes import ALONE, Processes

try:
    import fcntl
except ImportError:  # as on Windows
    fcntl = None

RUN_FILE = "run.json"
LOCK = ".lock"
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


def check_output(
    output: Path, *, overwrite: bool = False, resume: bool = False, flags: tuple[str, ...] = ("--overwrite", "--resume")
) -> None:
    """Look before the long work whether `staged` will be able to write.

    `flags`: those of these that the command has, to be advised.

    Raises:
        InputError: the folder cannot be replaced, holds something that may not be, or an earlier run or another command is in
            the way, or there is none to resume.
    """
    _check_place(output, overwrite, flags)
    _check_partial(partial_folder(output), output, overwrite, resume, flags)


def _check_place(output: Path, overwrite: bool, flags: tuple[str, ...]) -> None:
    place = output.resolve()
    if place == Path.cwd() or place in Path.cwd().parents:
        raise InputError(
            f"output {output} is the folder you are in, or above it, and replaced at the end: name one inside"
        )
    if place.is_mount():
        raise InputError(f"output {output} is a mount point, which cannot be replaced: name a folder inside it")
    if output.exists() and not output.is_dir():
        raise InputError(f"output {output} is a file: name a folder")
    if output.is_dir() and any(output.iterdir()):
        if not overwrite:
            remedy = ", or pass --overwrite to replace an old run" if "--overwrite" in flags else ""
            raise InputError(f"output {output} is not empty: name another folder{remedy}")
        if not (output / RUN_FILE).exists():
            raise InputError(
                f"output {output} is not empty and not a run of atlas-hf (no {RUN_FILE}): name another folder"
            )


def _check_partial(partial: Path, output: Path, overwrite: bool, resume: bool, flags: tuple[str, ...]) -> None:
    try:
        partial.exists()
    except OSError as error:
        raise InputError(f"output {output} cannot be written: {error.strerror}; name another folder") from error
    has_checkpoint = last_checkpoint(partial / CHECKPOINTS) is not None
    if (partial / LOCK).exists():
        with _locked(partial):
            pass
    elif partial.exists() and not (partial / RUN_FILE).exists():
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
        remedies = {"--resume": "pass --resume to go on", "--overwrite": "pass --overwrite to drop it"}
        told = [remedies[flag] for flag in remedies if flag in flags]
        raise InputError(
            f"{partial} holds an interrupted run: {', '.join([*told, 'or remove it' if told else 'remove it'])}"
        )


@contextmanager
def staged(
    output: Path, *, overwrite: bool = False, resume: bool = False, processes: Processes = ALONE
) -> Iterator[Path]:
    """A folder to write into, renamed to `output` when the block ends well.

    When it ends in an error nothing stays, except a folder that holds a checkpoint to resume from. Of several processes all
    look, and the main one makes, renames and removes. No second command can write there meanwhile.
    """
    check_output(output, overwrite=overwrite, resume=resume)
    partial = partial_folder(output)
    processes.wait()
    if processes.is_main:
        try:
            partial.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"output {output} cannot be written: {error.strerror}; name another folder") from error
    with _locked(partial) if processes.is_main else nullcontext():
        if processes.is_main and not resume:
            _empty(partial, output)
        processes.wait()
        try:
            yield partial
        except BaseException:
            if processes.is_main and last_checkpoint(partial / CHECKPOINTS) is None:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        processes.wait()
        if processes.is_main:
            _move(partial, output, overwrite)
        processes.wait()


@contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Hold a folder against a second command, which would remove what this one has written so far.

    Raises:
        InputError: another command holds it, or it cannot be written.
    """
    if fcntl is None:
        yield
        return
    try:
        file = (partial / LOCK).open("w")
    except OSError as error:
        raise InputError(f"{partial} cannot be written: {error.strerror}; name another output") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"another command is writing to {partial}: wait for it, or name another output") from error
        except OSError:
            pass  # a file system without locks
        yield


def _empty(partial: Path, output: Path) -> None:
    try:
        for path in partial.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()
    except OSError as error:
        raise InputError(f"output {output} cannot be written: {error.strerror}; name another folder") from error


def _move(partial: Path, output: Path, overwrite: bool) -> None:
    place = output.resolve()
    (partial / LOCK).unlink(missing_ok=True)
    try:
        _check_place(output, overwrite, ())  # it may have been filled meanwhile
    except InputError as error:
        raise InputError(f"{error}; all was written to {partial}: move it from there") from error
    try:
        shutil.rmtree(partial / CHECKPOINTS, ignore_errors=True)
        if place.exists():
            shutil.rmtree(place)
        partial.rename(place)
    except OSError as error:
        raise InputError(
            f"output {output} cannot be replaced: {error.strerror}; all was written to {partial}: move it from there"
        ) from error
