"""Arguments of a forward pass that do not fit: refused by name, or said to have no effect."""

import pytest
import torch
from transformers import StaticCache

from atlas_hf.modeling import chunk_scan, forward_arguments


@pytest.mark.parametrize(
    ("name", "meant"),
    [("atention_mask", "attention_mask"), ("past_key_value", "past_key_values"), ("seq_id", "seq_idx")],
)
def test_a_misspelt_argument(small_model, random_ids, name, meant):
    with pytest.raises(ValueError, match=f"{name} is not an argument of an Atlas model: did you mean {meant}"):
        small_model()(random_ids(1, 4), **{name: torch.ones(1, 4)})


@torch.no_grad()
def test_an_argument_without_a_use_is_told(small_model, random_ids, monkeypatch):
    model, ids, told = small_model(), random_ids(1, 4), []
    monkeypatch.setattr(forward_arguments.logger, "warning_once", told.append)
    expected = model(ids).logits
    assert not told
    assert torch.equal(model(ids, token_type_ids=torch.zeros(1, 4), pixel_values=None).logits, expected)
    assert told == ["Atlas has no use for the argument(s) token_type_ids, which are ignored"]


def test_labels_need_all_logits(small_model, random_ids):
    model, ids = small_model(), random_ids(2, 6)
    for kept in (1, torch.tensor([0, 1])):
        with pytest.raises(ValueError, match=r"logits_to_keep=.* leaves logits out that labels need"):
            model(ids, labels=ids, logits_to_keep=kept)


@torch.no_grad()
def test_a_cache_that_is_none(small_model, random_ids):
    with pytest.raises(TypeError, match="cache must be a `Cache` of transformers, got tuple"):
        small_model()(random_ids(1, 4), cache=())


@torch.no_grad()
def test_a_static_cache_takes_nothing_back(small_model, random_ids):
    model = small_model()
    cache = StaticCache(config=model.config, max_cache_len=16)
    model(random_ids(1, 4), cache=cache)
    layer = cache.layers[0]
    layer.crop(0)
    with pytest.raises(RuntimeError, match="a static cache takes no tokens back"):
        layer.crop(-2)


@pytest.mark.parametrize("gradients", [False, True])
def test_what_a_backward_pass_needs_is_kept_for_one_alone(small_model, random_ids, monkeypatch, gradients):
    """Under `no_grad` it is let go at once, whatever the parameters ask for."""
    model, ids, taken = small_model(), random_ids(2, 9), []

    def take(chunk):
        taken.append(chunk)
        return chunk.__dict__["kept"]

    monkeypatch.setattr(
        chunk_scan.Chunk, "kept", property(take, lambda chunk, x: chunk.__dict__.update(kept=x)), raising=False
    )
    with torch.set_grad_enabled(gradients):
        assert model(ids, use_cache=False).logits.any()
    assert bool(taken) == gradients
