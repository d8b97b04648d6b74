"""Training on documents longer than a pass: a cache in, a cache out, and `detach_cache` where back-propagation ends."""

import gc
import weakref

import pytest
import torch
from transformers import DynamicCache, LlamaConfig

from atlas_hf import detach_cache


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_equal(actual, expected):
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, atol=1e-8, rtol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("cut", [1, 4, 7, 10])
def test_two_segments_train_as_one_pass(small_model, random_ids, preset, cut):
    """The loss of both segments, with rows at different places, against one pass over the document."""
    model, ids = small_model(preset).train(), random_ids(2, 11)
    mask = torch.ones_like(ids)
    mask[1, [0, 5]] = 0
    model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()].square().sum().backward()
    whole = gradients(model)
    model.zero_grad()
    cache = DynamicCache(config=model.config)
    pieces = [model(ids[:, :cut], attention_mask=mask[:, :cut], cache=cache).logits]
    pieces.append(model(ids[:, cut:], attention_mask=mask, cache=cache).logits)
    torch.cat(pieces, 1)[mask.bool()].square().sum().backward()
    assert_equal(gradients(model), whole)


def test_detaching_keeps_the_memory_and_cuts_the_gradient(small_model, random_ids, assert_equal_logits, preset):
    model, ids = small_model(preset).train(), random_ids(2, 11)
    expected = model(ids).logits.detach()
    cache = DynamicCache(config=model.config)
    model(ids[:, :6], cache=cache)
    assert detach_cache(cache) is cache
    assert all(not s.requires_grad for layer in cache.layers for s in layer.states.values())
    logits = model(ids[:, 6:], cache=cache).logits
    assert_equal_logits(logits, expected[:, 6:])
    logits.square().sum().backward()
    cut = gradients(model)
    # The same with the memory read without gradients.
    model.zero_grad()
    with torch.no_grad():
        cache = model(ids[:, :6]).cache
    model(ids[:, 6:], cache=cache).logits.square().sum().backward()
    assert_equal(cut, gradients(model))
    # Without detaching, the learned start of the memory has a gradient through the first segment.
    model.zero_grad()
    model(ids).logits[:, 6:].square().sum().backward()
    name = "model.layers.0.memory.memory_weights.1"
    assert (gradients(model)[name] - cut[name]).abs().max() > 1e-8


def test_a_cache_without_tokens_and_a_recording_one(small_model, random_ids, assert_equal_logits):
    model, ids = small_model(), random_ids(2, 9)
    for wrong in (None, DynamicCache(), DynamicCache(config=LlamaConfig(num_hidden_layers=1))):
        with pytest.raises(TypeError, match="holds no memory to detach: pass what an Atlas model returned"):
            detach_cache(wrong)
    cache = detach_cache(DynamicCache(config=model.config))
    cache.activate_past_recording()
    model(ids[:, :6], cache=cache)
    detach_cache(cache)
    cache.crop(-2)
    # The replay made states with a graph through the parameters again, but none through what came before.
    assert any(s.requires_grad for s in cache.layers[0].states.values())
    detach_cache(cache)
    assert not any(s.requires_grad for s in cache.layers[0].states.values())
    assert_equal_logits(model(ids[:, 4:], cache=cache).logits, model(ids).logits[:, 4:])


class SavedTensors:
    """Counts the tensors that autograd keeps for backward passes still to come."""

    class Kept:
        def __init__(self, tensor):
            self.tensor = tensor

    def __init__(self):
        self.alive = weakref.WeakSet()

    def pack(self, tensor):
        kept = self.Kept(tensor)
        self.alive.add(kept)
        return kept

    def count(self):
        gc.collect()
        return len(self.alive)


@pytest.mark.parametrize("detach", [True, False])
def test_memory_is_flat_over_detached_segments(small_model, random_ids, detach):
    model, ids = small_model(dtype=torch.float32).train(), random_ids(2, 20 * 6)
    cache, saved, kept = DynamicCache(config=model.config), SavedTensors(), []
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda kept: kept.tensor):
        for part in ids.split(6, 1):
            loss = model(part, labels=part, cache=cache).loss
            if detach:
                loss.backward()
                detach_cache(cache)
            del loss
            kept.append(saved.count())
    if detach:
        assert kept == [0] * 20
    else:
        assert kept[-1] > 10 * kept[0] > 0  # the whole past stays


def test_a_cache_with_gradient_checkpointing_is_refused(small_model, random_ids):
    """Checkpointed blocks run twice, and would drop the memory silently."""
    model, ids = small_model().train(), random_ids(2, 9)
    with torch.no_grad():
        cache = model(ids[:, :5]).cache
    model.activation_checkpointing_enable()
    with pytest.raises(ValueError, match="cache cannot be given while gradient checkpointing"):
        model(ids[:, 5:], cache=cache)
    with torch.no_grad():
        model.eval()(ids[:, 5:], cache=cache)
