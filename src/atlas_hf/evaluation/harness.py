"""Benchmark tasks by EleutherAI's lm-evaluation-harness (extra `eval`), with its own Transformers backend.

That backend loads models through the Auto classes, which know Atlas as soon as this package is imported.
"""

import numbers
import traceback
from pathlib import Path

import datasets
import torch
import yaml

from atlas_hf.training.errors import InputError


def _harness():
    try:
        import lm_eval
        import lm_eval.tasks
    except ImportError as error:
        raise InputError(f"tasks need lm-eval ({error}): pip install -e '.[eval]' in atlas-hf's folder") from error
    return lm_eval


def evaluate_tasks(
    model: str | Path,
    tasks: list[str],
    *,
    include_path: Path | None = None,
    batch_size: int = 1,
    num_fewshot: int | None = None,
    limit: int | None = None,
    log_samples: bool = False,
) -> dict | None:
    """Run tasks on the model and tokenizer in a folder or on the Hub; returns what `lm_eval.simple_evaluate` does.

    Of several processes of one launcher all but the first get `None`.

    Args:
        tasks: names of the harness' tasks and groups, or of those in `include_path`.
        include_path: folder of own task files. Alone it needs no network, if its data lie on the disk too.
        batch_size: changes speed and no score.
        num_fewshot: examples before each question; `None`: what the task says.
        limit: use so many documents of each task only.
        log_samples: return every document's answers too.

    Raises:
        InputError: lm-eval is not installed; a task is not known or has no data; or the harness cannot use what a task's
            file or `num_fewshot` says.
    """
    if not tasks or not all(name.strip() for name in tasks):
        raise InputError(f"tasks={tasks} names no task, or an empty one: `lm-eval ls tasks` lists them")
    lm_eval = _harness()
    manager = _find_tasks(lm_eval, tasks, include_path)
    try:
        return lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(model), "dtype": "auto"},
            tasks=tasks,
            task_manager=manager,
            batch_size=batch_size,
            num_fewshot=num_fewshot,
            limit=limit,
            device="cuda" if torch.cuda.is_available() else "cpu",
            log_samples=log_samples,
            bootstrap_iters=0,
        )
    except (OSError, datasets.exceptions.DatasetGenerationError) as error:
        raise InputError(
            f"the data of {', '.join(tasks)} cannot be loaded: {error.__cause__ or error}; files that a task names are "
            "looked for from the folder you are in, all else on the Hub"
        ) from error
    except Exception as error:
        if _is_from_model(error):
            raise
        raise InputError(
            f"lm-eval cannot use {', '.join(tasks)} (num_fewshot={num_fewshot}): {type(error).__name__}: {error}; correct "
            "the task's file, or ask for fewer examples"
        ) from error


def _is_from_model(error: Exception) -> bool:
    """Whether the harness' model raised it: all else that it raises comes of what a task's file says."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__", "").startswith("lm_eval.models") for frame, _ in frames)


def _find_tasks(lm_eval, tasks: list[str], include_path: Path | None):
    own = None if include_path is None else str(include_path)
    # The list of the built-in tasks takes half a minute, and is not needed where all are own ones.
    for built_in in (False, True) if own else (True,):
        manager = lm_eval.tasks.TaskManager(include_path=own, include_defaults=built_in)
        unknown = [name for name in tasks if not manager.match_tasks([name])]
        if not unknown:
            return manager
        if include_path is not None:
            _check_syntax(include_path, unknown)
    where = "" if own is None else f" or in {own}"
    raise InputError(
        f"no task {', '.join(unknown)} in lm-eval{where}: `lm-eval ls tasks` lists them; --include-path names a folder of "
        "own ones"
    )


def _check_syntax(folder: Path, tasks: list[str]) -> None:
    """The harness passes over a file that it can't read, and then knows no task of its name."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the harness' own; the other one refuses some tabs
    for path in sorted(folder.glob("**/*.yaml")):
        try:
            content = path.read_bytes()
            if any(name.encode() in content for name in tasks):
                yaml.compose(content, Loader=loader)
        except (OSError, yaml.YAMLError) as error:
            raise InputError(f"task file {path} cannot be read as YAML: {' '.join(str(error).split())}") from error


def scores(results: dict) -> dict[str, dict[str, float]]:
    """`{task: {metric: value}}` of `evaluate_tasks`; filters other than the default one are part of a metric's name."""
    found: dict[str, dict[str, float]] = {}
    for task, metrics in results["results"].items():
        found[task] = {}
        for name, value in metrics.items():
            if "," not in name or "_stderr" in name:
                continue
            name = name.removesuffix(",none")
            # Some tasks' metrics are several numbers
            parts = {f"{name}.{part}": v for part, v in value.items()} if isinstance(value, dict) else {name: value}
            found[task] |= {
                n: float(v) for n, v in parts.items() if isinstance(v, numbers.Real) and not isinstance(v, bool)
            }
    return found


def tasks_without_score(results: dict) -> list[str]:
    """Tasks of `evaluate_tasks`'s results in which nothing was measured: the harness passes over metrics unknown to it."""
    found = scores(results)
    return [name for name in results["configs"] if not found.get(name)]
