"""`atlas-hf train` on two processes, started by `torchrun` and by `accelerate launch`, writes what one process writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atlas_hf.cli.main import main

BIN = Path(sys.executable).parent
ACCELERATE = Path(__file__).resolve().parents[2] / "examples" / "accelerate_two_cpus.yaml"
LAUNCHERS = {
    "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2"],
    "accelerate": [str(BIN / "accelerate"), "launch", "--config_file", str(ACCELERATE)],
}
CONFIG = """\
hidden_size: 16
num_hidden_layers: 1
num_attention_heads: 2
intermediate_size: 16
set: {chunk_size: 4, omega_window: 2, feature_rank: 2}
vocab_size: 300
max_steps: 4
batch_size: 4
block_size: 16
optimizer: muon
pack: true
tensorboard: true
trainer: {max_grad_norm: 0.0}
"""


def launch(launcher, folder, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*LAUNCHERS[launcher], "-m", "atlas_hf.cli", "train", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"Day {i}: rain, and {i * 3} letters."}) + "\n" for i in range(200)))
    (tmp_path / "train.yaml").write_text(CONFIG)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "stream"), [("torchrun", False), ("accelerate", True)])
def test_two_processes_train_as_one(rows, tmp_path, launcher, stream):
    flags = [rows, "--config", tmp_path / "train.yaml", *(["--stream"] if stream else [])]
    assert main(["train", *map(str, flags), "--output", str(tmp_path / "one")]) == 0
    done = launch(launcher, tmp_path, *flags, "--output", tmp_path / "two")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("Written to") == 1  # one of them prints and writes
    assert "on 2 processes" in done.stdout
    assert not list(tmp_path.glob("*.partial"))
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert {p.name for p in (tmp_path / "one").iterdir()} == {p.name for p in (tmp_path / "two").iterdir()}
    if not stream:
        for name in one:
            torch.testing.assert_close(two[name], one[name], rtol=1e-3, atol=1e-4)
    losses = [json.loads((tmp_path / name / "run.json").read_text())["losses"] for name in ("one", "two")]
    assert [step for step, _ in losses[1]] == [1, 2, 3, 4]
    for (_, a), (_, b) in zip(*losses, strict=True):
        assert b == pytest.approx(a, rel=1e-3)


@pytest.mark.slow
def test_an_error_ends_all_processes(rows, tmp_path):
    done = launch("torchrun", tmp_path, rows, "--config", tmp_path / "train.yaml", "--output", rows)
    assert done.returncode != 0
    assert "is a file: name a folder" in done.stderr
    assert rows.is_file()
