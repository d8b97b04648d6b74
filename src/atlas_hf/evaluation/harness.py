"""Benchmark tasks by EleutherAI's lm-evaluation-harness (extra `eval`), with its own Transformers backend.

That backend loads models through the Auto classes, which know Atlas as soon as this package is imported.
"""

from pathlib import Path

import datasets
import torch

from atlas_hf.training.errors import InputError


def _harness():
    try:
        import lm_eval
        import lm_eval.tasks
    except ImportError as error:
        raise InputError(f"tasks need lm-eval ({error}): pip install 'atlas-hf[eval]'") from error
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
) -> dict:
    """Run tasks on the model and tokenizer in a folder or on the Hub; returns what `lm_eval.simple_evaluate` does.

    Args:
        tasks: names of the harness' tasks and groups, or of those in `include_path`.
        include_path: folder of own task files. Alone it needs no network, if its data lie on the disk too.
        batch_size: changes speed and no score.
        num_fewshot: examples before each question; `None`: what the task says.
        limit: use so many documents of each task only.
        log_samples: return every document's answers too.

    Raises:
        InputError: lm-eval is not installed, or a task is not known or has no data.
    """
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


def _find_tasks(lm_eval, tasks: list[str], include_path: Path | None):
    own = None if include_path is None else str(include_path)
    # The list of the built-in tasks takes half a minute, and is not needed where all are own ones.
    for built_in in (False, True) if own else (True,):
        manager = lm_eval.tasks.TaskManager(include_path=own, include_defaults=built_in)
        unknown = [name for name in tasks if not manager.match_tasks([name])]
        if not unknown:
            return manager
    where = "" if own is None else f" or in {own}"
    raise InputError(
        f"no task {', '.join(unknown)} in lm-eval{where}: `lm-eval ls tasks` lists them; --include-path names a folder of "
        "own ones"
    )


def scores(results: dict) -> dict[str, dict[str, float]]:
    """`{task: {metric: value}}` of `evaluate_tasks`; filters other than the default one are part of a metric's name."""
    found: dict[str, dict[str, float]] = {}
    for task, metrics in results["results"].items():
        found[task] = {
            name.removesuffix(",none"): value
            for name, value in metrics.items()
            if isinstance(value, float) and "," in name and "_stderr" not in name
        }
    return found
