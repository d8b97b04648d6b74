"""Measure a trained model: benchmark tasks by lm-eval, and perplexity of texts of any length.

A text is read through one cache, piece by piece: memory does not grow with it.
"""

import argparse
import json
from pathlib import Path

import torch

from atlas_hf.cli.options import check_model_folder, load_model, natural, path, positive_int
from atlas_hf.evaluation.harness import evaluate_tasks, scores, tasks_without_score
from atlas_hf.evaluation.streaming import streamed_loss
from atlas_hf.modeling.configuration_atlas import AtlasConfig
from atlas_hf.modeling.model_statistics import state_bytes
from atlas_hf.training.errors import InputError
from atlas_hf.training.report import to_json
from atlas_hf.training.texts import read_measured
from atlas_hf.training.tokenizer import check_vocabulary, load_tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=path, required=True, help="folder of model and tokenizer")
    parser.add_argument("--tasks", nargs="+", default=[], help="tasks of lm-eval (needs the extra `eval`)")
    parser.add_argument("--include-path", type=path, metavar="FOLDER", help="folder of own task files for lm-eval")
    parser.add_argument("--batch-size", type=positive_int, default=8, help="of the tasks; changes speed and no score")
    parser.add_argument("--num-fewshot", type=natural, help="examples before each question (default: the task's)")
    parser.add_argument("--limit", type=positive_int, help="use only so many documents of each task")
    parser.add_argument(
        "--text", nargs="+", type=path, default=[], help="texts to measure perplexity on, of any length"
    )
    parser.add_argument("--text-column", default="text", help="column of JSON files and datasets")
    parser.add_argument("--segment-size", type=positive_int, default=512, help="tokens of a text read at a time")
    parser.add_argument("--output", type=path, metavar="FILE", help="JSON file to write the results to as well")


def run(arguments: argparse.Namespace) -> None:
    check_model_folder(arguments.model)
    if not arguments.tasks and not arguments.text:
        raise InputError("there is nothing to measure: name --tasks or --text")
    if arguments.include_path is not None and not arguments.include_path.is_dir():
        raise InputError(f"--include-path {arguments.include_path} is not a folder: name one with task files")
    if arguments.output is not None and not arguments.output.parent.is_dir():
        raise InputError(f"--output {arguments.output} cannot be written: {arguments.output.parent} is not a folder")
    if arguments.output is not None and arguments.output.is_dir():
        raise InputError(f"--output {arguments.output} is a folder: name a file")
    if arguments.output is not None and arguments.output.is_file() and not _is_report(arguments.output):
        raise InputError(f"--output {arguments.output} exists and holds no results: name another file, or remove it")
    results: dict[str, dict[str, float]] = {}
    silent: list[str] = []
    if arguments.text:
        results["text"] = _measure_texts(arguments)
        _show(results)
    if arguments.tasks:
        # Looks at both before the harness does, whose errors are not a user's.
        load_model(arguments.model)
        load_tokenizer(arguments.model)
        found = evaluate_tasks(
            arguments.model,
            arguments.tasks,
            include_path=arguments.include_path,
            batch_size=arguments.batch_size,
            num_fewshot=arguments.num_fewshot,
            limit=arguments.limit,
        )
        if found is None:
            return  # the first process has the results
        silent = tasks_without_score(found)
        _show(scores(found))
        results |= scores(found)
    if arguments.output is not None:
        try:
            arguments.output.write_text(to_json(results), encoding="utf-8")
        except OSError as error:  # the results stand above
            raise InputError(f"--output {arguments.output} cannot be written: {error.strerror}") from error
    if silent:
        raise InputError(
            f"{', '.join(silent)} gave no score: the metrics of its metric_list are not lm-eval's, or not of its output_type"
        )


def _show(results: dict[str, dict[str, float]]) -> None:
    for name, metrics in results.items():
        for metric, value in metrics.items():
            shown = f"{value:,.4f}" if isinstance(value, float) else f"{value:,}"
            print(f"{name:<28}{metric:<20}{shown:>14}", flush=True)


def _is_report(path: Path) -> bool:
    """Whether a file holds what an earlier call wrote, and may be replaced: anything else may be the text or the model."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(held, dict) and all(isinstance(metrics, dict) for metrics in held.values())


def _measure_texts(arguments: argparse.Namespace) -> dict[str, float]:
    documents = read_measured(arguments.text, arguments.text_column)
    model, tokenizer = load_model(arguments.model), load_tokenizer(arguments.model)
    if model.config.model_type != AtlasConfig.model_type:
        raise InputError(
            f"model {arguments.model} has model_type={model.config.model_type!r}: only {AtlasConfig.model_type!r} reads a "
            "text of any length; use --tasks"
        )
    check_vocabulary(tokenizer, model.config.vocab_size)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    losses = []
    for document in documents:
        ids = tokenizer(document, add_special_tokens=False, verbose=False, return_tensors="pt")["input_ids"][0]
        num_bytes = len(document.encode())
        losses.append(
            streamed_loss(model, ids, tokenizer.eos_token_id, num_bytes=num_bytes, segment_size=arguments.segment_size)
        )
    total = sum(losses[1:], losses[0])
    return {
        "documents": len(losses),
        "tokens": total.num_tokens,
        "perplexity": total.perplexity,
        "bits_per_byte": total.bits_per_byte,
        "state_bytes": state_bytes(model.config),
    }
