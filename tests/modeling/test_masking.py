"""A masked token does not exist: the others come out as if it had been deleted, whatever the mask's pattern and dtype."""

import pytest
import torch
from transformers import DynamicCache

from atlas_hf.modeling.sequence_layout import SequenceLayout, next_labels

PATTERNS = {
    "left": [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    "right": [1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0],
    "middle": [1, 1, 1, 0, 0, 1, 0, 1, 1, 1, 1, 1],
    "everywhere": [0, 1, 0, 0, 1, 1, 1, 0, 1, 1, 0, 0],
    "one token": [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0],
    "all": [1] * 12,
}


@torch.no_grad()
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_masked_token_does_not_exist(small_model, random_ids, assert_equal_logits, variant, pattern):
    model, ids = small_model(variant), random_ids(1, 12)
    mask = torch.tensor([PATTERNS[pattern]])
    real = mask[0].bool()
    expected = model(ids[:, real], use_cache=False).logits
    for use_cache in (False, True):
        logits = model(ids, attention_mask=mask, use_cache=use_cache).logits
        assert_equal_logits(logits[:, real], expected)
    cache = model(ids, attention_mask=mask).cache
    deleted = model(ids[:, real]).cache
    token, more = random_ids(1, 1, seed=4), torch.ones(1, 13, dtype=torch.long)
    more[:, :12] = mask
    assert_equal_logits(model(token, attention_mask=more, cache=cache).logits, model(token, cache=deleted).logits)


@torch.no_grad()
def test_patterns_in_one_batch(small_model, random_ids, assert_equal_logits, variant):
    model, ids = small_model(variant), random_ids(len(PATTERNS) + 1, 12)
    mask = torch.tensor([*PATTERNS.values(), [0] * 12])
    logits = model(ids, attention_mask=mask, use_cache=False).logits
    assert logits.isfinite().all()
    for row, real in enumerate(mask.bool()):
        if real.any():
            assert_equal_logits(logits[row, real], model(ids[row : row + 1, real], use_cache=False).logits[0])


@torch.no_grad()
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.int32,
        torch.int64,
        torch.float8_e4m3fn,
        torch.float16,
        torch.float32,
        torch.float64,
    ],
)
def test_dtypes(small_model, random_ids, dtype):
    model, ids = small_model(), random_ids(2, 12)
    mask = torch.tensor([PATTERNS["everywhere"], PATTERNS["left"]])
    expected = model(ids, attention_mask=mask).logits
    assert torch.equal(model(ids, attention_mask=mask.to(dtype)).logits, expected)


@torch.no_grad()
def test_a_row_without_tokens(small_model, random_ids, assert_equal_logits, variant):
    """Alone, then beside another row; and it begins with its first real token."""
    model, ids = small_model(variant), random_ids(2, 9)
    cache = DynamicCache(config=model.config)
    empty = model(ids[:1, :5], attention_mask=torch.zeros(1, 5), cache=cache).logits
    assert empty.isfinite().all()
    mask = torch.tensor([[0] * 5 + [1] * 4])
    expected = model(ids[:1, 5:], use_cache=False).logits
    assert_equal_logits(model(ids[:1, 5:], attention_mask=mask, cache=cache).logits, expected)
    mask = torch.tensor([[0] * 9, [1] * 9])
    logits = model(ids, attention_mask=mask).logits
    assert_equal_logits(logits[1:], model(ids[1:]).logits)


@torch.no_grad()
def test_masks_with_a_cache(small_model, random_ids, assert_equal_logits, variant):
    """The whole sequence's mask or the new tokens' part; padding on top of a cache."""
    model, ids = small_model(variant), random_ids(2, 12)
    mask = torch.tensor([PATTERNS["middle"], PATTERNS["everywhere"]])
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    for cut in (1, 4, 7, 11):
        for part in (mask, mask[:, cut:]):
            cache = DynamicCache(config=model.config)
            first = model(ids[:, :cut], attention_mask=mask[:, :cut], cache=cache).logits
            second = model(ids[:, cut:], attention_mask=part, cache=cache).logits
            real = mask.bool()
            assert_equal_logits(torch.cat([first, second], 1)[real], expected[real])


def test_no_gradient_through_masked_tokens(small_model, random_ids):
    model, ids = small_model(), random_ids(2, 12)
    mask = torch.tensor([PATTERNS["middle"], [0] * 12])
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embeds, attention_mask=mask).logits
    logits[mask.bool()].square().sum().backward()
    assert embeds.grad[~mask.bool()].abs().max() == 0
    assert embeds.grad[0, 0].abs().max() > 0
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def pad_counts(model):
    """Around the edges of a chunk of `b` tokens: 1, b - 1, b and b + 3 pads."""
    chunk = model.config.chunk_size
    return [1, chunk - 1, chunk, chunk + 3]


