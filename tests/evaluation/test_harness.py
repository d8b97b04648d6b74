"""lm-eval on local tasks, offline: how documents are batched and in which order changes no score."""

import json
import logging
import sys

import datasets
import pytest
import torch
from local_tasks import TASKS, TRAINED_AT, write_data
from transformers import AutoTokenizer

from atlas_hf import AtlasForCausalLM
from atlas_hf.cli.main import main
from atlas_hf.evaluation.harness import evaluate_tasks, scores, tasks_without_score
from atlas_hf.evaluation.streaming import StreamedLoss, streamed_loss

NAMES = ["atlas_local_choice", "atlas_local_written", "atlas_local_pages"]
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _quiet_harness():
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


def numbers(responses) -> torch.Tensor:
    """Log probabilities `[N]` of a document's requests, which some tasks pair with whether they are the likeliest."""
    return torch.tensor([r[0][0] if isinstance(r[0], tuple | list) else r[0] for r in responses])


def answers(results):
    """What the model said to every document, by the document's own text."""
    said = {}
    for task, samples in results["samples"].items():
        for sample in samples:
            said[task, json.dumps(sample["doc"], sort_keys=True)] = sample["resps"]
    return said


def test_batch_size_and_order_change_no_score(model_folder, working_directory):
    found = {}
    for name in (1, 4, 16, "shuffled"):
        write_data(working_directory, shuffled=name == "shuffled")
        batch_size = 4 if name == "shuffled" else name
        arguments = {"include_path": TASKS, "batch_size": batch_size, "log_samples": True}
        found[name] = evaluate_tasks(model_folder, NAMES, **arguments)
    expected, said = scores(found[1]), answers(found[1])
    assert expected.keys() == set(NAMES)
    assert 0 < expected["atlas_local_choice"]["acc"] < 1
    assert 0 < expected["atlas_local_written"]["contains"] < 1
    assert len(said) == 43
    for name in (4, 16, "shuffled"):
        for task, metrics in scores(found[name]).items():
            assert metrics == pytest.approx(expected[task], rel=1e-5), (name, task)
        other = answers(found[name])
        assert other.keys() == said.keys()
        for key, responses in said.items():
            if key[0] == "atlas_local_written":
                assert other[key] == responses
            else:
                torch.testing.assert_close(numbers(other[key]), numbers(responses), rtol=1e-4, atol=1e-4)
    _rolling_scores_are_those_of_streaming(model_folder, found[1])


def _rolling_scores_are_those_of_streaming(model_folder, results):
    """Where a page fits one window; on a longer one the harness forgets what streaming still knows."""
    model, tokenizer = AtlasForCausalLM.from_pretrained(model_folder), AutoTokenizer.from_pretrained(model_folder)
    lengths = set()
    for sample in results["samples"]["atlas_local_pages"]:
        ids = tokenizer(sample["doc"]["page"], return_tensors="pt")["input_ids"][0]
        total = -streamed_loss(model, ids, tokenizer.eos_token_id, segment_size=5).total
        rolling = numbers(sample["resps"]).item()
        lengths.add(len(ids) > TRAINED_AT)
        assert (total == pytest.approx(rolling, rel=1e-4)) is (len(ids) <= TRAINED_AT)
    assert lengths == {False, True}


def test_command(model_folder, working_directory, capsys):
    (working_directory / "novel.txt").write_text("The coach came to the village. " * 40)
    arguments = [
        "evaluate",
        "--model",
        str(model_folder),
        "--tasks",
        NAMES[0],
        "--include-path",
        str(TASKS),
        "--limit",
        "6",
    ]
    assert main([*arguments, "--text", "novel.txt", "--output", "results.json"]) == 0
    printed = capsys.readouterr().out
    results = json.loads((working_directory / "results.json").read_text())
    assert set(results) == {"text", NAMES[0]}
    assert results["text"]["tokens"] > TRAINED_AT
    assert f"{results['text']['perplexity']:,.4f}" in printed
    assert f"{results[NAMES[0]]['acc']:,.4f}" in printed
    small = [*arguments[:3], "--text", "novel.txt", "--segment-size", "9", "--output", "small.json"]
    assert main(small) == 0
    again = json.loads((working_directory / "small.json").read_text())["text"]
    assert again == pytest.approx(results["text"], rel=1e-4)


def test_what_is_infinite_is_null(model_folder, working_directory, monkeypatch):
    loss = StreamedLoss(1e9, 1, 8)
    monkeypatch.setattr("atlas_hf.cli.evaluate.streamed_loss", lambda *arguments, **named: loss)
    (working_directory / "novel.txt").write_text("The coach.")
    assert main(["evaluate", "--model", str(model_folder), "--text", "novel.txt", "--output", "results.json"]) == 0
    written = (working_directory / "results.json").read_text()
    assert json.loads(written, parse_constant=pytest.fail)["text"]["perplexity"] is None


def test_a_task_without_its_data(model_folder, working_directory, capsys):
    (working_directory / "choice.jsonl").unlink()
    arguments = ["evaluate", "--model", str(model_folder), "--tasks", NAMES[0], "--include-path", str(TASKS)]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert f"the data of {NAMES[0]} cannot be loaded" in error
    assert "choice.jsonl" in error


