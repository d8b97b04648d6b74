"""Packed documents do not see each other, however their boundaries are told."""

import pytest
import torch
from transformers import DataCollatorWithFlattening, DynamicCache

from atlas_hf.modeling.sequence_layout import SequenceLayout

LENGTHS = (5, 1, 9, 4)


@pytest.fixture
def packed(small_model, random_ids):
    """A model, its packed ids, and the logits of each document by itself."""

    def make(variant="atlas"):
        model, ids = small_model(variant), random_ids(1, sum(LENGTHS))
        with torch.no_grad():
            alone = [model(part, use_cache=False).logits for part in ids.split(LENGTHS, 1)]
        return model, ids, torch.cat(alone, 1)

    return make


def boundaries():
    index = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]
    ends = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return {
        "position_ids": {"position_ids": positions},
        "seq_idx": {"seq_idx": index.int()},
        "cu_seq_lens_q": {"cu_seq_lens_q": ends},
        "all": {
            "position_ids": positions,
            "seq_idx": index,
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": 9,
            "max_length_k": 9,
        },
    }


@torch.no_grad()
@pytest.mark.parametrize("told", ["position_ids", "seq_idx", "cu_seq_lens_q", "all"])
@pytest.mark.parametrize("cached", ["no cache", "new cache", "fresh cache given"])
def test_documents_apart(packed, assert_equal_logits, told, cached):
    model, ids, expected = packed()
    arguments = dict(boundaries()[told])
    if cached == "fresh cache given":
        arguments["cache"] = DynamicCache(config=model.config)
    else:
        arguments["use_cache"] = cached == "new cache"
    assert_equal_logits(model(ids, **arguments).logits, expected)


@torch.no_grad()
def test_without_boundaries_they_leak(packed):
    model, ids, expected = packed()
    assert (model(ids).logits - expected)[:, LENGTHS[0] :].abs().max() > 1e-2


@torch.no_grad()
def test_every_variant(packed, assert_equal_logits, variant):
    model, ids, expected = packed(variant)
    assert_equal_logits(model(ids, **boundaries()["seq_idx"]).logits, expected)


@torch.no_grad()
def test_cache_goes_on_with_the_last_document(packed, small_model, random_ids, assert_equal_logits, preset):
    model, ids, _ = packed(preset)
    cache = model(ids, **boundaries()["seq_idx"]).cache
    more, last = random_ids(1, 5, seed=4), ids[:, -LENGTHS[-1] :]
    logits = torch.cat([model(more[:, :1], cache=cache).logits, model(more[:, 1:], cache=cache).logits], 1)
    assert_equal_logits(logits, model(torch.cat([last, more], 1)).logits[:, LENGTHS[-1] :])


@torch.no_grad()
def test_several_rows_and_a_mask(small_model, random_ids, assert_equal_logits):
    model, ids = small_model(), random_ids(2, 10)
    index = torch.tensor([[0] * 3 + [1] * 7, [0] * 6 + [1] * 4])
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, [1, 9]] = 0
    mask[1, :6] = 0  # a document without tokens
    logits = model(ids, seq_idx=index, attention_mask=mask, use_cache=False).logits
    for row in range(2):
        for document in range(2):
            real = (index[row] == document) & mask[row].bool()
            if real.any():
                assert_equal_logits(logits[row, real], model(ids[row, real][None], use_cache=False).logits[0])


def test_loss_of_flattened_batch(small_model):
    """`DataCollatorWithFlattening` as the Trainer uses it: the packed loss is the unpacked one."""
    model = small_model()
    documents = [torch.randint(3, 67, (n,)).tolist() for n in LENGTHS]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    with torch.no_grad():
        loss = model(**collate([{"input_ids": d} for d in documents])).loss
        total = torch.zeros((), dtype=torch.float64)
        for document in documents:
            if len(document) > 1:
                ids = torch.tensor([document])
                total += model(ids, labels=ids).loss * (len(document) - 1)
    torch.testing.assert_close(loss.double(), total / sum(n - 1 for n in LENGTHS), atol=1e-5, rtol=1e-5)


