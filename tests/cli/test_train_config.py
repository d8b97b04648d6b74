"""`atlas-hf train` from a YAML file, with Muon, packing, streams, TensorBoard and the trainer's own fields."""

import json
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import datasets
import pyarrow
import pytest
import torch
import yaml
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from atlas_hf.cli.config_file import read_config
from atlas_hf.cli.main import build_parser
from atlas_hf.cli.options import build_config
from atlas_hf.cli.train import training_options
from atlas_hf.training import trainer as trainer_module
from atlas_hf.training.errors import InputError
from atlas_hf.training.streams import DocumentStream, StreamedBlocks, open_stream
from atlas_hf.training.tokenizer import document_positions, load_tokenizer, packed_labels
from atlas_hf.training.trainer import TrainingOptions, training_arguments

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "set": {"chunk_size": 4, "omega_window": 2, "feature_rank": 2},
    "vocab_size": 300,
    "max_steps": 4,
    "batch_size": 2,
    "block_size": 16,
}


@pytest.fixture
def from_yaml(atlas, tmp_path):
    """`train --config` with tiny settings and `changes`; returns the outcome."""

    def call(*flags, **changes):
        path = tmp_path / "train.yaml"
        path.write_text(yaml.safe_dump({**TINY, **changes}))
        return atlas("train", *flags, "--config", path)

    return call


class OnePass(StreamedBlocks):
    """Ends where blocks would come again."""

    number = 0

    def __iter__(self):
        return self.one_pass(self.number)


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def test_a_file_does_what_its_flags_do(from_yaml, train_tiny, text_file, tmp_path):
    assert from_yaml(texts=[str(text_file)], output=str(tmp_path / "a")).code == 0
    assert train_tiny(tmp_path / "b").code == 0
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))


def test_flags_override_the_file(from_yaml, text_file, tmp_path):
    outcome = from_yaml(text_file, "--max-steps", 2, "--set", "chunk_size=8", output=str(tmp_path / "out"))
    assert outcome.code == 0
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert run["settings"]["max_steps"] == 2
    assert run["settings"]["batch_size"] == 2
    assert json.loads((tmp_path / "out" / "config.json").read_text())["chunk_size"] == 8


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"lerning_rate": 1}, ("unknown name(s) lerning_rate", "block_size")),
        ({"max_steps": 0}, ("max_steps", "'0'", "at least 1")),
        ({"max_steps": [1, 2]}, ("max_steps=[1, 2]", "single value")),
        ({"preset": "atlantis"}, ("preset='atlantis'", "omeganet")),
        ({"stream": "yes please"}, ("stream='yes please'", "true or false")),
        ({"set": ["chunk_size=4"]}, ("set=['chunk_size=4']", "mapping")),
        ({"trainer": {"bf17": True}}, ("bf17=True", "bf17", "TrainingArguments")),
        ({"trainer": {"learning_rate": 1}}, ("learning_rate=1", "--lr")),
        ({"trainer": {"num_train_epochs": 2}}, ("num_train_epochs=2", "--max-steps")),
        ({"trainer": {"per_device_eval_batch_size": 4}}, ("per_device_eval_batch_size", "no effect")),
        ({"trainer": {"gradient_accumulation_steps": 3}}, ("batch_size=2", "gradient_accumulation_steps=3")),
        ({"trainer": {"gradient_accumulation_steps": 0.5}}, ("gradient_accumulation_steps=0.5", "a whole number")),
        ({"trainer": {"max_grad_norm": True}}, ("max_grad_norm=True", "a number")),
        ({"trainer": {"bf16": "perhaps"}}, ("bf16='perhaps'", "true or false")),
        ({"trainer": {"bf16": None}}, ("bf16=None", "true or false")),
        ({"trainer": {"data_seed": "a"}}, ("data_seed='a'", "a whole number")),
        ({"trainer": {"lr_scheduler_type": "stairs"}}, ("lr_scheduler_type='stairs'",)),
        ({"output": None}, ("no output", "--output")),
        ({"texts": None}, ("no texts", "--dataset")),
        ({"subset": "en"}, ("--subset en", "--dataset")),
        ({"texts": None, "dataset": "no/such/folder"}, ("no/such/folder", "--dataset")),
    ],
)
def test_files_that_cannot_be_used(from_yaml, text_file, tmp_path, changes, parts):
    outcome = from_yaml(**{"texts": [str(text_file)], "output": str(tmp_path / "out"), **changes})
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    for part in parts:
        assert part in outcome.err
    assert {path.name for path in tmp_path.iterdir()} == {"story.txt", "train.yaml"}


