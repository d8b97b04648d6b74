"""The speed benchmark runs every measure, counts what it says it counts, and keeps the rows it did not measure again."""

import json
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import speed
from speed_parts import contenders, measure
from speed_parts.report import columns, table


@pytest.fixture
def run(tmp_path, monkeypatch):
    def start(*arguments):
        path = tmp_path / "speed.json"
        monkeypatch.setattr(sys, "argv", ["speed.py", "--rounds", "1", "--output", str(path), *map(str, arguments)])
        speed.main()
        return path

    return start


@pytest.mark.slow
def test_rows_of_every_measure(run, capsys, monkeypatch):
    compiled = []
    # What the compiler makes is tested elsewhere, and takes it a minute
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled.append(function) or function)
    path = run("--contenders", "omeganet", "llama", "--train", 40, "--prefill", 40, "--decode", 24, "--compiled", 24)
    measured = json.loads(path.read_text())
    rows = {(r["contender"], r["measure"], r["length"]): r for r in measured}
    assert "\nStarted " in path.with_suffix(".md").read_text()
    assert set(rows) == {
        (c, *m)
        for c in ("omeganet", "llama")
        for m in (("train", 40), ("prefill", 40), ("decode", 24), ("decode compiled", 24))
    }
    for row in rows.values():
        assert min(row["cpu_seconds"], row["wall_seconds"], row["cpu_ratio"], row["tokens_per_second"]) > 0
    assert 0 < rows["omeganet", "train", 40]["share_of_peak"] < 1
    assert rows["omeganet", "train", 40]["memory_of_llama"] is not None
    # Llama's cache grows with the context; it has decoded twice
    positions = 24 + 2 * measure.DECODE_STEPS
    assert rows["llama", "decode", 24]["cache_bytes"] == 4 * 2 * measure.BATCH * positions * 256 * 4
    assert {f.__self__.config.model_type for f in compiled} == {"atlas", "llama"}
    assert "omeganet train 40" in capsys.readouterr().out
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    before = rows["llama", "decode", 24]
    run("--contenders", "omeganet", "--train", "--prefill", 40, "--decode", "--compiled")
    again = json.loads(path.read_text())
    assert len(again) == len(rows)
    assert before in again
    lines = table(again).splitlines()
    assert "| contender | train 40 | prefill 40 | decode 24 | decode compiled 24 |" in lines
    assert columns(again) == [("train", 40), ("prefill", 40), ("decode", 24), ("decode compiled", 24)]


@torch.no_grad()
@pytest.mark.slow
def test_memory_of_a_training_step_is_seen():
    """At least the logits and their gradient, in a process whose parent holds much more."""
    logits = measure.BATCH * 512 * 4096 * 4
    assert measure.peak_memory(speed.__file__, "llama", 512) > 2 * logits


def test_a_contender_that_fails_costs_nobody_else_a_row(run, capsys, monkeypatch):
    def measure_one(name, *others):
        if name == "omeganet":
            raise RuntimeError("no driver")
        return measured(name, *others)

    measured = speed.measure_one
    monkeypatch.setattr(speed, "measure_one", measure_one)
    path = run("--contenders", "omeganet", "llama", "--train", "--prefill", 16, "--decode")
    assert [row["contender"] for row in json.loads(path.read_text())] == ["llama"]
    assert "omeganet prefill 16: skipped, RuntimeError: no driver" in capsys.readouterr().out


def test_flops_of_llama_are_those_of_its_products():
    model, tokens = contenders.build("llama"), 64
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    # PyTorch does not count the fused attention of the CPU; half of it is masked
    attention = 2 * 4 * 256 * tokens
    counted = counter.get_total_flops() / tokens
    assert contenders.forward_flops("llama", model, tokens) == pytest.approx(counted + attention, rel=0.01)


def test_unknown_contender():
    with pytest.raises(ValueError, match="rwkv"):
        contenders.build("rwkv")