def test_gradients_stay_apart(packed):
    model, ids, _ = packed()
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=embeds, **boundaries()["seq_idx"]).logits[:, 6:15].square().sum().backward()
    moved = embeds.grad[0].abs().amax(-1)
    assert moved[6:15].min() > 0
    assert moved[:6].max() == moved[15:].max() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seq_idx": torch.zeros(1, 7)}, "seq_idx must be \\(1, 19\\), got \\(1, 7\\)"),
        ({"cu_seq_lens_q": torch.tensor([0, 7])}, "must rise from 0"),
        ({"cu_seq_lens_q": torch.tensor([0, 9, 5, 19])}, "must rise from 0"),
        ({"cu_seq_lens_q": [0, 5.5, 19]}, "must be whole numbers, got torch.float32"),
        ({"cu_seq_lens_q": torch.tensor([0, 6, 19]), "seq_idx": torch.tensor([[0] * 5 + [1] * 14])}, "different"),
    ],
)
def test_refuses_what_does_not_fit(packed, arguments, message):
    model, ids, _ = packed()
    with pytest.raises(ValueError, match=message):
        model(ids, **arguments)


@torch.no_grad()
def test_a_packed_pass_can_be_taken_back(small_model, random_ids, assert_equal_logits, preset):
    model, ids = small_model(preset), random_ids(2, 19)
    expected = model(ids[:, 6:]).logits
    for removed in (1, 4, 12):
        cache = DynamicCache(config=model.config)
        cache.activate_past_recording()
        positions = torch.cat([torch.arange(6), torch.arange(13)])[None]
        model(ids, position_ids=positions, cache=cache)
        cache.crop(-removed)
        assert_equal_logits(model(ids[:, 19 - removed :], cache=cache).logits, expected[:, 13 - removed :])


@torch.no_grad()
def test_boundaries_of_keys_alone(packed, assert_equal_logits):
    model, ids, expected = packed()
    cu = boundaries()["cu_seq_lens_q"]["cu_seq_lens_q"]
    assert_equal_logits(model(ids, cu_seq_lens_k=cu).logits, expected)


@torch.no_grad()
def test_boundaries_as_a_list(packed, assert_equal_logits):
    model, ids, expected = packed()
    ends = boundaries()["cu_seq_lens_q"]["cu_seq_lens_q"].tolist()
    assert_equal_logits(model(ids, cu_seq_lens_q=ends).logits, expected)
    with pytest.raises(ValueError, match=r"cu_seq_lens_q must rise from 0"):
        model(ids, cu_seq_lens_q=[ends])
    numbers = boundaries()["seq_idx"]["seq_idx"].tolist()
    assert_equal_logits(model(ids, seq_idx=numbers).logits, expected)


@torch.no_grad()
def test_boundaries_by_the_name_of_fla(packed, assert_equal_logits):
    model, ids, expected = packed()
    cu = boundaries()["cu_seq_lens_q"]["cu_seq_lens_q"]
    assert_equal_logits(model(ids, cu_seqlens=cu).logits, expected)
    with pytest.raises(ValueError, match="cu_seq_lens_q and cu_seqlens are the same argument"):
        model(ids, cu_seqlens=cu, cu_seq_lens_q=cu)


@pytest.mark.parametrize("width", [5, 12])
def test_refuses_positions_of_other_tokens(small_model, random_ids, width):
    with pytest.raises(ValueError, match=rf"position_ids must be \(2, 10\), got \(1, {width}\)"):
        small_model()(random_ids(2, 10), position_ids=torch.arange(width)[None])


def test_refuses_packing_on_a_used_cache(packed, random_ids):
    model, ids, _ = packed()
    with torch.no_grad():
        cache = model(random_ids(1, 4)).cache
        with pytest.raises(ValueError, match="packed documents cannot go on from a cache"):
            model(ids, cache=cache, **boundaries()["cu_seq_lens_q"])


@torch.no_grad()
def test_position_ids_that_go_on_are_no_boundary(small_model, random_ids, assert_equal_logits):
    model, ids = small_model(), random_ids(2, 9)
    cache = DynamicCache(config=model.config)
    positions = torch.arange(9)[None]
    pieces = [model(ids[:, :4], position_ids=positions[:, :4], cache=cache).logits]
    pieces.append(model(ids[:, 4:], position_ids=positions[:, 4:], cache=cache).logits)
    assert_equal_logits(torch.cat(pieces, 1), model(ids, use_cache=False).logits)