@pytest.mark.parametrize(("content", "part"), [("a: [", "is not YAML"), ("- 1\n", "must hold a mapping")])
def test_no_yaml(atlas, tmp_path, content, part):
    (tmp_path / "train.yaml").write_text(content)
    outcome = atlas("train", "--config", tmp_path / "train.yaml")
    assert outcome.code == 2
    assert part in outcome.err
    assert "cannot be read" in atlas("train", "--config", tmp_path / "missing.yaml").err


def test_numbers_as_yaml_reads_them(tmp_path):
    """`1e-3` without a point is a string to YAML; names stay strings."""
    path = tmp_path / "train.yaml"
    path.write_text("lr: 1e-3\nset: {learning_rate_init: 1e-1, memory: gated}\ntrainer: {max_grad_norm: 5E-1}\n")
    values = read_config(path, build_parser()._subparsers._group_actions[0].choices["train"])
    assert values["lr"] == 1e-3
    assert dict(values["set"]) == {"learning_rate_init": 0.1, "memory": "gated"}
    assert dict(values["trainer"]) == {"max_grad_norm": 0.5}


def test_fields_of_the_trainer_have_the_types_that_it_declares(tmp_path):
    """Whatever is no JSON reaches it as a text: `False` would switch a field on, `.5` fail in the midst of a run."""
    texts = {"bf16": "False", "dataloader_drop_last": "TRUE", "max_grad_norm": ".5", "adam_beta1": "9e-1"}
    texts |= {"data_seed": "None", "torch_empty_cache_steps": 5.0, "tf32": "false", "lr_scheduler_type": "linear"}
    texts |= {"run_name": "False", "gradient_accumulation_steps": "+2"}
    made = training_arguments(TrainingOptions(extra=texts), tmp_path)
    assert (made.bf16, made.dataloader_drop_last, made.tf32) == (False, True, False)
    assert (made.max_grad_norm, made.adam_beta1, made.data_seed) == (0.5, 0.9, None)
    assert (made.torch_empty_cache_steps, made.gradient_accumulation_steps) == (5, 2)
    assert (made.lr_scheduler_type, made.run_name) == ("linear", "False")
    assert type(made.torch_empty_cache_steps) is int


