"""Perplexity by streaming: that of the whole text at once, at any length, in memory that does not grow."""

import gc

import pytest
import torch
import torch.nn.functional as F

from atlas_hf import AtlasForCausalLM
from atlas_hf.evaluation.streaming import StreamedLoss, streamed_loss


@pytest.fixture
def model(model_folder):
    return AtlasForCausalLM.from_pretrained(model_folder).double()


@pytest.fixture
def long_ids():
    return torch.randint(2, 300, (330,), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("segment_size", [1, 7, 64, 1000])
def test_equal_to_the_whole_text_at_once(model, long_ids, segment_size):
    """Seven times the length that the model was trained at."""
    ids = long_ids if segment_size > 1 else long_ids[:60]
    assert len(ids) > model.config.max_position_embeddings
    model.train()
    loss = streamed_loss(model, ids, 0, num_bytes=100, segment_size=segment_size)
    assert model.training
    with torch.no_grad():
        logits = model(torch.cat([torch.tensor([0]), ids[:-1]])[None]).logits[0]
    expected = F.cross_entropy(logits, ids, reduction="sum").item()
    assert loss.total == pytest.approx(expected, rel=1e-6)
    assert loss.num_tokens == len(ids)
    assert loss.perplexity == pytest.approx(2.718281828459045 ** (expected / len(ids)), rel=1e-6)
    assert loss.bits_per_byte == pytest.approx(expected / 100 / 0.6931471805599453, rel=1e-6)


def test_memory_does_not_grow(model, long_ids, monkeypatch):
    """Bytes of all tensors that are alive at the end of each segment's forward pass."""
    alive = []
    forward = AtlasForCausalLM.forward

    def measured(self, *arguments, **kwargs):
        output = forward(self, *arguments, **kwargs)
        gc.collect()
        tensors = {id(x): x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)}
        alive.append(sum(x.numel() * x.element_size() for x in tensors.values()))
        return output

    monkeypatch.setattr(AtlasForCausalLM, "forward", measured)
    streamed_loss(model.float(), long_ids[:320], 0, segment_size=16)
    assert len(alive) == 20
    assert len(set(alive[1:])) == 1, alive


def test_documents_are_read_by_themselves(model, long_ids):
    first, second = (streamed_loss(model, ids, 0, num_bytes=9) for ids in long_ids[:60].split(30))
    both = first + second
    assert both == StreamedLoss(first.total + second.total, 60, 18)
    whole = streamed_loss(model, long_ids[:60], 0)
    assert abs(whole.total - both.total) > 1e-3


def test_the_prefix_lies_where_the_text_does(model, long_ids):
    expected = streamed_loss(model, long_ids[:9], 5)
    with torch.device("meta"):  # where tensors go that are not told where to
        assert streamed_loss(model, long_ids[:9], 5) == expected


def test_bits_of_no_known_bytes(model, long_ids):
    loss = streamed_loss(model, long_ids[:5], 0)
    assert loss.perplexity > 1
    with pytest.raises(ValueError, match="num_bytes=0: give the text's length"):
        loss.bits_per_byte  # noqa: B018  # a property


@pytest.mark.parametrize(("ids", "size"), [(torch.zeros(0, dtype=int), 4), (torch.zeros(1, 4, dtype=int), 4)])
def test_refuses_what_is_no_text(model, ids, size):
    with pytest.raises(ValueError, match=r"ids must be \[N\] with N >= 1"):
        streamed_loss(model, ids, 0, segment_size=size)
    with pytest.raises(ValueError, match="segment_size=0 is not allowed"):
        streamed_loss(model, torch.ones(3, dtype=int), 0, segment_size=0)


def test_a_model_that_fails_goes_on_training(model, long_ids, monkeypatch):
    def fail(*arguments, **named):
        raise RuntimeError("of the model")

    model.train()
    monkeypatch.setattr(AtlasForCausalLM, "forward", fail)
    with pytest.raises(RuntimeError, match="of the model"):
        streamed_loss(model, long_ids, 0)
    assert model.training
