"""The cache is exact: however a sequence is cut into calls, copied or rolled back, the logits are those of one call."""

import copy
import importlib
import inspect
import random
import sys
import types
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING

from atlas_hf import AtlasCacheLayer
from atlas_hf.modeling.memory_layer import AtlasMemory


def cache_bytes(cache) -> int:
    return sum(s.numel() * s.element_size() for layer in cache.layers for s in layer.states.values())


@pytest.fixture
def recorded(small_model, random_ids):
    """A model, 9 tokens and a recording cache that has seen the first 5 of them."""
    model, ids = small_model(), random_ids(2, 9)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids[:, :5], cache=cache)
    cache.crop(0)
    return model, ids, cache


@torch.no_grad()
def test_liveness(small_model, random_ids, variant):
    model = small_model(variant)
    chunk = model.config.chunk_size
    ids = random_ids(1, 4 * chunk + 8)
    changed = ids.clone()
    position = ids.shape[1] - 1 - 3 * chunk - 7
    changed[:, position] = 3 + (ids[:, position] + 5) % 64
    moved = (model(changed).logits - model(ids).logits).abs().amax(-1)[0]
    assert moved[:position].max() == 0
    assert moved[-1] > 1e-3


@torch.no_grad()
def test_every_prompt_length(small_model, random_ids, logits_in_pieces, assert_equal_logits, variant):
    model = small_model(variant)
    num_tokens = 3 * model.config.chunk_size + 2
    ids = random_ids(2, num_tokens)
    expected = model(ids, use_cache=False).logits
    assert_equal_logits(model(ids, use_cache=True).logits, expected)
    for prompt in range(1, num_tokens + 1):
        logits, _ = logits_in_pieces(model, ids, [prompt] + [1] * (num_tokens - prompt))
        assert_equal_logits(logits, expected)


@torch.no_grad()
def test_random_splits(small_model, random_ids, logits_in_pieces, assert_equal_logits, variant):
    model, ids = small_model(variant), random_ids(2, 23)
    expected = model(ids, use_cache=False).logits
    choose = random.Random(0)
    for _ in range(6):
        sizes = []
        while sum(sizes) < 23:
            sizes.append(min(choose.choice((1, 1, 2, 3, 5, 9)), 23 - sum(sizes)))
        logits, cache = logits_in_pieces(model, ids, sizes)
        assert_equal_logits(logits, expected)
        assert cache.get_seq_length() == 23


def test_long_texts_in_parts(small_model, random_ids, logits_in_pieces, assert_equal_logits, monkeypatch, variant):
    """What a CPU takes at one time changes neither the outputs nor the state, wherever in a chunk the text begins."""
    model, ids = small_model(variant), random_ids(2, 30)
    whole, cache = logits_in_pieces(model, ids, [2, 28])
    parts = []
    monkeypatch.setattr("atlas_hf.modeling.memory_layer.TOKENS_AT_ONCE", 16)
    monkeypatch.setattr("atlas_hf.modeling.memory_layer.FEWEST_CHUNKS", 1)
    recall = AtlasMemory._recall
    monkeypatch.setattr(AtlasMemory, "_recall", lambda *args: parts.append(args[1].shape[1]) or recall(*args))
    in_parts, other = logits_in_pieces(model, ids, [2, 28])
    assert len(parts) > 4
    assert max(parts) <= 8
    assert_equal_logits(in_parts, whole)
    for layer, wanted in zip(other.layers, cache.layers, strict=True):
        for name, state in wanted.states.items():
            assert_equal_logits(layer.states[name], state)
    # Parts of a few chunks would cost more than they save
    parts.clear()
    monkeypatch.setattr("atlas_hf.modeling.memory_layer.FEWEST_CHUNKS", 100)
    logits_in_pieces(model, ids, [2, 28])
    assert parts == [2, 2, 28, 28]


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "unit"), [(torch.float64, 1e-13), (torch.float32, 2e-5)])
def test_long_decode_does_not_drift(small_model, random_ids, logits_in_pieces, preset, dtype, unit):
    """200 tokens one at a time against one call, each preset at its own rate.

    Muon's is lower: its writes do not shrink with the error, so that at gd's rate any two ways of summing part further from
    token to token, whatever the cache does.
    """
    sizes = {"hidden_size": 64, "chunk_size": 16, "initializer_range": 0.1}
    model, ids = small_model(preset, dtype=dtype, **sizes), random_ids(1, 203)
    expected = model(ids, use_cache=False).logits
    logits, _ = logits_in_pieces(model, ids, [3] + [1] * 200)
    error = (logits - expected).abs().amax((0, 2)) / expected.abs().max()
    assert error.max() < unit
    # Medians: a single token's rounding may be ten times the others'
    assert error[103:].median() < 4 * error[3:103].median()