def padded(ids, count, side, fill):
    """`ids [1, T]` with `count` tokens `fill` on a side or in the middle, and the mask `[1, T + count]`."""
    before = {"left": 0, "right": ids.shape[1], "middle": ids.shape[1] // 2}[side]
    pads = torch.full((1, count), fill)
    mask = torch.ones(1, ids.shape[1] + count, dtype=torch.long)
    mask[:, before : before + count] = 0
    return torch.cat([ids[:, :before], pads, ids[:, before:]], 1), mask


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_equal_gradients(actual, expected):
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, atol=1e-8, rtol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_padding_changes_neither_logits_nor_gradients(small_model, random_ids, assert_equal_logits, preset, side):
    """One row at a time, in training and in evaluation, through labels and with `inputs_embeds`."""
    model, ids = small_model(preset).train(), random_ids(1, 10)
    assert model.config.chunk_size == 4
    output = model(ids, labels=ids)
    logits, loss, expected = output.logits.detach(), output.loss.detach(), gradients(model, output.loss)
    assert min(g.abs().max() for n, g in expected.items() if "embed_tokens" not in n) > 0
    for count in pad_counts(model):
        more, mask = padded(ids, count, side, fill=5)
        real = mask[0].bool()
        output = model(more, attention_mask=mask, labels=more)
        assert_equal_logits(output.logits[:, real], logits)
        torch.testing.assert_close(output.loss, loss)
        assert_equal_gradients(gradients(model, output.loss), expected)
        embeds = model.get_input_embeddings()(more).detach().requires_grad_()
        output = model(inputs_embeds=embeds, attention_mask=mask)
        output.logits[:, real].square().mean().backward()
        assert embeds.grad[:, ~real].abs().max() == 0
        assert embeds.grad[:, real].abs().amax(-1).min() > 0
        with torch.no_grad():
            assert_equal_logits(model.eval()(more, attention_mask=mask).logits[:, real], logits)
        model.train()


def test_rows_of_all_lengths_in_one_batch_train_as_by_themselves(small_model, random_ids, preset):
    """Right and left pads of every count and a row without tokens: the batch's gradient is the rows' sum."""
    model = small_model(preset).train()
    length = 8 + max(pad_counts(model))
    ids = random_ids(9, length)
    mask = torch.ones(9, length, dtype=torch.long)
    for row, count in enumerate(pad_counts(model)):
        mask[row, :count] = 0
        mask[row + 4, length - count :] = 0
    mask[8] = 0
    logits = model(ids, attention_mask=mask).logits
    together = gradients(model, (logits.square() * mask[..., None]).sum())
    apart = [model(row[real.bool()][None]).logits.square().sum() for row, real in zip(ids[:8], mask[:8], strict=True)]
    assert_equal_gradients(together, gradients(model, sum(apart)))


@torch.no_grad()
@pytest.mark.parametrize("pad", [None, 0, 2, 66])
def test_any_pad_id(small_model, random_ids, assert_equal_logits, pad):
    """The mask decides: the number that stands at a masked place means nothing, and a real token may be the pad's."""
    model, ids = small_model(pad_token_id=pad), random_ids(1, 9)
    ids[0, 3] = 2 if pad is None else pad
    expected = model(ids).logits
    results = []
    for fill in (0, 2, 66):
        more, mask = padded(ids, 3, "left", fill)
        results.append(model(more, attention_mask=mask).logits[:, 3:])
        assert_equal_logits(results[-1], expected)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 1, 6, 6), "must be \\[batch, tokens\\], got \\(2, 1, 6, 6\\)"),
        (torch.ones(6), "must be \\[batch, tokens\\], got \\(6,\\)"),
        (torch.ones(3, 6), "attention_mask has shape \\(3, 6\\), but there are 2 rows of 6 new tokens"),
        (torch.ones(2, 5), "attention_mask has shape \\(2, 5\\)"),
        (torch.ones(2, 9), "attention_mask has shape \\(2, 9\\)"),
        (torch.zeros(2, 6).index_fill(1, torch.tensor([0]), -torch.inf), "attention_mask holds -inf"),
        (torch.full((2, 6), torch.nan), "attention_mask holds nan"),
        (torch.zeros(2, 6, dtype=torch.long).index_fill(1, torch.tensor([0]), -10000), "attention_mask holds -10000"),
    ],
)
def test_refuses_other_masks(small_model, random_ids, mask, message):
    with pytest.raises(ValueError, match=message):
        small_model()(random_ids(2, 6), attention_mask=mask)


def test_refuses_a_dictionary_without_its_layers(small_model, random_ids):
    with pytest.raises(ValueError, match="dictionary with full_attention and without 'atlas'"):
        small_model()(random_ids(1, 4), attention_mask={"full_attention": torch.ones(1, 4)})


