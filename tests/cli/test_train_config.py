"""`atlas-hf train` from a YAML file, with Muon, packing, TensorBoard and the trainer's own fields."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from atlas_hf.cli.config_file import read_config
from atlas_hf.cli.main import build_parser
from atlas_hf.cli.options import build_config
from atlas_hf.cli.train import training_options
from atlas_hf.training import trainer as trainer_module
from atlas_hf.training.tokenizer import document_positions, packed_labels
from atlas_hf.training.trainer import TrainingOptions, training_arguments

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


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
        ({"trainer": {"eval_on_start": True}}, ("eval_on_start", "no effect")),
        ({"trainer": {"save_strategy": "no"}, "save_steps": 1}, ("save_strategy='no'", "--save-steps")),
        ({"trainer": {"gradient_accumulation_steps": 3}}, ("batch_size=2", "gradient_accumulation_steps=3")),
        ({"trainer": {"gradient_accumulation_steps": 0.5}}, ("gradient_accumulation_steps=0.5", "a whole number")),
        ({"trainer": {"max_grad_norm": True}}, ("max_grad_norm=True", "a number")),
        ({"trainer": {"bf16": "perhaps"}}, ("bf16='perhaps'", "true or false")),
        ({"trainer": {"bf16": None}}, ("bf16=None", "true or false")),
        ({"trainer": {"lr_scheduler_type": "warmup_stable_decay"}}, ("cannot start", "num_decay_steps")),
        ({"trainer": {"torch_compile_backend": "foo"}}, ("cannot start", "torch_compile_backend='foo'")),
        ({"trainer": {"resume_from_checkpoint": "x"}}, ("resume_from_checkpoint", "no effect", "--resume")),
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
    assert "pip install -e '.[train]'" in outcome.err


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