@torch.no_grad()
def test_left_padded_batch(small_model, random_ids, logits_in_pieces, assert_equal_logits, variant):
    model, ids = small_model(variant), random_ids(4, 17)
    lengths = (17, 12, 9, 8)  # after a prompt of 8 tokens: 8, 3, 0 and no real ones
    mask = torch.arange(17) >= 17 - torch.tensor(lengths)[:, None]
    padded = torch.where(mask, ids, 5)  # an ordinary token: the mask decides, not the number
    logits, cache = logits_in_pieces(model, padded, [8, 3] + [1] * 6, mask=mask)
    for row, length in enumerate(lengths):
        alone, _ = logits_in_pieces(model, ids[row : row + 1, -length:], [length])
        assert_equal_logits(logits[row : row + 1, -length:], alone)
    assert cache.get_seq_length() == 17


@torch.no_grad()
def test_batch_operations(small_model, random_ids, logits_in_pieces, assert_equal_logits, variant):
    model, ids = small_model(variant), random_ids(3, 12)
    mask = torch.arange(12) >= torch.tensor([0, 1, 5])[:, None]  # every row at another place of its chunk
    operations = {
        "reorder": (torch.tensor([2, 0, 0]), lambda c: c.reorder_cache(torch.tensor([2, 0, 0]))),
        "repeat": (torch.tensor([0, 0, 1, 1, 2, 2]), lambda c: c.batch_repeat_interleave(2)),
        "select": (torch.tensor([2, 1]), lambda c: c.batch_select_indices(torch.tensor([2, 1]))),
        "copy": (torch.tensor([0, 1, 2]), lambda c: None),
    }
    # After a prompt, and in the middle of decoding
    for sizes in ([7], [5, 1, 1]):
        _, start = logits_in_pieces(model, ids[:, :7], sizes, mask=mask)
        for name, (rows, operate) in operations.items():
            cache = copy.deepcopy(start)
            operate(cache)
            if name == "copy":
                model(ids[:, 7:9], attention_mask=mask[:, :9], cache=start)  # must not reach the copy
            expected = model(ids[rows], attention_mask=mask[rows].long(), use_cache=False).logits[:, 7:]
            for step in range(7, 12):
                part = mask[rows, : step + 1]
                logits = model(ids[rows, step : step + 1], attention_mask=part, cache=cache).logits
                assert_equal_logits(logits, expected[:, step - 7 : step - 6])
            if name == "copy":
                _, start = logits_in_pieces(model, ids[:, :7], sizes, mask=mask)


@torch.no_grad()
def test_crop_replays_what_stays(small_model, random_ids, logits_in_pieces, assert_equal_logits, variant):
    model, ids = small_model(variant), random_ids(2, 16)
    mask = torch.ones(2, 16, dtype=torch.bool)
    mask[1, [0, 6, 7]] = False
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    for removed in range(7):
        cache = DynamicCache(config=model.config)
        cache.activate_past_recording()
        logits_in_pieces(model, ids[:, :5], [5], cache=cache, mask=mask)
        cache.crop(0)
        wrong = torch.cat([ids[:, :5], ids[:, 5 : 11 - removed], ids[:, :removed]], 1)
        for start, end in ((5, 9), (9, 10), (10, 11)):
            model(wrong[:, start:end], attention_mask=mask[:, :end], cache=cache)
        cache.crop(-removed)
        assert cache.get_seq_length() == 11 - removed
        logits = model(ids[:, 11 - removed :], attention_mask=mask, cache=cache).logits
        assert_equal_logits(logits, expected[:, 11 - removed :])