def test_refuses_what_is_no_tensor_of_tokens(small_model, random_ids):
    model, ids = small_model(), random_ids(2, 6)
    with pytest.raises(TypeError, match=r"attention_mask must be a tensor .* got list"):
        model(ids, attention_mask=[[1] * 6] * 2)
    with pytest.raises(ValueError, match=r"input_ids must be \[batch, tokens\] .* a batch of one row"):
        model(ids[0])
    with pytest.raises(ValueError, match=r"labels must be \(2, 6\), one for each token, got \(6, 2\)"):
        model(ids, labels=ids.T)
    with pytest.raises(TypeError, match="cache must be a `Cache` of transformers, got tuple"):
        model(ids, cache=((ids, ids),))


def test_tuples_for_those_who_ask_for_them(small_model, random_ids):
    model, ids = small_model(), random_ids(2, 6)
    loss, logits = model(ids, labels=ids, use_cache=False).to_tuple()
    model.config.return_dict = False
    found = model(ids, labels=ids, use_cache=False)
    assert isinstance(found, tuple)
    torch.testing.assert_close(found[0], loss)
    torch.testing.assert_close(found[1], logits)


def test_refuses_a_mask_that_does_not_fit_the_cache(small_model, random_ids):
    model, ids = small_model(), random_ids(2, 9)
    with torch.no_grad():
        cache = model(ids[:, :5]).cache
        for length in (3, 5, 10):
            with pytest.raises(ValueError, match="after 5 cached ones: give \\[2, 9\\], or only the new tokens' part"):
                model(ids[:, 5:], attention_mask=torch.ones(2, length), cache=cache)


def test_layout_of_a_mask():
    mask = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0]]).bool()
    layout = SequenceLayout.from_mask(mask)
    assert layout.lengths.tolist() == [2, 0, 3]
    assert layout.last_sequence_of_row.tolist() == [0, 1, 2]
    x = torch.arange(1.0, 13).view(3, 4)
    gathered = layout.gather(x)
    assert gathered.tolist() == [[2, 4, 0, 0], [0, 0, 0, 0], [9, 10, 11, 0]]
    assert torch.equal(layout.scatter([gathered], 3, 4), x * mask)


def test_layout_of_documents():
    segments = torch.tensor([[0, 0, 1, 1], [3, 3, 3, 3]])
    layout = SequenceLayout.from_segments(segments)
    assert layout.lengths.tolist() == [2, 2, 4]
    assert layout.last_sequence_of_row.tolist() == [1, 2]
    x = torch.arange(1.0, 9).view(2, 4)
    assert layout.gather(x).tolist() == [[1, 2, 0, 0], [3, 4, 0, 0], [5, 6, 7, 8]]
    assert torch.equal(layout.scatter([layout.gather(x)], 2, 4), x)
    masked = SequenceLayout.from_segments(segments, torch.tensor([[1, 0, 0, 0], [0, 1, 1, 0]]))
    assert masked.lengths.tolist() == [1, 0, 2]
    assert masked.gather(x).tolist() == [[1, 0], [0, 0], [6, 7]]


def test_labels_of_the_next_real_token():
    labels, mask = (
        torch.tensor([[10, 11, 12, 13, 14], [20, -100, 22, 23, 24]]),
        torch.tensor([[0, 1, 0, 1, 1], [1, 1, 1, 0, 0]]),
    )
    expected = [[-100, 13, -100, 14, -100], [-100, 22, -100, -100, -100]]
    assert next_labels(labels, mask).tolist() == expected
    assert next_labels(labels[:, :1], mask[:, :1]).tolist() == [[-100], [-100]]


def test_sequences_are_parted_by_length():
    lengths = [3, 200, 1, 150, 2, 0, 90, 3]
    segments = torch.repeat_interleave(torch.arange(8), torch.tensor(lengths))[None]
    kept = [n for n in lengths if n]
    layout = SequenceLayout.from_segments(segments)
    parts = list(layout.parts())
    assert [[kept[i] for i in numbers] for numbers, _ in parts] == [[200, 150], [90], [3, 3, 2], [1]]
    assert [part.index.shape[1] for _, part in parts] == [200, 90, 3, 1]
    assert sum(part.index.numel() for _, part in parts) < 2 * sum(lengths) < layout.index.numel()
    x = torch.randn(1, sum(lengths), 2)
    assert torch.equal(layout.scatter([2 * part.gather(x) for _, part in parts], 1, sum(lengths)), 2 * x)
    even = SequenceLayout.from_segments(torch.tensor([[0, 0, 1, 1, 1]]))
    assert [numbers for numbers, _ in even.parts()] == [None]
    nothing = SequenceLayout.from_segments(torch.tensor([[0, 0, 1]]), torch.zeros(1, 3))
    assert sum(part.index.shape[0] for _, part in nothing.parts()) == 2