def test_muon_and_fields_of_the_trainer(from_yaml, text_file, tmp_path, monkeypatch):
    seen = []

    class Watched(trainer_module.Trainer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            seen.append(self)

    monkeypatch.setattr(trainer_module, "Trainer", Watched)
    fields = {"gradient_accumulation_steps": 2, "lr_scheduler_type": "constant", "bf16": True}
    outcome = from_yaml(texts=[str(text_file)], output=str(tmp_path / "out"), optimizer="muon", trainer=fields)
    assert outcome.code == 0
    (trainer,) = seen
    assert type(trainer.optimizer.optimizer).__name__ == "MuonAdamW"
    assert trainer.args.per_device_train_batch_size == 1
    assert trainer.args.bf16
    assert trainer.args.lr_scheduler_type == "constant"


def test_weight_decay_reaches_neither_gates_nor_convolutions(train_tiny, tmp_path, monkeypatch):
    seen = []

    class Watched(trainer_module.Trainer):
        def create_optimizer(self, model=None):
            optimizer = super().create_optimizer(model)
            seen.append((dict(self.model.named_parameters()), optimizer))
            return optimizer

    monkeypatch.setattr(trainer_module, "Trainer", Watched)
    assert train_tiny(tmp_path / "out").code == 0
    ((named, optimizer),) = seen
    names = {id(parameter): name for name, parameter in named.items()}
    decay = {names[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay.keys() == named.keys()
    for name, value in decay.items():
        kept = any(part in name for part in ("norm", "conv", "gate_bias", "memory.gate_proj", "coefficients"))
        assert value == (0.0 if kept else 0.1), name


def test_tensorboard(from_yaml, text_file, tmp_path):
    assert from_yaml(texts=[str(text_file)], output=str(tmp_path / "out"), tensorboard=True).code == 0
    events = EventAccumulator(str(tmp_path / "out" / "tensorboard")).Reload()
    losses = [(e.step, e.value) for e in events.Scalars("train/loss")]
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert [step for step, _ in losses] == [step for step, _ in run["losses"]]
    assert [value for _, value in losses] == pytest.approx([value for _, value in run["losses"]], rel=1e-3)


def test_without_tensorboard(train_tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    outcome = train_tiny(tmp_path / "out", "--tensorboard")
    assert outcome.code == 2
    assert "pip install 'atlas-hf[train]'" in outcome.err


@pytest.mark.parametrize("num_files", [1, 2])
def test_loading_in_workers_reads_every_document_once(trained, documents, tmp_path, num_files):
    paths = []
    for i in range(num_files):
        paths.append(tmp_path / f"{i}.parquet")
        datasets.Dataset.from_dict({"text": documents[i::num_files]}).to_parquet(paths[-1])
    rows = open_stream(paths, None, None, "text", hold_out=False).train
    tokenizer = load_tokenizer(trained)
    # Blocks of one token: nothing is left over at the end of a worker's part.
    blocks = OnePass(rows, tokenizer, 1, packed=False, seed=0)
    for workers in (0, 2):
        loader = torch.utils.data.DataLoader(blocks, batch_size=1, num_workers=workers)
        ids = [int(batch["input_ids"]) for batch in loader]
        assert len(ids) == sum(len(tokenizer(text)["input_ids"]) + 1 for text in documents)
        assert ids.count(tokenizer.eos_token_id) == len(documents)


def test_positions_of_documents():
    blocks = torch.tensor([[5, 6, 9, 7, 9, 9, 8], [9, 5, 5, 5, 5, 5, 9]])
    assert document_positions(blocks, 9).tolist() == [[0, 1, 2, 0, 1, 0, 0], [0, 0, 1, 2, 3, 4, 5]]


def test_no_document_predicts_the_next_ones_first_token():
    blocks = torch.tensor([[1, 2, 9, 3, 9, 4]])
    assert packed_labels(blocks, document_positions(blocks, 9)).tolist() == [[-100, 2, 9, -100, 9, -100]]


def test_packing_changes_what_is_learnt(from_yaml, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"Short text number {i}."}) + "\n" for i in range(150)))
    for name, pack in (("plain", False), ("packed", True)):
        assert from_yaml(texts=[str(path)], output=str(tmp_path / name), pack=pack).code == 0
    assert not same(weights(tmp_path / "plain"), weights(tmp_path / "packed"))


@pytest.fixture
def documents():
    return [f"A story of {i} days and {i * 7} nights, told at the inn." for i in range(120)]


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet", "folder by name"])
def test_streams(from_yaml, documents, tmp_path, kind, capsys):
    rows = datasets.Dataset.from_dict({"body": documents})
    changes = {"text_column": "body", "stream": True, "pack": True}
    (tmp_path / "data").mkdir()
    if kind == "txt":
        for i in range(0, 120, 4):
            (tmp_path / "data" / f"{i}.txt").write_text("\n".join(documents[i : i + 4]))
        changes["texts"] = sorted(map(str, (tmp_path / "data").iterdir()))
    elif kind == "jsonl":
        rows.to_json(tmp_path / "data" / "rows.jsonl")
        changes["texts"] = [str(tmp_path / "data" / "rows.jsonl")]
    else:
        rows.to_parquet(tmp_path / "data" / "train.parquet")
        changes["texts"] = [str(tmp_path / "data" / "train.parquet")]
        if kind == "folder by name":
            changes |= {"texts": None, "dataset": str(tmp_path / "data")}
    outcome = from_yaml(output=str(tmp_path / "out"), **changes)
    assert outcome.code == 0, outcome.err
    assert "a stream" in outcome.out
    assert [step for step, _ in json.loads((tmp_path / "out" / "run.json").read_text())["losses"]] == [1, 2, 3, 4]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("content", "part"),
    [("", "holds no documents"), ('{"text": "one"}\n{"text": ', "JSON parse error: Invalid value. in row 1")],
)
def test_folders_of_data_that_cannot_be_read(from_yaml, tmp_path, content, part, stream):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text(content)
    outcome = from_yaml(dataset=str(tmp_path / "data"), output=str(tmp_path / "out"), stream=stream)
    assert outcome.code == 2
    assert str(tmp_path / "data") in outcome.err
    assert part in outcome.err


