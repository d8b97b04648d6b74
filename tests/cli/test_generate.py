"""`atlas-hf generate`: equal to `model.generate`, reproducible, and clear about models that do not fit."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertLMHeadModel

from atlas_hf import AtlasForSequenceClassification
from atlas_hf.training.tokenizer import train_tokenizer

PROMPT = "The landlord's daughter"


def test_greedy_is_what_the_model_generates(atlas, trained):
    outcome = atlas("generate", "--model", trained, "--prompt", PROMPT, "--greedy", "--max-new-tokens", 12)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(trained), AutoTokenizer.from_pretrained(trained)
    ids = model.generate(
        **tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False), max_new_tokens=12, do_sample=False
    )
    assert outcome.code == 0
    assert outcome.out == tokenizer.decode(ids[0], skip_special_tokens=True) + "\n"
    assert outcome.out.startswith(PROMPT)


def test_sampling_follows_its_seed_and_flags(atlas, trained):
    def sample(*flags):
        outcome = atlas("generate", "--model", trained, "--prompt", PROMPT, "--max-new-tokens", 20, *flags)
        assert outcome.code == 0
        return outcome.out

    assert sample("--seed", 1) == sample("--seed", 1)
    assert len({sample("--seed", seed, "--top-k", 0, "--temperature", 2) for seed in range(4)}) > 1
    greedy = sample("--greedy")
    assert sample("--top-k", 1, "--seed", 3) == greedy
    assert sample("--top-p", 1e-9, "--seed", 3) == greedy
    assert sample("--temperature", 1e-6, "--seed", 3) == greedy


def refused(outcome, *parts):
    assert outcome.code == 2
    assert "Traceback" not in outcome.err
    for part in parts:
        assert str(part) in outcome.err


def test_models_that_cannot_be_used(atlas, trained, tmp_path):
    def generate(folder):
        return atlas("generate", "--model", folder, "--prompt", PROMPT)

    refused(generate(tmp_path / "missing"), tmp_path / "missing", "is not a folder")
    refused(generate(tmp_path), "no config.json")

    broken = tmp_path / "broken"
    shutil.copytree(trained, broken)
    (broken / "config.json").write_text("{")
    refused(generate(broken), broken, "cannot be loaded")
    for content in (
        "null",
        '{"model_type": ["atlas"]}',
        (trained / "config.json").read_text().replace("float32", "float99"),
    ):
        (broken / "config.json").write_text(content)
        refused(generate(broken), broken, "cannot be loaded")
        refused(atlas("info", "--model", broken), broken, "cannot be read")
    triton = json.loads((trained / "config.json").read_text()) | {"kernels": "triton"}
    (broken / "config.json").write_text(json.dumps(triton))
    refused(generate(broken), broken, "kernels='triton' cannot run")
    shutil.copy(trained / "config.json", broken)
    tokenizer = (broken / "tokenizer_config.json").read_text()
    (broken / "tokenizer_config.json").write_text("[1]")
    refused(generate(broken), broken, "a tokenizer that cannot be loaded")
    (broken / "tokenizer_config.json").write_text(tokenizer)
    (broken / "model.safetensors").write_bytes(b"nothing")
    refused(generate(broken), broken, "cannot be loaded")
    shutil.copy(trained / "model.safetensors", broken)
    (broken / "tokenizer_config.json").unlink()
    refused(generate(broken), broken, "no tokenizer")

    other = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9)
    BertLMHeadModel(other).save_pretrained(tmp_path / "bert")
    train_tokenizer(["ab"], 258).save_pretrained(tmp_path / "bert")
    refused(generate(tmp_path / "bert"), "258 tokens", "vocab_size is 9")


@pytest.mark.parametrize("missing", ["lm_head.weight", "model.norm.weight"])
def test_weights_that_are_missing_are_not_made_up(atlas, trained, tmp_path, missing):
    """By no command that only uses a model."""
    folder, text = tmp_path / "model", tmp_path / "story.txt"
    shutil.copytree(trained, folder)
    text.write_text(PROMPT)
    if missing == "lm_head.weight":
        AtlasForSequenceClassification.from_pretrained(trained).save_pretrained(folder)
    else:
        state = load_file(folder / "model.safetensors")
        del state[missing]
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    refused(atlas("generate", "--model", folder, "--prompt", PROMPT), folder, "lacks 1 weight(s)", missing)
    for flags in (("--text", text), ("--tasks", "any")):
        refused(atlas("evaluate", "--model", folder, *flags), folder, "lacks 1 weight(s)", missing)
    refused(atlas("export", tmp_path / "out", "--model", folder), folder, "lacks 1 weight(s)", missing)
    assert not (tmp_path / "out").exists()


def test_a_contradictory_configuration_names_the_field(atlas, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "model")
    config = json.loads((trained / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"memory": "cubic"}))
    outcome = atlas("generate", "--model", tmp_path / "model", "--prompt", PROMPT)
    refused(outcome, "memory='cubic'", "linear, mlp, gated")


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (("--prompt", ""), "--prompt is empty"),
        (("--prompt", "\udcff"), "--prompt is not UTF-8"),
        (("--prompt", "a", "--seed", "4294967296"), "'4294967296' is not a whole number from 0 to 2^32 - 1"),
        (("--prompt", "a", "--top-p", "1.5"), "'1.5' is not a number above 0 and up to 1"),
        (("--prompt", "a", "--temperature", "0"), "'0' is not a number of at least 1e-6"),
        (("--prompt", "a", "--temperature", "1e-40"), "'1e-40' is not a number of at least 1e-6"),
        (("--prompt", "a", "--max-new-tokens", "-1"), "'-1' is not a whole number"),
        ((), "--prompt"),
    ],
)
def test_flags_that_cannot_be_used(atlas, trained, flags, part):
    refused(atlas("generate", "--model", trained, *flags), part)