@torch.no_grad()
def test_positions_beside_padding(small_model, random_ids, assert_equal_logits):
    """Restarts between real tokens begin documents; gaps that padding leaves, and positions of pads, do not."""
    model, ids = small_model(), random_ids(2, 10)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0, 1, 1, 1, 1]])
    positions = torch.tensor([[1, 1, 0, 1, 2, 3, 0, 1, 2, 1], [0, 1, 2, 3, 1, 1, 6, 7, 8, 9]])
    logits = model(ids, position_ids=positions, attention_mask=mask, use_cache=False).logits
    for row, real in ((0, slice(2, 6)), (0, slice(6, 9)), (1, [0, 1, 2, 3, 6, 7, 8, 9])):
        assert_equal_logits(logits[row, real], model(ids[row, real][None], use_cache=False).logits[0])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cu_seq_lens_q": torch.tensor([0, 6, 19])}, "cu_seq_lens_q and position_ids name different"),
        ({"seq_idx": torch.tensor([[0] * 8 + [1] * 11])}, "seq_idx and position_ids name different"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 6, 19]), "cu_seq_lens_k": torch.tensor([0, 5, 19])},
            "cu_seq_lens_q and cu_seq_lens_k differ",
        ),
    ],
)
def test_contradictory_boundaries(packed, changed, message):
    model, ids, _ = packed()
    with pytest.raises(ValueError, match=message):
        model(ids, **{**boundaries()["position_ids"], **changed})


@torch.no_grad()
def test_explicit_boundaries_beside_positions_of_the_whole_row(packed, assert_equal_logits):
    """Callers that know of no documents number the whole row; that contradicts nothing."""
    model, ids, expected = packed()
    positions = torch.arange(sum(LENGTHS))[None]
    assert_equal_logits(model(ids, position_ids=positions, **boundaries()["cu_seq_lens_q"]).logits, expected)


@pytest.mark.parametrize("told", ["position_ids", "seq_idx", "cu_seq_lens_q", "all"])
@pytest.mark.parametrize("checkpointing", [None, "reentrant", "not reentrant"])
def test_loss_and_gradients_equal_separate_runs(packed, told, checkpointing):
    model, ids, _ = packed()
    model.train()
    total = sum(
        model(d, labels=d, num_items_in_batch=torch.tensor(15)).loss for d in ids.split(LENGTHS, 1) if d.shape[1] > 1
    )
    total.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model.enable_input_require_grads()
    labels = ids.clone()
    labels[:, [0, *torch.tensor(LENGTHS).cumsum(0)[:-1]]] = -100  # nothing predicts a document's first token
    loss = model(ids, labels=labels, use_cache=False, **boundaries()[told]).loss
    torch.testing.assert_close(loss, total)
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[name], atol=1e-8, rtol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


UNEVEN = ((1, 40, 2, 7), (3, 1, 1, 45))


@pytest.mark.parametrize("masked", [False, True])
def test_documents_of_very_different_lengths(small_model, random_ids, assert_equal_logits, preset, masked):
    """They are not computed side by side; outputs, gradients and the cache are those of separate runs all the same."""
    model, ids = small_model(preset), random_ids(2, 50)
    index = torch.stack([torch.repeat_interleave(torch.arange(4), torch.tensor(n)) for n in UNEVEN])
    assert SequenceLayout.from_segments(index).groups
    mask = torch.ones_like(ids)
    if masked:
        mask[0, 10:13] = mask[1, 0] = 0
    out = model(ids, seq_idx=index, attention_mask=mask if masked else None, use_cache=True)
    weights = torch.randn(out.logits.shape, dtype=out.logits.dtype) * mask[..., None]
    grads = torch.autograd.grad((out.logits * weights).sum(), list(model.parameters()))
    alone, caches = [], []
    for row, lengths in enumerate(UNEVEN):
        for document, real in zip(ids[row].split(lengths), mask[row].bool().split(lengths), strict=True):
            logits = document.new_zeros(len(document), out.logits.shape[-1], dtype=out.logits.dtype)
            if real.any():
                single = model(document[real][None], use_cache=True)
                logits = logits.index_put((real.nonzero()[:, 0],), single.logits[0])
            alone.append(logits)
        caches.append(single.cache)
    alone = torch.cat(alone).view_as(out.logits)
    assert_equal_logits(out.logits * mask[..., None], alone)
    for mine, wanted in zip(grads, torch.autograd.grad((alone * weights).sum(), list(model.parameters())), strict=True):
        torch.testing.assert_close(mine, wanted, atol=1e-7, rtol=1e-5)
    with torch.no_grad():
        more = random_ids(2, 6, seed=3)
        together = model(more, cache=out.cache).logits
        for row, cache in enumerate(caches):
            assert_equal_logits(together[row : row + 1], model(more[row : row + 1], cache=cache).logits)
