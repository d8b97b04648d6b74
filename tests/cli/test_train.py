"""`atlas-hf train`: what it writes, resuming, starting from a model, and refusals that leave nothing behind."""

import json
import shutil
from pathlib import Path

import datasets
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from atlas_hf import AtlasModel
from atlas_hf.training import trainer as trainer_module
from atlas_hf.training.errors import InputError
from atlas_hf.training.staging import staged
from atlas_hf.training.tokenizer import train_tokenizer


def weights(folder):
    return load_file(folder / "model.safetensors")


def assert_refused(outcome, folder, *parts):
    """Exit code 2, one line on stderr that names `parts`, and nothing new in `folder`."""
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    for part in parts:
        assert str(part) in outcome.err
    assert "Traceback" not in outcome.err
    assert {path.name for path in folder.iterdir()} <= {"story.txt", "input"}


def test_a_run_is_written_whole_and_loads(trained):
    assert {path.name for path in trained.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "run.json", "loss.png"),
    }
    assert not list(trained.parent.glob("*.partial"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(trained), AutoTokenizer.from_pretrained(trained)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.use_cache
    assert (model.config.chunk_size, model.config.hidden_size) == (4, 16)
    assert (model.config.eos_token_id, model.config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert (trained / "loss.png").read_bytes().startswith(b"\x89PNG")
    run = json.loads((trained / "run.json").read_text())
    assert set(run["perplexity"]) == {"unigram", "bigram", "before", "after"}
    assert run["settings"]["max_steps"] == 4
    assert [step for step, _ in run["losses"]] == [1, 2, 3, 4]


def test_training_learns_and_shows_progress(train_tiny, tmp_path):
    outcome = train_tiny(tmp_path / "out", "--max-steps", 60, "--lr", 0.01)
    assert outcome.code == 0
    perplexity = json.loads((tmp_path / "out" / "run.json").read_text())["perplexity"]
    assert perplexity["after"] < 0.6 * perplexity["before"]
    assert "step    60/60  loss" in outcome.out
    assert f"{perplexity['bigram']:.1f}" in outcome.out


def test_the_seed_decides_the_weights(train_tiny, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert train_tiny(tmp_path / name, "--seed", seed).code == 0
    a, b, c = (weights(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert any(not torch.equal(a[key], c[key]) for key in a)


def test_texts_that_fill_no_batch(train_tiny, tmp_path):
    flags = ("--batch-size", 256, "--trainer", "dataloader_drop_last=true")
    outcome = train_tiny(tmp_path / "out", *flags)
    assert outcome.code == 2
    assert "training ended after 0 of" in outcome.err
    assert not (tmp_path / "out").exists()


def test_training_goes_on_from_a_model(trained, train_tiny, tmp_path):
    outcome = train_tiny(tmp_path / "out", "--init-from", trained, "--lr", 1e-9)
    assert outcome.code == 0
    before, after = weights(trained), weights(tmp_path / "out")
    for key in before:
        torch.testing.assert_close(after[key], before[key], rtol=1e-4, atol=1e-6)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == (trained / "tokenizer.json").read_text()


def test_training_goes_on_from_a_base_model(trained, train_tiny, tmp_path):
    base = tmp_path / "input"
    shutil.copytree(trained, base)
    AtlasModel.from_pretrained(trained).save_pretrained(base)
    outcome = train_tiny(tmp_path / "out", "--init-from", base, "--lr", 1e-9)
    assert outcome.code == 0
    assert "no lm_head.weight: the language modelling head starts anew" in outcome.out
    before, after = weights(trained), weights(tmp_path / "out")
    torch.testing.assert_close(after["model.norm.weight"], before["model.norm.weight"], rtol=1e-4, atol=1e-6)
    state = load_file(base / "model.safetensors")
    del state["norm.weight"]
    save_file(state, base / "model.safetensors", {"format": "pt"})
    refused = train_tiny(tmp_path / "again", "--init-from", base)
    assert refused.code == 2
    assert "lm_head.weight, model.norm.weight" in refused.err


def test_a_saved_dataset_and_a_given_tokenizer(trained, train_tiny, tmp_path):
    rows = datasets.Dataset.from_dict({"body": ["A long walk by the sea. " * 20] * 3})
    datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(tmp_path / "input")
    outcome = train_tiny(
        *(tmp_path / "out", "--text-column", "body", "--tokenizer", trained), texts=[tmp_path / "input"]
    )
    assert outcome.code == 0
    assert (tmp_path / "out" / "tokenizer.json").read_text() == (trained / "tokenizer.json").read_text()


def test_of_a_saved_dataset_what_is_held_out_is_measured(train_tiny, tmp_path):
    kinds = {"train": "A long walk by the sea. " * 9, "validation": "A short one. " * 40}
    rows = {name: datasets.Dataset.from_dict({"text": [text]}) for name, text in kinds.items()}
    datasets.DatasetDict(rows).save_to_disk(tmp_path / "input")
    (tmp_path / "same.txt").write_text(kinds["validation"], encoding="utf-8")
    before = []
    for held_out in (tmp_path / "input", tmp_path / "same.txt"):
        outcome = train_tiny(tmp_path / held_out.stem / "out", "--max-steps", 1, "--held-out", held_out)
        assert outcome.code == 0
        run = json.loads((tmp_path / held_out.stem / "out" / "run.json").read_text())
        before.append(run["perplexity"]["bigram"])
    assert before[0] == before[1]


def test_presets_reach_the_model(train_tiny, tmp_path):
    assert train_tiny(tmp_path / "out", "--preset", "omeganet").code == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["rule"], config["momentum"]) == ("gd", "none")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "holds no text"),
        (b"  \n\n ", "holds no text"),
        (b"caf\xe9 au lait " * 99, "is not UTF-8 (byte 3 is 0xe9): convert it, for example with `iconv -f latin1"),
        (
            "The coach. ".encode("utf-16") * 99,
            "is not UTF-8 (byte 0 is 0xff): convert it, for example with `iconv -f utf-16",
        ),
        (b"short", "less than one block of 16"),
        (b"abcdefghijklmnopqrst", "none to hold out"),
    ],
)
def test_texts_that_cannot_be_used(train_tiny, tmp_path, content, part):
    (tmp_path / "input").write_bytes(content)
    outcome = train_tiny(tmp_path / "out", "--vocab-size", 258, texts=[tmp_path / "input"])
    assert_refused(outcome, tmp_path, part)


def test_paths_that_do_not_hold_what_they_should(train_tiny, tmp_path):
    missing = tmp_path / "missing"
    assert_refused(train_tiny(tmp_path / "out", texts=[missing]), tmp_path, missing, "does not exist")
    assert_refused(train_tiny(tmp_path / "out", "--held-out", missing), tmp_path, missing, "does not exist")
    assert_refused(train_tiny(tmp_path / "out", "--tokenizer", missing), tmp_path, missing, "is not a folder")
    assert_refused(train_tiny(tmp_path / "out", "--init-from", missing), tmp_path, missing, "is not a folder")
    (tmp_path / "input").mkdir()
    empty = tmp_path / "input"
    assert_refused(train_tiny(tmp_path / "out", texts=[empty]), tmp_path, empty, "without a saved dataset")
    assert_refused(train_tiny(tmp_path / "out", "--tokenizer", empty), tmp_path, empty, "no tokenizer")
    assert_refused(train_tiny(tmp_path / "out", "--init-from", empty), tmp_path, empty, "no config.json")


def test_a_broken_json_file(train_tiny, tmp_path):
    (tmp_path / "input").mkdir()
    (tmp_path / "input" / "rows.jsonl").write_text('{"text": "one"}\n{"text": ', encoding="utf-8")
    assert_refused(train_tiny(tmp_path / "out", texts=[tmp_path / "input"]), tmp_path, "rows.jsonl", "JSON")


def test_an_empty_file_in_a_stream(train_tiny, tmp_path):
    (tmp_path / "input").write_bytes(b"")
    outcome = train_tiny(tmp_path / "out", "--stream", texts=[tmp_path / "input"])
    assert_refused(outcome, tmp_path, "holds no documents")


@pytest.mark.parametrize("flags", [(), ("--stream",)])
def test_a_json_file_without_rows(train_tiny, tmp_path, flags):
    (tmp_path / "input").mkdir()
    (tmp_path / "input" / "rows.jsonl").write_bytes(b"")
    outcome = train_tiny(tmp_path / "out", *flags, texts=[tmp_path / "input" / "rows.jsonl"])
    assert_refused(outcome, tmp_path, "rows.jsonl", "holds no")


def test_an_output_of_the_folder_one_stands_in(train_tiny, tmp_path, monkeypatch):
    (tmp_path / "input").mkdir()
    monkeypatch.chdir(tmp_path / "input")
    assert_refused(train_tiny("."), tmp_path, "is the folder you are in")


def test_an_empty_path_is_no_folder(train_tiny, tmp_path):
    """A shell variable that is not set, not all the texts of the folder one stands in."""
    for outcome in (train_tiny(""), train_tiny(tmp_path / "out", texts=[""])):
        assert outcome.code == 2
        assert "the path is empty: name a file or folder" in outcome.err
        assert {path.name for path in tmp_path.iterdir()} <= {"story.txt"}


def test_outputs_that_cannot_be_replaced(train_tiny, tmp_path, monkeypatch):
    (tmp_path / "input").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda self: self == tmp_path / "input")
    assert_refused(train_tiny(tmp_path / "input"), tmp_path, tmp_path / "input", "is a mount point")
    assert_refused(train_tiny("/"), tmp_path, "output / is the folder you are in, or above it")


def test_an_output_that_is_a_link(tmp_path):
    place, link = tmp_path / "input" / "runs", tmp_path / "out"
    place.mkdir(parents=True)
    link.symlink_to(place)
    with staged(link) as folder:
        assert folder == tmp_path / "input" / "runs.partial"
        (folder / "run.json").write_text("{}")
    assert link.is_symlink()
    assert [path.name for path in (tmp_path / "input").iterdir()] == ["runs"]
    assert (place / "run.json").exists()


def test_a_finished_run_is_kept_whatever_happens_to_its_output(train_tiny, tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(16, "Device or resource busy")

    partial = tmp_path / "out.partial"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(
            InputError, match=f"cannot be replaced: Device or resource busy; all was written to {partial}"
        ):
            with staged(tmp_path / "out") as folder:
                (folder / "run.json").write_text('{"settings": {}, "losses": []}')
    for flags in ((), ("--overwrite",), ("--resume",)):
        outcome = train_tiny(tmp_path / "out", *flags)
        assert outcome.code == 2
        assert f"{partial} holds a finished run" in outcome.err
    assert (partial / "run.json").exists()


def test_what_came_to_the_output_meanwhile_is_kept(tmp_path):
    def write():
        with staged(tmp_path / "out") as folder:
            (folder / "run.json").write_text("{}")
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "letter.txt").write_text("dear")

    with pytest.raises(InputError, match=r"is not empty: name another folder; all was written to .*out\.partial"):
        write()
    assert (tmp_path / "out" / "letter.txt").read_text() == "dear"
    assert [path.name for path in (tmp_path / "out.partial").iterdir()] == ["run.json"]


def test_a_second_command_does_not_take_the_folder_of_the_first(train_tiny, tmp_path):
    with staged(tmp_path / "out") as folder:
        (folder / "run.json").write_text("{}")
        for flags in ((), ("--overwrite",)):
            outcome = train_tiny(tmp_path / "out", *flags)
            assert outcome.code == 2
            assert f"another command is writing to {folder}: wait for it" in outcome.err
        assert (folder / "run.json").exists()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["run.json"]
    # Killed before it wrote anything: the folder is nobody's
    (tmp_path / "next.partial").mkdir()
    (tmp_path / "next.partial" / ".lock").touch()
    assert train_tiny(tmp_path / "next").code == 0
    assert not (tmp_path / "next" / ".lock").exists()


def test_a_tokenizer_larger_than_the_model(trained, train_tiny, tmp_path):
    train_tokenizer(["one two three four five six"] * 9, 320).save_pretrained(tmp_path / "input")
    large = train_tokenizer(["".join(chr(0x4E00 + i) for i in range(400))] * 3, 900)
    large.save_pretrained(tmp_path / "input")
    outcome = train_tiny(tmp_path / "out", "--init-from", trained, "--tokenizer", tmp_path / "input")
    assert_refused(outcome, tmp_path, len(large), "vocab_size is 300")


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--block-size", 3), ("block_size=3", "chunk_size=4", "--block-size")),
        (("--vocab-size", 100), ("vocab_size=100", "at least 258")),
        (("--preset", "atlantis"), ("--preset", "'atlantis'", "omeganet")),
        (("--size", "2B"), ("--size", "'2B'", "340M")),
        (("--vocab-size", 10**12), ("vocab_size=1000000000000", "1048576 at most")),
        (("--set", "chunk_sise=8"), ("chunk_sise=8",)),
        (("--set", "dtype=float16"), ("dtype='float16'", "AtlasConfig's own fields are")),
        (("--set", "auto_map={}"), ("auto_map={}", "AtlasConfig's own fields are")),
        (("--set", "memory=cubic"), ("memory='cubic'", "gated")),
        (("--set", 'hidden_act="nothing"'), ("hidden_act",)),
        (("--set", "nothing"), ("'nothing'", "FIELD=VALUE")),
        (("--num-attention-heads", 3), ("hidden_size=16", "num_attention_heads=3")),
        (("--max-steps", 0), ("--max-steps", "'0'", "at least 1")),
        (("--seed", 2**32), ("--seed", "2^32 - 1")),
        (("--lr", "fast"), ("--lr", "'fast'", "above 0")),
        (("--resume",), ("no interrupted run", "--save-steps")),
        (("--held-out", "x" * 300), ("--held-out", f"'{'x' * 40}'... is no path: File name too long")),
        (("--output", "x" * 250), ("cannot be written: File name too long", "name another folder")),
    ],
)
def test_settings_that_cannot_be_used(train_tiny, tmp_path, flags, parts):
    outcome = train_tiny(tmp_path / "out", *flags)
    outcome.err = outcome.err.splitlines()[-1] + "\n"  # argparse prints the usage before its message
    assert_refused(outcome, tmp_path, *parts)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton can run")
