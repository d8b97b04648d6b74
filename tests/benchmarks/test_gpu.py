"""The GPU benchmark, tried out on a CPU: all of it runs, tells what it cannot run, and notices numbers that differ."""

import json
import math
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import gpu
from gpu_parts import contenders, measure, parity

CPU = torch.device("cpu")


@pytest.fixture
def run(tmp_path, monkeypatch):
    def start(*arguments):
        path = tmp_path / "gpu.json"
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry-run", "--output", str(path), *map(str, arguments)])
        gpu.main()
        return json.loads(path.read_text())

    return start


@pytest.mark.slow
def test_the_dry_run(run, tmp_path):
    result = run("--contenders", "atlas", "omeganet", "gated_deltanet", "llama", "--one-process")
    cases = {row["name"]: row for row in result["parity"]}
    assert {"recurrence titans float32", "model atlas bfloat16", "offsets of the scan"} <= cases.keys()
    assert all(row["passed"] for row in result["parity"] if "skipped" not in row)
    assert {row["dtype"] for row in result["parity"] if "skipped" not in row} == {"float32", "bfloat16"}
    assert cases["offsets of the scan"]["elements"] > contenders.DRY.offsets
    assert "no kernel" in cases["offsets of Newton-Schulz"]["skipped"]
    rows = {(r["contender"], r["measure"]): r for r in result["rows"]}
    assert len(rows) == 12
    for (contender, _), row in rows.items():
        if contender == "gated_deltanet":
            assert row["skipped"] == "fla's models run on Triton, which needs CUDA, and the device is cpu"
        else:
            assert row["tokens_per_second"] > 0
            assert 0 < row["utilisation"] < 1
    assert result["machine"]["peak_flops"] > 0
    table = (tmp_path / "gpu.md").read_text()
    assert "| recurrence titans | float32 | torch |" in table
    assert "| llama | train | 1 x 40 |" in table


@pytest.mark.slow
def test_every_contender_has_a_process_and_all_rows_are_kept(run):
    result = run("--contenders", "llama", "gated_deltanet", "--parts", "train")
    assert [(row["contender"], "skipped" in row) for row in result["rows"]] == [
        ("llama", False),
        ("gated_deltanet", True),
    ]
    assert result["machine"]["rounds"] == contenders.DRY.rounds


@pytest.mark.parametrize("fault", ["one sign", "not a number", "an error"])
def test_different_numbers_fail_the_run(run, monkeypatch, fault):
    def outcomes(arguments, dtype, kernels, options, split):
        found = {"output": torch.ones(3, dtype=torch.float64), "gradient by q": torch.ones(3, dtype=torch.float64)}
        if kernels != "torch" and options["rule"] == "gd":
            if fault == "an error":
                raise RuntimeError("no such kernel image")
            found["gradient by q"][1] = -1 if fault == "one sign" else math.nan
        return found

    monkeypatch.setattr(parity, "outcomes", outcomes)
    with pytest.raises(
        SystemExit, match=r"different .*: recurrence omeganet float32, recurrence titans float32"
    ) as stopped:
        run("--parts", "parity", "--one-process")
    assert "atlas" not in str(stopped.value)


@pytest.mark.parametrize("how", [["--one-process"], []])
def test_after_its_time_nothing_is_begun(run, how):
    result = run("--budget", 0, "--contenders", "llama", *how)
    assert len(result["rows"]) == 3
    assert all(row["skipped"] == "the time was over" for row in result["parity"] + result["rows"])


def test_a_contender_that_fails_costs_only_its_own_figures(monkeypatch):
    def fails(name, scale, device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(measure, "build", fails)
    key = {"contender": "llama", "measure": "train", "batch": 1, "length": 8}
    row = measure.measure(key, contenders.DRY, CPU, 1e9)
    assert row["skipped"] == "OutOfMemoryError: CUDA out of memory"


def test_a_process_that_dies_costs_only_its_own_figures(run, monkeypatch):
    started = []

    def dies(command, **how):
        started.append(command)
        return subprocess.CompletedProcess(command, -11)

    monkeypatch.setattr(gpu.subprocess, "run", dies)
    with pytest.raises(SystemExit, match="different"):
        run("--contenders", "llama")
    # Every case of parity in its turn, then the contender
    assert len(started) == len(list(parity.cases(contenders.DRY, CPU, "auto"))) + 1
    result = run("--contenders", "llama", "--parts", "train")
    assert [row["skipped"] for row in result["rows"]] == ["its process ended with code -11"]


def test_without_a_gpu_only_the_dry_run(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main()
    assert "no CUDA device here: --dry-run" in capsys.readouterr().err


@torch.no_grad()
def test_flops_of_llama_are_those_of_its_products():
    model, tokens = contenders.build("llama", contenders.DRY, CPU), 64
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    # PyTorch does not count the fused attention of the CPU; half of it is masked
    attention = 2 * model.config.num_hidden_layers * model.config.hidden_size * tokens
    counted = counter.get_total_flops() / tokens
    assert contenders.forward_flops("llama", model, tokens) == pytest.approx(counted + attention, rel=0.01)


def test_the_full_size_is_340m():
    with torch.device("meta"):
        sizes = {
            name: sum(p.numel() for p in contenders.build(name, contenders.FULL, torch.device("meta")).parameters())
            for name in ("atlas", "omeganet", "llama")
        }
    assert all(300e6 < size < 460e6 for size in sizes.values()), sizes


def test_unknown_contender():
    with pytest.raises(ValueError, match="rwkv"):
        contenders.build("rwkv", contenders.DRY, CPU)