@torch.no_grad()
def test_crop_to_the_start(small_model, random_ids, assert_equal_logits):
    model, ids = small_model(), random_ids(2, 6)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    model(random_ids(2, 5, seed=3), cache=cache)
    cache.crop(-5)
    assert cache.get_seq_length() == 0
    assert_equal_logits(model(ids, cache=cache).logits, model(ids, use_cache=False).logits)


def test_crop_refuses_what_it_cannot_do(recorded, small_model, random_ids):
    model, ids, cache = recorded
    with pytest.raises(ValueError, match="tokens_to_remove=2"):
        cache.crop(2)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-1)  # nothing since the last crop
    with torch.no_grad():
        model(ids[:, 5:7], cache=cache)
    with pytest.raises(RuntimeError, match="only 2 were recorded"):
        cache.crop(-3)
    plain = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, cache=plain)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        plain.crop(-1)


@pytest.mark.parametrize(
    "operate",
    [
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.batch_select_indices(torch.tensor([1])),
    ],
)
def test_batch_cannot_change_between_recording_and_crop(recorded, operate):
    model, ids, cache = recorded
    with torch.no_grad():
        model(ids[:, 5:7], cache=cache)
    with pytest.raises(RuntimeError, match="call `crop\\(0\\)` first"):
        operate(cache)
    cache.crop(0)
    operate(cache)


@torch.no_grad()
def test_reset_begins_anew(small_model, random_ids, logits_in_pieces, assert_equal_logits):
    model, ids = small_model(), random_ids(2, 9)
    first, cache = logits_in_pieces(model, ids, [5, 4])
    cache.reset()
    assert cache.get_seq_length() == 0
    second, _ = logits_in_pieces(model, ids, [5, 4], cache=cache)
    assert_equal_logits(second, first)


@torch.no_grad()
def test_size_does_not_grow(small_model, random_ids, logits_in_pieces, variant):
    model = small_model(variant, dtype=torch.float32)
    sizes = set()
    for num_tokens in (1, 6, 30):
        _, cache = logits_in_pieces(model, random_ids(2, num_tokens + 1), [num_tokens, 1])
        sizes.add(cache_bytes(cache))
        for state in cache.layers[0].states.values():
            assert state.shape[0] == 2
            assert state.dtype == (torch.float32 if state.is_floating_point() else torch.long)
    assert len(sizes) == 1


@torch.no_grad()
def test_layer_protocol(small_model, random_ids):
    model = small_model()
    cache = DynamicCache(config=model.config)
    layer = cache.layers[0]
    assert len(cache.layers) == model.config.num_hidden_layers
    assert isinstance(layer, AtlasCacheLayer)
    assert layer.get_states() is None
    mask = torch.tensor([[0, 0, 1, 1]])
    model(random_ids(1, 4), attention_mask=mask, cache=cache)
    assert cache.get_seq_length() == 4  # padding counts: the mask's length less the new tokens
    assert layer.get_mask_sizes(3) == (7, 0)
    assert layer.get_max_length() == -1
    assert not any(cache.is_linear)  # else `generate` would feed a known prompt again
    assert layer.update(None, None) == (None, None)
    with pytest.raises(TypeError, match="update_states"):
        layer.update(torch.zeros(1), torch.zeros(1))
    for other in cache.layers:
        other.offload()
        other.prefetch()
    model(random_ids(1, 1), attention_mask=torch.tensor([[0, 0, 1, 1, 1]]), cache=cache)


