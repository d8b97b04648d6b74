"""Grad modes, frozen weights, train and eval, half precision: the same answers, and nothing left behind on the module."""

import copy

import pytest
import torch
from transformers import DynamicCache

from atlas_hf import AtlasForCausalLM

HIGH_PRECISION = ("memory_weights", "feature_", "gate_bias", "residual_scale")


def buffers_and_attributes(model):
    """Everything but parameters that a module holds, by name."""
    own = {}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in ("_parameters", "_modules"):
                own[name, attribute] = copy.deepcopy(value) if isinstance(value, dict | list | tuple) else value
    return own


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes(small_model, random_ids, assert_equal_logits, preset, mode):
    model, ids = small_model(preset), random_ids(2, 9)
    expected = model(ids, use_cache=False).logits.detach()
    with mode():
        cache = DynamicCache(config=model.config)
        logits = [model(ids[:, :4], cache=cache).logits, model(ids[:, 4:5], cache=cache).logits]
        logits.append(model(ids[:, 5:], cache=cache).logits)
        assert_equal_logits(torch.cat(logits, 1), expected)


def test_training_after_inference_mode(small_model, random_ids, preset):
    """Tables made in inference mode must not end up in a later backward pass."""
    rank = {} if preset == "titans" else {"feature_rank": 2}  # tables that no other test has made yet
    model, ids = small_model(preset, **rank), random_ids(2, 9)
    with torch.inference_mode():
        model.generate(ids, max_new_tokens=6, do_sample=False)
    model(ids, labels=ids).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_frozen_parameters(small_model, random_ids, assert_equal_logits, preset):
    model, ids = small_model(preset), random_ids(2, 9)
    expected = model(ids).logits.detach()
    model.requires_grad_(False)
    assert_equal_logits(model(ids).logits, expected)
    # A single adapter-like parameter still gets its gradient, and the value that it gets without freezing.
    weight = model.model.layers[0].memory.k_proj.weight.requires_grad_()
    model(ids, labels=ids).loss.backward()
    alone = weight.grad.clone()
    model.requires_grad_(True).zero_grad()
    model(ids, labels=ids).loss.backward()
    torch.testing.assert_close(alone, weight.grad)


def test_train_and_eval(small_model, random_ids, variant):
    model, ids = small_model(variant), random_ids(2, 9)
    assert torch.equal(model.train()(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(small_model, random_ids, preset, reentrant):
    model, ids = small_model(preset).train(), random_ids(2, 11)
    model(ids, labels=ids).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    output = model(ids, labels=ids, use_cache=False)
    output.loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("use_cache", [False, True])
def test_no_state_on_the_module(small_model, random_ids, variant, use_cache):
    model, ids = small_model(variant), random_ids(2, 9)
    before = buffers_and_attributes(model)
    for batch in (ids, ids[:1]):
        model(batch, use_cache=use_cache, labels=batch).loss.backward()
        with torch.no_grad():
            model.generate(batch, max_new_tokens=3, do_sample=False)
    after = buffers_and_attributes(model)
    assert before.keys() == after.keys()
    for key, value in after.items():
        assert before[key] is value or before[key] == value, key


def test_two_sequences_interleaved(small_model, random_ids, logits_in_pieces, assert_equal_logits):
    model = small_model()
    one, two = random_ids(1, 9), random_ids(2, 9, seed=5)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    pieces = [[], []]
    with torch.no_grad():
        for t in range(0, 9, 3):
            for ids, cache, logits in zip((one, two), caches, pieces, strict=True):
                logits.append(model(ids[:, t : t + 3], cache=cache).logits)
        for ids, logits in zip((one, two), pieces, strict=True):
            assert_equal_logits(torch.cat(logits, 1), model(ids, use_cache=False).logits)


@torch.no_grad()
@pytest.mark.parametrize("mode", ["bfloat16 weights", "float16 weights", "autocast"])
def test_half_precision_keeps_the_memory_in_float32(small_model, random_ids, variant, mode, monkeypatch, tmp_path):
    model, ids = small_model(variant, dtype=torch.float32, initializer_range=0.1), random_ids(2, 9)
    expected = model(ids).logits
    dtype = torch.float16 if mode.startswith("float16") else torch.bfloat16
    if mode != "autocast":
        model.save_pretrained(tmp_path)
        model = AtlasForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        for name, parameter in model.named_parameters():
            high = any(part in name for part in HIGH_PRECISION)
            high = high or (dtype == torch.float16 and "memory.gate_proj" in name)
            assert parameter.dtype == (torch.float32 if high else dtype), name
    gates = []
    mixer = model.model.layers[0].memory
    gates_of = mixer._gates

    def watched(hidden_states):
        gates.extend(gates_of(hidden_states))
        return gates[-4:]

    monkeypatch.setattr(mixer, "_gates", watched)
    with torch.autocast("cpu", dtype=dtype, enabled=mode == "autocast"):
        output = model(ids[:, :8])
        last = model(ids[:, 8:], cache=output.cache).logits
    assert {gate.dtype for gate in gates} == {torch.float32}
    for layer in output.cache.layers:
        assert {s.dtype for s in layer.states.values() if s.is_floating_point()} == {torch.float32}
    assert output.logits.dtype == dtype
    assert last.isfinite().all()
    scale = expected.abs().max()
    assert (output.logits.float() - expected[:, :8]).abs().max() < 0.1 * scale


def test_backward_under_autocast(small_model, random_ids, variant):
    """Called inside the context, as some trainers do, the backward pass computes what it does outside."""
    model, ids, found = small_model(variant, dtype=torch.float32), random_ids(2, 9), []
    for inside in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids, labels=ids).loss
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        found.append([p.grad for p in model.model.layers[0].memory.memory_weights])
    for outside, within in zip(*found, strict=True):
        assert outside.any()
        assert (within - outside).abs().max() < 0.02 * outside.abs().max()


def test_float64_stays_float64(small_model, random_ids):
    model, ids = small_model(), random_ids(2, 6)
    with torch.no_grad():
        output = model(ids)
        rounded = small_model(dtype=torch.float32)(ids).logits
    assert output.logits.dtype == torch.float64
    states = output.cache.layers[0].states.values()
    assert {s.dtype for s in states if s.is_floating_point()} == {torch.float64}
    assert 0 < (output.logits - rounded).abs().max() < 1e-2


def test_bfloat16_trains(small_model, random_ids):
    model, ids = small_model(dtype=torch.bfloat16, initializer_range=0.1), random_ids(2, 9)
    model(ids, labels=ids).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