def test_kernels_that_cannot_run(train_tiny, tmp_path):
    outcome = train_tiny(tmp_path / "out", "--set", "kernels=triton")
    assert_refused(outcome, tmp_path, "kernels='triton' cannot run", "Triton needs a GPU", "'auto' or 'torch'")
    assert outcome.out == ""


def test_an_output_that_holds_something_is_kept(train_tiny, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "letter.txt").write_text("dear")
    for flags in ((), ("--overwrite",)):
        outcome = train_tiny(output, *flags)
        assert outcome.code == 2
        assert "is not empty" in outcome.err
    assert [path.name for path in output.iterdir()] == ["letter.txt"]
    assert "is a file" in train_tiny(output / "letter.txt").err
    foreign = tmp_path / "next.partial"
    foreign.mkdir()
    assert "holds something else" in train_tiny(tmp_path / "next").err
    assert foreign.is_dir()


def test_an_old_run_is_replaced_only_when_asked(train_tiny, tmp_path):
    output = tmp_path / "out"
    assert train_tiny(output, "--seed", 1).code == 0
    old = weights(output)
    refused = train_tiny(output, "--seed", 2)
    assert refused.code == 2
    assert "--overwrite" in refused.err
    assert all(torch.equal(old[key], value) for key, value in weights(output).items())
    assert train_tiny(output, "--seed", 2, "--overwrite").code == 0
    assert any(not torch.equal(old[key], value) for key, value in weights(output).items())


def test_a_diverging_run_says_so_and_leaves_nothing(train_tiny, tmp_path, monkeypatch):
    class Diverging(trainer_module.Trainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs) * float("nan")

    monkeypatch.setattr(trainer_module, "Trainer", Diverging)
    assert_refused(train_tiny(tmp_path / "out"), tmp_path, "learning_rate=0.002", "diverge", "--lr")