def test_a_stream_of_texts_of_two_types(documents, tmp_path):
    datasets.Dataset.from_dict({"text": documents[:60]}).to_json(tmp_path / "rows.jsonl")
    large = datasets.Features({"text": datasets.Value("large_string")})
    datasets.Dataset.from_dict({"text": documents[60:]}, features=large).to_parquet(tmp_path / "rows.parquet")
    stream = open_stream([tmp_path / "rows.jsonl", tmp_path / "rows.parquet"], None, None, "text", hold_out=False)
    assert stream.sample() == documents


def test_a_stream_that_breaks_off_says_so(trained):
    def rows():
        yield {"text": "one"}
        raise pyarrow.ArrowInvalid("JSON parse error")

    broken = datasets.IterableDataset.from_generator(rows)
    with pytest.raises(InputError, match="the stream cannot be read to its end: JSON parse error"):
        DocumentStream(broken, broken).sample()
    with pytest.raises(InputError, match="the stream cannot be read to its end: JSON parse error"):
        list(StreamedBlocks(broken, load_tokenizer(trained), 1, packed=False, seed=0))


def test_a_stream_resumes_to_the_same_weights(from_yaml, documents, tmp_path, monkeypatch):
    rows = datasets.Dataset.from_dict({"text": documents})
    rows.to_parquet(tmp_path / "rows.parquet")
    changes = {"texts": [str(tmp_path / "rows.parquet")], "stream": True, "save_steps": 2, "max_steps": 5}
    assert from_yaml(output=str(tmp_path / "whole"), **changes).code == 0

    class Interrupted(trainer_module.Trainer):
        def training_step(self, *args, **kwargs):
            if self.state.global_step == 3:
                raise KeyboardInterrupt
            return super().training_step(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "Trainer", Interrupted)
        assert from_yaml(output=str(tmp_path / "cut"), **changes).code == 130
    assert from_yaml("--resume", output=str(tmp_path / "cut"), **changes).code == 0
    whole, cut = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    for name in whole:
        torch.testing.assert_close(cut[name], whole[name], rtol=1e-6, atol=1e-7)


def test_a_stream_resumes_to_the_same_weights_in_a_later_pass(from_yaml, documents, tmp_path, monkeypatch):
    """Ten documents give some four steps a pass."""
    datasets.Dataset.from_dict({"text": documents[:10]}).to_json(tmp_path / "rows.jsonl")
    (tmp_path / "held_out.txt").write_text(" ".join(documents[10:20]))
    changes = {"texts": [str(tmp_path / "rows.jsonl")], "held_out": [str(tmp_path / "held_out.txt")], "stream": True}
    changes |= {"save_steps": 5, "max_steps": 12, "batch_size": 4, "seed": 3}
    assert from_yaml(output=str(tmp_path / "whole"), **changes).code == 0

    class Interrupted(trainer_module.Trainer):
        def training_step(self, *args, **kwargs):
            if self.state.global_step == 11:
                raise KeyboardInterrupt
            return super().training_step(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "Trainer", Interrupted)
        assert from_yaml(output=str(tmp_path / "cut"), **changes).code == 130
    assert from_yaml("--resume", output=str(tmp_path / "cut"), **changes).code == 0
    whole, cut = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    for name in whole:
        torch.testing.assert_close(cut[name], whole[name], rtol=1e-6, atol=1e-7)


def test_a_stream_passes_over_its_documents_in_another_order_each_time(trained, documents, tmp_path):
    datasets.Dataset.from_dict({"text": documents[:20]}).to_json(tmp_path / "rows.jsonl")
    rows = open_stream([tmp_path / "rows.jsonl"], None, None, "text", hold_out=False).train
    tokenizer = load_tokenizer(trained)
    blocks = StreamedBlocks(rows, tokenizer, 1, packed=False, seed=0)
    size = sum(len(tokenizer(text)["input_ids"]) + 1 for text in documents[:20])
    ids = [int(block["input_ids"]) for block in islice(blocks, 2 * size)]
    assert Counter(ids[:size]) == Counter(ids[size:])
    assert ids[:size] != ids[size:]
    # Nothing to pass over ends the passes
    assert list(StreamedBlocks(rows.filter(lambda row: False), tokenizer, 1, packed=False, seed=0)) == []


