"""`generate()` in all its modes gives what repeated calls without a cache give, and feeds every token once."""

import pytest
import torch
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

GREEDY = {"do_sample": False, "max_new_tokens": 12}


@torch.no_grad()
def greedy_without_cache(model, ids, num_tokens, mask=None):
    mask = torch.ones_like(ids) if mask is None else mask
    for _ in range(num_tokens):
        logits = model(ids, attention_mask=mask, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], -1)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], -1)
    return ids


@pytest.fixture
def fed(monkeypatch):
    """Shapes of what each call of a model gets, in order."""

    def watch(model):
        shapes, forward = [], model.model.embed_tokens.forward
        monkeypatch.setattr(
            model.model.embed_tokens, "forward", lambda ids: shapes.append(ids.shape[1]) or forward(ids)
        )
        return shapes

    return watch


def left_padded(ids, lengths):
    mask = (torch.arange(ids.shape[1]) >= ids.shape[1] - torch.tensor(lengths)[:, None]).long()
    return torch.where(mask.bool(), ids, 5), mask


def test_greedy(small_model, random_ids, fed, variant):
    model, ids = small_model(variant), random_ids(2, 9)
    expected = greedy_without_cache(model, ids, 12)
    shapes = fed(model)
    assert torch.equal(model.generate(ids, **GREEDY), expected)
    assert shapes == [9] + [1] * 11
    assert torch.equal(model.generate(ids, use_cache=False, **GREEDY), expected)
    assert max(len(set(row.tolist())) for row in expected[:, 9:]) >= 6, "degenerate output: the tests would be weak"


def test_left_padding(small_model, random_ids, variant):
    model = small_model(variant)
    lengths = [9, 6, 4, 1]
    ids, mask = left_padded(random_ids(4, 9), lengths)
    batch = model.generate(ids, attention_mask=mask, **GREEDY)
    for row, length in enumerate(lengths):
        alone = model.generate(ids[row : row + 1, -length:], **GREEDY)
        assert torch.equal(batch[row, -12:], alone[0, -12:])


def test_sampling(small_model, random_ids, preset):
    model, ids = small_model(preset), random_ids(2, 6)
    outputs = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        arguments = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 10}
        outputs.append(model.generate(ids, use_cache=use_cache, **arguments))
    assert outputs[0].shape == (6, 16)
    assert torch.equal(*outputs)
    assert len({tuple(row) for row in outputs[0].tolist()}) == 6


@pytest.mark.parametrize("padded", [False, True])
def test_beams(small_model, random_ids, preset, padded):
    model = small_model(preset)
    ids, mask = left_padded(random_ids(2, 7), [7, 3 if padded else 7])
    arguments = {"num_beams": 4, "num_return_sequences": 2, "attention_mask": mask, **GREEDY}
    with_cache = model.generate(ids, **arguments)
    assert torch.equal(with_cache, model.generate(ids, use_cache=False, **arguments))
    assert not torch.equal(with_cache[::2], model.generate(ids, attention_mask=mask, **GREEDY))


def test_inputs_embeds(small_model, random_ids, preset):
    model, ids = small_model(preset), random_ids(2, 7)
    embeds = model.get_input_embeddings()(ids)
    new = model.generate(inputs_embeds=embeds, **GREEDY)
    assert torch.equal(new, model.generate(ids, **GREEDY)[:, 7:])


@pytest.mark.parametrize("size", [1, 3, 4, 20])
def test_prefill_in_chunks(small_model, random_ids, fed, preset, size):
    model = small_model(preset)
    ids, mask = left_padded(random_ids(2, 11), [11, 6])
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    shapes = fed(model)
    assert torch.equal(model.generate(ids, attention_mask=mask, prefill_chunk_size=size, **GREEDY), expected)
    assert sum(shapes) == 11 + 11
    assert max(shapes) == min(size, 11)


@pytest.mark.parametrize("given", ["new tokens", "whole text"])
def test_second_turn(small_model, random_ids, fed, preset, given):
    model, ids = small_model(preset), random_ids(2, 7)
    first = model.generate(ids, return_dict_in_generate=True, **GREEDY)
    text = torch.cat([first.sequences, random_ids(2, 5, seed=9)], 1)
    expected = greedy_without_cache(model, text, 12)
    shapes = fed(model)
    # The cache has seen all but the last token of the first turn.
    turn = text[:, first.sequences.shape[1] - 1 :] if given == "new tokens" else text
    second = model.generate(turn, attention_mask=torch.ones_like(text), cache=first.cache, **GREEDY)
    assert torch.equal(second[:, -12:], expected[:, -12:])
    assert shapes == [6] + [1] * 11