def test_refuses_what_is_not_its_own(small_model, random_ids, logits_in_pieces):
    model, ids = small_model(), random_ids(2, 6)
    with pytest.raises(ValueError, match=r"DynamicCache\(config=model\.config\)"):
        model(ids, cache=DynamicCache())
    short = DynamicCache(config=small_model(num_hidden_layers=1).config)
    with pytest.raises(ValueError, match="1 layers of type AtlasCacheLayer"):
        model(ids, cache=short)
    _, cache = logits_in_pieces(model, ids, [6])
    with pytest.raises(ValueError, match="cache holds 2 rows, but the batch has 3"):
        model(random_ids(3, 2), cache=cache)
    _, cache = logits_in_pieces(small_model(chunk_size=8), ids, [6])
    with pytest.raises(
        ValueError, match=r"the cache was .* with chunk_size=8 \(this model: 4\): go on with that model"
    ):
        model(ids[:, :1], cache=cache)


@torch.no_grad()
def test_a_second_copy_of_the_code(small_model, random_ids, assert_equal_logits, monkeypatch):
    """Loaded as remote code beside the package, it registers a class of its own for the layer type."""
    package = types.ModuleType("second_copy")
    package.__path__ = [str(Path(inspect.getfile(AtlasCacheLayer)).parent)]
    for mapping in (DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING):
        monkeypatch.setitem(mapping, "atlas", mapping["atlas"])
    monkeypatch.setitem(sys.modules, "second_copy", package)
    importlib.import_module("second_copy.cache_atlas")
    model, ids = small_model(), random_ids(2, 6)
    cache = DynamicCache(config=model.config)
    assert not isinstance(cache.layers[0], AtlasCacheLayer)
    model(ids[:, :3], cache=cache)
    assert_equal_logits(model(ids[:, 3:], cache=cache).logits, model(ids, use_cache=False).logits[:, 3:])


def test_backward_through_two_segments(small_model, random_ids, preset):
    model, ids = small_model(preset).train(), random_ids(2, 11)

    def gradients(loss):
        model.zero_grad()
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    cache = DynamicCache(config=model.config)
    model(ids[:, :6], cache=cache)
    pieces = gradients(model(ids[:, 6:], cache=cache).logits.square().mean())
    whole = gradients(model(ids, use_cache=False).logits[:, 6:].square().mean())
    for name, gradient in whole.items():
        torch.testing.assert_close(pieces[name], gradient, atol=1e-7, rtol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert whole["model.layers.0.memory.memory_weights.1"].abs().max() > 0


@torch.no_grad()
def test_static_layer_writes_in_place(small_model, random_ids, assert_equal_logits, preset):
    model, ids = small_model(preset), random_ids(2, 10)
    expected = model(ids, use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=32)
    pieces = [model(ids[:, :4], cache=cache).logits, model(ids[:, 4:5], cache=cache).logits]
    addresses = {n: s.data_ptr() for n, s in cache.layers[0].states.items()}
    pieces += [model(ids[:, t : t + 1], cache=cache).logits for t in range(5, 10)]
    assert_equal_logits(torch.cat(pieces, 1), expected)
    assert {n: s.data_ptr() for n, s in cache.layers[0].states.items()} == addresses
    assert int(cache.get_seq_length()) == 10
    cache.reset()
    assert_equal_logits(model(ids, cache=cache).logits, expected)
    cache.reorder_cache(torch.tensor([1, 1]))
    logits = model(ids[:1, :1].expand(2, 1), cache=cache).logits
    assert_equal_logits(logits[0], logits[1])
    assert (logits[1] - model(ids[:1, :1], use_cache=False).logits).abs().max() > 1e-3
    cache.reset()
    for first, last in ((0, 9), (9, 10)):  # of another number of rows
        part = model(ids[:1, first:last], cache=cache).logits
        assert_equal_logits(part, expected[:1, first:last])
