"""`atlas-hf train --resume`: an interrupted run goes on as if it had not been, or says why not."""

import json
import shutil

import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from atlas_hf.training import trainer as trainer_module
from atlas_hf.training.staging import last_checkpoint


def weights(folder):
    return load_file(folder / "model.safetensors")


class InterruptAt(TrainerCallback):
    """Ends training at a step, as Ctrl-C would."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def interrupted_at(step):
    class Interrupted(trainer_module.Trainer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.add_callback(InterruptAt(step))

    return Interrupted


def test_an_interrupted_run_resumes_to_the_same_weights(train_tiny, tmp_path, monkeypatch):
    flags = ("--max-steps", 6, "--save-steps", 2)
    assert train_tiny(tmp_path / "whole", *flags).code == 0

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "Trainer", interrupted_at(5))
        assert train_tiny(tmp_path / "cut", *flags).code == 130
    assert not (tmp_path / "cut").exists()
    assert (tmp_path / "cut.partial" / "checkpoints" / "checkpoint-4").is_dir()

    again = train_tiny(tmp_path / "cut", *flags)
    assert again.code == 2
    assert "--resume" in again.err
    changed = train_tiny(tmp_path / "cut", *flags, "--resume", "--lr", 0.5)
    assert changed.code == 2
    assert "lr=0.5 (was 0.002)" in changed.err
    # Killed while it saved the next checkpoint
    torn = tmp_path / "cut.partial" / "checkpoints" / "checkpoint-6"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half")
    assert train_tiny(tmp_path / "cut", *flags, "--resume").code == 0
    assert not (tmp_path / "cut.partial").exists()
    whole, cut = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    for key in whole:
        torch.testing.assert_close(cut[key], whole[key], rtol=1e-6, atol=1e-7)


def test_a_run_interrupted_after_its_last_step_makes_no_other(train_tiny, tmp_path, monkeypatch):
    flags = ("--max-steps", 6, "--save-steps", 2, "--trainer", "lr_scheduler_type=constant")
    assert train_tiny(tmp_path / "whole", *flags).code == 0
    calls = []

    def measured(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return 1.0

    with monkeypatch.context() as patch:
        patch.setattr("atlas_hf.training.run.model_perplexity", measured)
        assert train_tiny(tmp_path / "cut", *flags).code == 130
    assert (tmp_path / "cut.partial" / "checkpoints" / "checkpoint-6").is_dir()
    assert train_tiny(tmp_path / "cut", *flags, "--resume").code == 0
    whole, cut = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    for key in whole:
        torch.testing.assert_close(cut[key], whole[key], rtol=1e-6, atol=1e-7)
    told = [json.loads((tmp_path / name / "run.json").read_text())["losses"] for name in ("whole", "cut")]
    assert [step for step, _ in told[1]] == [step for step, _ in told[0]]


def test_a_resumed_run_goes_on_in_the_same_texts_or_not_at_all(train_tiny, text_file, tmp_path, monkeypatch):
    flags = ("--max-steps", 4, "--save-steps", 2)

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "Trainer", interrupted_at(3))
        assert train_tiny(tmp_path / "cut", *flags).code == 130
    old = text_file.read_text()
    text_file.write_text(old[::-1])
    changed = train_tiny(tmp_path / "cut", *flags, "--resume")
    assert changed.code == 2
    assert "had other settings: data_sha256=" in changed.err
    text_file.write_text(old)
    described = tmp_path / "cut.partial" / "run.json"
    whole = described.read_text()
    described.write_text(whole[: len(whole) // 2])
    torn = train_tiny(tmp_path / "cut", *flags, "--resume")
    assert torn.code == 2
    assert "does not hold the settings of the interrupted run: begin anew with --overwrite" in torn.err
    described.write_text(whole)
    assert train_tiny(tmp_path / "cut", *flags, "--resume").code == 0


def test_an_interrupted_run_without_checkpoints_leaves_nothing(train_tiny, tmp_path, monkeypatch):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("atlas_hf.training.run.train", stop)
    assert train_tiny(tmp_path / "out").code == 130
    assert {path.name for path in tmp_path.iterdir()} == {"story.txt"}


def test_a_checkpoint_that_was_not_saved_whole_is_none(train_tiny, tmp_path):
    checkpoints = tmp_path / "out.partial" / "checkpoints"
    for number, state in ((8, '{"epoch": 1}'), (10, '{"epoch": 1}'), (12, '{"ep'), (14, None)):
        (checkpoints / f"checkpoint-{number}").mkdir(parents=True)
        if state is not None:
            (checkpoints / f"checkpoint-{number}" / "trainer_state.json").write_text(state)
    assert last_checkpoint(checkpoints) == checkpoints / "checkpoint-10"
    for number in (8, 10):
        shutil.rmtree(checkpoints / f"checkpoint-{number}")
    (tmp_path / "out.partial" / "run.json").write_text("{}")
    outcome = train_tiny(tmp_path / "out", "--resume")
    assert outcome.code == 2
    assert "no interrupted run to resume" in outcome.err