def test_second_turn_of_unequal_rows(small_model, random_ids, preset):
    """Padding in the middle: the first turn left padded, the second one too."""
    model = small_model(preset)
    ids, mask = left_padded(random_ids(2, 7), [7, 4])
    first = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **GREEDY)
    more, more_mask = left_padded(random_ids(2, 5, seed=9), [3, 5])
    text = torch.cat([first.sequences, more], 1)
    whole = torch.cat([mask, mask.new_ones(2, 12), more_mask], 1)
    second = model.generate(text, attention_mask=whole, cache=first.cache, **GREEDY)
    for row in range(2):
        real = text[row][whole[row].bool()][None]
        alone = model.generate(real, attention_mask=torch.ones_like(real), **GREEDY)
        assert torch.equal(second[row, -12:], alone[0, -12:])


@torch.no_grad()
def test_assisted_generation_leaves_no_recording_on(small_model, random_ids):
    """What is recorded for `crop` grows with every token; a cache that was set to record stays so."""
    model, ids = small_model(), random_ids(1, 9)
    arguments = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    cache = model.generate(ids, prompt_lookup_num_tokens=3, **arguments).cache
    assert not any(layer.record_past for layer in cache.layers)
    given = DynamicCache(config=model.config)
    model.generate(ids, prompt_lookup_num_tokens=3, cache=given, max_new_tokens=8, do_sample=False)
    assert not any(layer.record_past for layer in given.layers)
    wanted = DynamicCache(config=model.config)
    wanted.activate_past_recording()
    model.generate(ids, prompt_lookup_num_tokens=3, cache=wanted, max_new_tokens=8, do_sample=False)
    assert all(layer.record_past for layer in wanted.layers)


@torch.no_grad()
def test_generating_without_a_new_token_says_so(small_model, random_ids):
    model = small_model()
    cache = model(random_ids(1, 12)).cache
    with pytest.raises(ValueError, match="there is no new token"):
        model.generate(random_ids(1, 3), cache=cache, max_new_tokens=2)
    with pytest.raises(ValueError, match="input_ids is empty"):
        model(torch.zeros(1, 0, dtype=torch.long))


@pytest.mark.parametrize("assistant", ["itself", "a stranger"])
def test_assisted(small_model, random_ids, preset, assistant):
    model, ids = small_model(preset), random_ids(1, 7)
    helper = model if assistant == "itself" else small_model(preset, seed=5, num_hidden_layers=1)
    arguments = {"do_sample": False, "max_new_tokens": 20}
    expected = model.generate(ids, **arguments)
    assert torch.equal(model.generate(ids, assistant_model=helper, **arguments), expected)


def test_prompt_lookup(small_model, random_ids, fed, variant):
    model = small_model(variant)
    ids = random_ids(1, 5).repeat(1, 3)
    arguments = {"do_sample": False, "max_new_tokens": 20}
    expected = model.generate(ids, **arguments)
    shapes = fed(model)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=4, **arguments), expected)
    assert shapes[0] >= 15
    assert max(shapes[1:]) <= 5


@pytest.mark.parametrize("implementation", ["static", "offloaded"])
def test_other_caches(small_model, random_ids, preset, implementation):
    model = small_model(preset)
    ids, mask = left_padded(random_ids(2, 7), [7, 3])
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    got = model.generate(ids, attention_mask=mask, cache_implementation=implementation, **GREEDY)
    assert torch.equal(got, expected)


def test_own_cache_is_used(small_model, random_ids):
    model, ids = small_model(), random_ids(1, 6)
    cache = DynamicCache(config=model.config)
    output = model.generate(ids, cache=cache, return_dict_in_generate=True, **GREEDY)
    assert output.cache is cache
    assert cache.get_seq_length() == 6 + 11


def test_streamer(small_model, random_ids):
    class Count(BaseStreamer):
        calls = 0

        def put(self, value):
            self.calls += 1

        def end(self):
            self.calls += 100

    streamer = Count()
    small_model().generate(random_ids(1, 6), streamer=streamer, **GREEDY)
    assert streamer.calls == 1 + 12 + 100


def test_logits_to_keep(small_model, random_ids, assert_equal_logits):
    model, ids = small_model(), random_ids(2, 9)
    with torch.no_grad():
        whole = model(ids).logits
        assert_equal_logits(model(ids, logits_to_keep=2).logits, whole[:, -2:])
        assert_equal_logits(model(ids, logits_to_keep=torch.tensor([1, 4])).logits, whole[:, [1, 4]])


def test_interrupted_generation_leaves_no_recording_on(small_model, random_ids):
    class Stop(Exception):
        pass

    class Streamer:
        tokens = 0

        def put(self, value):
            self.tokens += 1
            if self.tokens > 2:
                raise Stop

        def end(self):
            pass

    model, ids = small_model(), random_ids(1, 12)
    given = DynamicCache(config=model.config)
    with pytest.raises(Stop):
        model.generate(
            *(ids,), max_new_tokens=8, do_sample=False, prompt_lookup_num_tokens=2, cache=given, streamer=Streamer()
        )
    assert given.get_seq_length() > 0
    assert not any(layer.record_past for layer in given.layers)
