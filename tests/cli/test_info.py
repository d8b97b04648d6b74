"""`atlas-hf info`: figures of models that exist and of sizes that need not be built."""

import re

import pytest
from transformers import AutoModelForCausalLM, BertConfig


def figure(text, name):
    return int(re.search(rf"^{name} +([\d,]+)", text, re.MULTILINE).group(1).replace(",", ""))


def test_parameters_are_those_of_the_model(atlas, trained):
    outcome = atlas("info", "--model", trained)
    assert outcome.code == 0
    assert figure(outcome.out, "parameters") == AutoModelForCausalLM.from_pretrained(trained).num_parameters()
    assert figure(outcome.out, "chunk_size") == 4


def test_the_340m_state_stays_below_64_mib(atlas):
    outcome = atlas("info", "--size", "340M")
    assert outcome.code == 0
    assert figure(outcome.out, "state per sequence") < 64 * 2**20
    assert 250e6 < figure(outcome.out, "parameters") < 550e6


@pytest.mark.parametrize("preset", ["atlas", "atlas_plus_plus", "omeganet", "titans"])
def test_every_preset_has_figures(atlas, preset):
    outcome = atlas("info", "--preset", preset, "--size", "170M")
    assert outcome.code == 0
    assert all(figure(outcome.out, name) > 0 for name in ("parameters", "state per sequence", "FLOPs per token"))


def test_flags_override_the_size(atlas):
    small = atlas("info", "--size", "170M", "--num-hidden-layers", 1).out
    whole = atlas("info", "--size", "170M").out
    assert figure(small, "num_hidden_layers") == 1
    assert figure(small, "state per sequence") * 12 == figure(whole, "state per sequence")
    assert figure(small, "FLOPs per token") < figure(whole, "FLOPs per token")


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (("--set", "chunk_size=0"), "chunk_size=0"),
        (("--set", "rule=gd", "--set", "muon_interval=4"), "muon_interval=4"),
        (("--size", "3B"), "'3B'"),
        (("--model", "nowhere"), "nowhere is not a folder"),
    ],
)
def test_refusals(atlas, flags, part):
    outcome = atlas("info", *flags)
    assert outcome.code == 2
    assert part in outcome.err


def test_another_kind_of_model(atlas, tmp_path):
    BertConfig().save_pretrained(tmp_path)
    outcome = atlas("info", "--model", tmp_path)
    assert outcome.code == 2
    assert "model_type='bert'" in outcome.err
