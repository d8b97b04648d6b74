"""Faults that implementations of recurrent memories are known for, each with the behaviour that is right.

Beam search with and without cache, and equality of train and eval mode, are in `test_generation.py` and `test_modes.py`.
"""

import copy
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import DynamicCache, Trainer, TrainingArguments

from atlas_hf import AtlasForCausalLM, copy_memory


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def states_of(cache):
    return [{name: state.clone() for name, state in layer.states.items()} for layer in cache.layers]


@torch.no_grad()
def test_a_prompt_shorter_than_a_chunk_is_written(small_model, random_ids, preset):
    """Its first token moves logits that no convolution carries it to, in the same unfinished chunk."""
    model = small_model(preset, chunk_size=16)
    prompt, rest = random_ids(1, 2), random_ids(1, 12, seed=3)
    other = prompt.clone()
    other[0, 0] = 3 + (prompt[0, 0] + 7) % 60
    logits = {}
    for name, ids in (("prompt", prompt), ("other", other)):
        cache = DynamicCache(config=model.config)
        model(ids, cache=cache)
        assert all(int(position) == 2 for position in cache.layers[0].states["position"])
        logits[name] = model(rest, cache=cache).logits
        whole = model(torch.cat([ids, rest], 1), use_cache=False).logits[:, 2:]
        torch.testing.assert_close(logits[name], whole, rtol=1e-7, atol=1e-7)
    reach = model.config.num_hidden_layers * (model.config.conv_kernel_size - 1)
    assert (logits["prompt"] - logits["other"]).abs()[:, reach:].max() > 1e-4


@torch.no_grad()
def test_logits_do_not_depend_on_cache_labels_or_mode(small_model, random_ids, variant):
    model, ids = small_model(variant, dtype=torch.float32), random_ids(2, 11)
    expected = model(ids, use_cache=False).logits
    for arguments in ({"use_cache": True}, {"labels": ids}, {"labels": ids, "use_cache": True}, {"use_cache": None}):
        for training in (True, False):
            assert torch.equal(model.train(training)(ids, **arguments).logits, expected), arguments


def test_nothing_is_left_behind(small_model, random_ids, preset):
    """A batch of four, then one of two; two backward passes in a row."""
    model, four, two = small_model(preset), random_ids(4, 13), random_ids(2, 9, seed=5)
    fresh = copy.deepcopy(model)
    fresh(two, labels=two).loss.backward()
    expected = gradients(fresh)
    model(four, labels=four).loss.backward()
    model.zero_grad()
    for times in (1, 2):
        output = model(two, labels=two)
        output.loss.backward()
        assert torch.equal(output.logits, fresh(two).logits)
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, times * expected[name], rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    "arguments", [{}, {"num_items_in_batch": torch.tensor(0)}, {"num_items_in_batch": torch.tensor(7)}]
)
@pytest.mark.parametrize("labelled", ["nothing", "the first token"])
def test_no_label_at_all_is_a_loss_of_zero(small_model, random_ids, preset, arguments, labelled):
    """The first token is predicted from nothing, so that its label is none either."""
    model, ids = small_model(preset), random_ids(2, 9)
    labels = torch.full_like(ids, -100)
    if labelled == "the first token":
        labels[:, 0] = ids[:, 0]
    loss = model(ids, labels=labels, **arguments).loss
    assert loss.item() == 0
    loss.backward()
    assert all(p.grad is None or bool((p.grad == 0).all()) for p in model.parameters())
    shifted = torch.full_like(ids, -100)
    assert model(ids, labels=ids, shift_labels=shifted, **arguments).loss.item() == 0


def test_a_label_beside_a_row_without_any_counts_alone(small_model, random_ids):
    model, ids = small_model(), random_ids(2, 9)
    labels = ids.clone()
    labels[0] = -100
    torch.testing.assert_close(model(ids, labels=labels).loss, model(ids[1:], labels=ids[1:]).loss)


