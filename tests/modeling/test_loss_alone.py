"""The loss without the logits of all tokens: the same number, the same gradients, less memory."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from atlas_hf.modeling import linear_loss


@pytest.fixture(autouse=True)
def _few_at_once(monkeypatch):
    monkeypatch.setattr(linear_loss, "TOKENS_AT_ONCE", 5)


def loss_and_gradients(model, ids, **arguments):
    model.zero_grad()
    out = model(ids, **arguments)
    out.loss.backward()
    return out, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"attention_mask": [[1] * 11, [0, 0, 0] + [1] * 8]},
        {"num_items_in_batch": 7},
        {"ignore_index": 5},
        {"shift_labels": [list(range(3, 14)), [-100] * 4 + list(range(7))]},
    ],
    ids=lambda extra: next(iter(extra), "plain"),
)
def test_the_same_loss_and_gradients(small_model, random_ids, extra, tied):
    model, ids = small_model("omeganet", tie_word_embeddings=tied), random_ids(2, 11)
    extra = {name: torch.tensor(value) if isinstance(value, list) else value for name, value in extra.items()}
    labels = ids.clone()
    labels[0, 2:4] = -100
    labels[1, 7] = 5
    if "ignore_index" in extra:
        labels[0, 2:4] = 5
    wanted, wanted_gradients = loss_and_gradients(model, ids, labels=labels, **extra)
    found, gradients = loss_and_gradients(model, ids, labels=labels, skip_logits=True, **extra)
    assert found.logits is None
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-6, atol=0)
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in wanted_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        again = model(ids, labels=labels, skip_logits=True, **extra).loss
    torch.testing.assert_close(again, wanted.loss.detach(), rtol=1e-6, atol=0)


def test_without_any_label_zero(small_model, random_ids):
    model, ids = small_model("omeganet"), random_ids(1, 6)
    out, gradients = loss_and_gradients(model, ids, labels=torch.full_like(ids, -100), skip_logits=True)
    assert out.loss == 0
    assert all(not g.any() for g in gradients.values())


def test_no_tensor_has_all_logits(small_model, random_ids):
    model, ids = small_model("omeganet", vocab_size=500), random_ids(2, 11)
    sizes = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))
            return out

    largest = {}
    for skip in (False, True):
        del sizes[:]
        with Record():
            model(ids, labels=ids, skip_logits=skip).loss.backward()
        largest[skip] = max(sizes)
    assert largest[False] >= 2 * 11 * 500
    assert largest[True] <= 500 * 16  # the weights themselves


def test_a_head_that_is_no_plain_matrix(small_model, random_ids):
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model, ids = small_model("omeganet"), random_ids(1, 9)
    head = Scaled(16, 67, bias=False).double()
    model.lm_head = head
    wanted = model(ids, labels=ids).loss
    torch.testing.assert_close(model(ids, labels=ids, skip_logits=True).loss, wanted, rtol=1e-6, atol=0)


def test_refusals(small_model, random_ids):
    model, ids = small_model("omeganet"), random_ids(1, 5)
    for arguments in ({}, {"labels": ids, "logits_to_keep": 2}):
        with pytest.raises(ValueError, match=r"skip_logits=True gives .* and no logits: pass labels"):
            model(ids, skip_logits=True, **arguments)
    model.loss_function = lambda **_: 0
    with pytest.raises(ValueError, match="set no loss_function"):
        model(ids, labels=ids, skip_logits=True)


def test_hooks_of_the_head_are_called():
    """They may fetch its weight: here it comes for the time of the head's own call."""
    head, x, targets = torch.nn.Linear(6, 11, bias=False), torch.randn(5, 6), torch.randint(0, 11, (5,))
    expected = linear_loss.linear_cross_entropy(head, x, targets)
    whole = head.weight.data
    head.weight.data = torch.empty(0)

    def fetch(module, args):
        module.weight.data = whole

    head.register_forward_pre_hook(fetch)
    torch.testing.assert_close(linear_loss.linear_cross_entropy(head, x, targets), expected)