def test_documents_of_parquet_and_of_a_named_dataset_in_memory(from_yaml, documents, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    datasets.Dataset.from_dict({"text": documents}).to_parquet(folder / "train.parquet")
    datasets.Dataset.from_dict({"text": documents[:40]}).to_parquet(folder / "validation.parquet")
    outcome = from_yaml(dataset=str(folder), output=str(tmp_path / "a"))
    assert outcome.code == 0, outcome.err
    outcome = from_yaml(
        *(folder / "train.parquet", "--held-out", folder / "validation.parquet"), output=str(tmp_path / "b")
    )
    assert outcome.code == 0, outcome.err
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))


@pytest.mark.parametrize("name", ["cpu", "one_gpu", "several_gpus"])
def test_examples_are_understood(name, tmp_path, monkeypatch):
    """Every name, field and value of the files is known: to the flags, the model's configuration and the trainer."""
    parser = build_parser()._subparsers._group_actions[0].choices["train"]
    parser.set_defaults(**read_config(EXAMPLES / f"{name}.yaml", parser))
    arguments = parser.parse_args([])
    config = build_config(arguments, vocab_size=arguments.vocab_size)
    assert config.chunk_size <= arguments.block_size
    assert config.hidden_size == {"cpu": 256, "one_gpu": 768, "several_gpus": 2048}[name]
    made = training_arguments(training_options(arguments, arguments.save_steps), tmp_path)
    for field, value in dict(arguments.trainer).items():
        if field != "fsdp_config":
            assert getattr(made, field) == value
    if name == "several_gpus":
        assert made.fsdp
        assert made.fsdp_config["version"] == 2


def test_all_examples_are_tested():
    assert {path.stem for path in EXAMPLES.iterdir()} == {"cpu", "one_gpu", "several_gpus", "accelerate_two_cpus"}


@pytest.mark.parametrize("workers", [0, 2])
def test_no_held_out_document_is_trained_on(trained, documents, tmp_path, workers):
    """Over several passes, whatever order the shards come in."""
    paths = []
    for i, text in enumerate(documents):
        paths.append(tmp_path / f"{i:03}.txt")
        paths[-1].write_text(text)
    stream, tokenizer = open_stream(paths, None, None, "text", hold_out=True), load_tokenizer(trained)
    held_out = stream.held_out_texts()
    assert 0 < len(held_out) < len(documents) / 4
    blocks = OnePass(stream.train, tokenizer, 1, packed=False, seed=0)
    expected = Counter()
    for text in set(documents) - set(held_out):
        expected.update([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
    for number in range(2):
        blocks.number = number
        loader = torch.utils.data.DataLoader(blocks, batch_size=1, num_workers=workers)
        assert Counter(int(batch["input_ids"]) for batch in loader) == expected


def test_documents_without_text_are_left_out(tmp_path, trained):
    rows = [{"text": None}] * 2 + [{"text": ""}] * 70 + [{"text": "one"}, {"text": None}, {"text": "two"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stream, tokenizer = open_stream([path], None, None, "text", hold_out=False), load_tokenizer(trained)
    assert stream.sample() == ["one", "two"]
    blocks = StreamedBlocks(stream.train, tokenizer, 1, packed=False, seed=0).one_pass(0)
    assert sum(int(block["input_ids"]) == tokenizer.eos_token_id for block in blocks) == 2


def test_several_gpus_without_a_launcher_do_not_multiply_the_batch(from_yaml, text_file, tmp_path, monkeypatch):
    made, plain = [], trainer_module.training_arguments

    def of_many(*arguments):
        made.append(plain(*arguments))
        made[-1].n_gpu  # noqa: B018  # looks for devices
        made[-1]._n_gpu = 4
        return made[-1]

    monkeypatch.setattr(trainer_module, "training_arguments", of_many)
    outcome = from_yaml(texts=[str(text_file)], output=str(tmp_path / "out"))
    assert outcome.code == 0, outcome.err
    assert "4 GPUs are seen, one is used" in outcome.out
    assert made[-1].n_gpu == 1


def test_a_field_that_muon_would_not_read(from_yaml, text_file, tmp_path):
    outcome = from_yaml(
        texts=[str(text_file)], output=str(tmp_path / "out"), optimizer="muon", trainer={"optim": "adamw_torch"}
    )
    assert outcome.code == 2
    assert "optim among the trainer's fields would have no effect with --optimizer muon" in outcome.err