def test_training_survives_a_batch_without_labels(small_config, random_ids, tmp_path):
    model = AtlasForCausalLM(small_config(initializer_range=0.02))
    rows = [
        {"input_ids": row, "labels": torch.full_like(row, -100) if i < 2 else row}
        for i, row in enumerate(random_ids(4, 8))
    ]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=2,
        train_sampling_strategy="sequential",
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == 0
    assert losses[1] == pytest.approx(4.2, abs=0.3)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("arguments", [{"do_sample": True, "top_k": 0}, {"do_sample": False}, {"num_beams": 3}])
def test_generation_goes_on_in_the_callers_cache_and_leaves_a_copy_alone(small_model, random_ids, preset, arguments):
    """Documented in docs/stream.md: the cache that is passed is the one that is filled, and `copy_memory` keeps it."""
    model, document, question = small_model(preset), random_ids(1, 9), random_ids(1, 3, seed=4)
    with torch.no_grad():
        kept = model(document).cache
    before = states_of(kept)
    options = {"max_new_tokens": 6, "attention_mask": torch.ones(1, 12, dtype=torch.long), **arguments}
    if "num_beams" in arguments:
        rows = copy_memory(kept)
        rows.batch_repeat_interleave(3)
    else:
        rows = copy_memory(kept)
    answers = []
    for _ in range(2):
        torch.manual_seed(3)
        answers.append(model.generate(question, cache=copy_memory(rows), **options))
    assert torch.equal(*answers)
    for states, wanted in zip(states_of(kept), before, strict=True):
        assert all(torch.equal(states[name], wanted[name]) for name in wanted)
    assert kept.get_seq_length() == 9
    torch.manual_seed(3)
    assert torch.equal(model.generate(question, cache=rows, **options), answers[0])
    assert rows.get_seq_length() == 9 + 3 + 5


def test_generation_without_a_cache_given_touches_none(small_model, random_ids):
    model, ids = small_model(), random_ids(2, 9)
    with torch.no_grad():
        kept = model(ids).cache
        before = states_of(kept)
        for arguments in ({"do_sample": True}, {"num_beams": 2, "do_sample": False}):
            model.generate(ids, max_new_tokens=5, **arguments)
    for states, wanted in zip(states_of(kept), before, strict=True):
        assert all(torch.equal(states[name], wanted[name]) for name in wanted)


BROKEN = """
import warnings, logging
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    import atlas_hf, atlas_hf.ops
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "feature_rank": 2}
    config = atlas_hf.AtlasConfig.atlas(**sizes)
    model = atlas_hf.AtlasForCausalLM(config)
    ids = torch.arange(3, 14)[None]
    model(ids, labels=ids).loss.backward()
    model.generate(ids, max_new_tokens=3, do_sample=False)
ours = [str(w.message) for w in caught if "atlas" in str(w.filename) or "{name}" in str(w.message)]
print(len(ours))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "error"), [("triton", "ImportError"), ("fla", "ImportError"), ("fla", "OSError")])
def test_a_broken_kernel_library_costs_at_most_one_warning(tmp_path, name, error):
    """Installed, but failing at import, as after an upgrade of the driver; PyTorch itself bears nothing but an
    `ImportError` of triton.
    """
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").write_text(f"raise {error}('libcuda.so.1: version mismatch')\n")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2] / "src")])
    finished = subprocess.run(
        [sys.executable, "-c", BROKEN.replace("{name}", name)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    logged = sum(name in line for line in finished.stderr.splitlines())
    assert int(finished.stdout.split()[-1]) + logged <= 1


def test_the_metadata_names_the_versions_of_transformers_that_are_tested():
    """The installed one is both: a wider range needs runs of its own with the lowest and the highest."""
    (requirement,) = [r for r in importlib.metadata.requires("atlas-hf") if re.match(r"transformers\b", r)]
    lowest, highest = (re.search(rf"{sign}([\d.]+)", requirement)[1] for sign in (">=", "<"))
    installed = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    assert tuple(int(part) for part in lowest.split(".")) == installed
    assert tuple(int(part) for part in highest.split(".")) == (installed[0], installed[1] + 1)