WRONG_TASKS = {
    "few-shot above the documents": ("num_fewshot: 0", "num_fewshot: 90", "num_fewshot=None"),
    "unknown field": ('"{{question}}"', '"{{no_such_field}}"', "no_such_field"),
    "missing split": ("test_split: test", "test_split: elsewhere", "elsewhere"),
    "output type": ("output_type: multiple_choice", "output_type: riddle", "riddle"),
    "unknown key": ("num_fewshot: 0", "colour: red", "colour"),
    "broken template": ('"{{question}}"', '"{{question"', "TemplateSyntaxError"),
    "aggregation": ("aggregation: mean", "aggregation: middle", f"lm-eval cannot use {NAMES[0]}"),
    "metric": ("metric: acc,", "metric: no_such_metric,", "gave no score"),
    "syntax": ("metric_list:", "metric_list: [", "cannot be read as YAML"),
}


@pytest.mark.parametrize("name", WRONG_TASKS)
def test_a_task_file_that_is_wrong(model_folder, working_directory, capsys, name):
    right = (
        (TASKS / "choice.yaml")
        .read_text()
        .replace("  - {metric: acc_norm, aggregation: mean, higher_is_better: true}\n", "num_fewshot: 0\n")
    )
    old, new, message = WRONG_TASKS[name]
    assert old in right
    (working_directory / "tasks").mkdir()
    (working_directory / "tasks" / "choice.yaml").write_text(right.replace(old, new))
    arguments = ["evaluate", "--model", str(model_folder), "--tasks", NAMES[0], "--include-path", "tasks"]
    assert main([*arguments, "--limit", "3"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_what_was_measured_is_kept_though_a_task_gave_no_score(model_folder, working_directory, capsys):
    (working_directory / "tasks").mkdir()
    right = (TASKS / "choice.yaml").read_text()
    (working_directory / "tasks" / "choice.yaml").write_text(right)
    silent = right.replace(NAMES[0], "silent").replace("metric: acc", "metric: no_such_metric")
    (working_directory / "tasks" / "silent.yaml").write_text(silent)
    (working_directory / "novel.txt").write_text("The coach came to the village. ")
    arguments = ["evaluate", "--model", str(model_folder), "--text", "novel.txt", "--output", "results.json"]
    assert main([*arguments, "--tasks", NAMES[0], "silent", "--include-path", "tasks", "--limit", "3"]) == 2
    outcome = capsys.readouterr()
    assert "silent gave no score" in outcome.err
    assert "acc" in outcome.out
    written = json.loads((working_directory / "results.json").read_text())
    assert written["text"]["tokens"] > 0
    assert written[NAMES[0]]["acc"] >= 0


def test_scores_of_several_numbers():
    metrics = {"alias": "a", "acc,none": 0.5, "acc_stderr,none": 0.1, "count,none": 3, "em,none": {"short": 1.0}}
    results = {"results": {"a": metrics, "b": {"alias": "b"}}, "configs": {"a": {}, "b": {}}}
    assert scores(results) == {"a": {"acc": 0.5, "count": 3.0, "em.short": 1.0}, "b": {}}
    assert tasks_without_score(results) == ["b"]


def test_an_error_of_the_model_is_not_the_tasks(model_folder, working_directory, monkeypatch):
    def fail(*arguments, **named):
        raise RuntimeError("of the model")

    monkeypatch.setattr(AtlasForCausalLM, "forward", fail)
    with pytest.raises(RuntimeError, match="of the model"):
        evaluate_tasks(model_folder, NAMES[:1], include_path=TASKS)


def test_of_a_dataset_what_is_held_out_is_measured(model_folder, working_directory, capsys):
    splits = {name: [f"The {name}."] * count for name, count in (("train", 5), ("test", 2))}
    rows = {name: datasets.Dataset.from_dict({"text": texts}) for name, texts in splits.items()}
    datasets.DatasetDict(rows).save_to_disk("saved")
    assert main(["evaluate", "--model", str(model_folder), "--text", "saved", "--output", "results.json"]) == 0
    assert "saved: measured on its split test" in capsys.readouterr().out
    assert json.loads((working_directory / "results.json").read_text())["text"]["documents"] == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "there is nothing to measure: name --tasks or --text"),
        (("--tasks", ""), "tasks=[''] names no task"),
        (("--tasks", "no_such_task"), "no task no_such_task in lm-eval: `lm-eval ls tasks` lists them"),
        (("--tasks", NAMES[0], "--include-path", "nowhere"), "--include-path nowhere is not a folder"),
        (("--text", "nowhere.txt"), "nowhere.txt does not exist"),
        (("--text", "novel.txt", "--output", "."), "--output . is a folder"),
        (("--text", "novel.txt", "--output", "novel.txt"), "--output novel.txt exists and holds no results"),
        (("--text", "novel.txt", "--output", "no/where.json"), "--output no/where.json cannot be written"),
        (("--text", "novel.txt", "--segment-size", "0"), "'0' is not a whole number"),
    ],
)
def test_refusals(model_folder, working_directory, capsys, flags, message):
    (working_directory / "novel.txt").write_text("The coach.")
    try:
        code = main(["evaluate", "--model", str(model_folder), *flags])
    except SystemExit as leaving:
        code = leaving.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_without_the_harness(model_folder, working_directory, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["evaluate", "--model", str(model_folder), "--tasks", NAMES[0]]) == 2
    assert "pip install -e '.[eval]'" in capsys.readouterr().err
