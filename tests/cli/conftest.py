"""A tiny setting of the command line: a text, flags of a small model, and a call that returns what a shell would see."""

from dataclasses import dataclass

import pytest
import yaml

from atlas_hf.cli.main import main

SENTENCES = (
    "The rain had stopped before the coach came to the village.",
    "Nobody at the inn expected a visitor so late in the year.",
    "She gave her name, and asked for a fire and a candle.",
    "The landlord's daughter carried up the trunk without a word.",
)

TINY_MODEL = [
    *("--hidden-size", "16", "--num-hidden-layers", "1", "--num-attention-heads", "2", "--intermediate-size", "16"),
    *("--set", "chunk_size=4", "--set", "omega_window=2", "--set", "feature_rank=2"),
]
TINY_TRAINING = ["--max-steps", "4", "--batch-size", "2", "--block-size", "16"]

TINY_YAML = {
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


@dataclass
class Outcome:
    """What a shell sees of a command."""

    code: int
    out: str
    err: str


@pytest.fixture
def atlas(capsys):
    """Runs the command line in this process."""

    def call(*arguments) -> Outcome:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as leaving:
            code = leaving.code
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "story.txt"
    path.write_text("\n".join(SENTENCES[i % 4] + f" {i}" for i in range(60)), encoding="utf-8")
    return path


@pytest.fixture
def train_tiny(atlas, text_file):
    """`train` with tiny settings; returns the outcome."""

    def call(output, *arguments, texts=(text_file,)) -> Outcome:
        return atlas("train", *texts, "--output", output, "--vocab-size", 300, *TINY_MODEL, *TINY_TRAINING, *arguments)

    return call


@pytest.fixture
def from_yaml(atlas, tmp_path):
    """`train --config` with tiny settings and `changes`; returns the outcome."""

    def call(*flags, **changes):
        path = tmp_path / "train.yaml"
        path.write_text(yaml.safe_dump({**TINY_YAML, **changes}))
        return atlas("train", *flags, "--config", path)

    return call


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A folder that `train` wrote, shared by the tests that only read it."""
    folder = tmp_path_factory.mktemp("trained")
    text = folder / "story.txt"
    text.write_text("\n".join(SENTENCES * 15), encoding="utf-8")
    output = folder / "model"
    arguments = ["train", str(text), "--output", str(output), "--vocab-size", "300", *TINY_MODEL, *TINY_TRAINING]
    assert main(arguments) == 0
    return output
