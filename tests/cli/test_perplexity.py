"""Baselines against hand calculations, the model's perplexity against its own logits."""

import itertools
import json
import math

import pytest
import torch

from atlas_hf import AtlasConfig, AtlasForCausalLM
from atlas_hf.training.errors import InputError
from atlas_hf.training.perplexity import bigram_perplexity, model_perplexity, unigram_perplexity
from atlas_hf.training.report import to_json


def test_bigram_is_add_a_tenth_over_the_targets_of_each_block():
    # Training text a b a b a c = 0 1 0 1 0 2: n(a,b)=2, n(a,c)=1, n(b,a)=2; firsts: a 3, b 2. V = 4.
    train = torch.tensor([0, 1, 0, 1, 0, 2])
    blocks = torch.tensor([[0, 1, 3], [2, 0, 2]])
    # Targets: b after a, d after b, a after c, c after a. The pair (d, c) across the blocks is none.
    probabilities = [2.1 / 3.4, 0.1 / 2.4, 0.1 / 0.4, 1.1 / 3.4]
    expected = math.exp(-sum(map(math.log, probabilities)) / 4)
    assert bigram_perplexity(train, blocks, vocab_size=4) == pytest.approx(expected, rel=1e-12)


def test_unigram_is_add_a_tenth_over_the_same_targets():
    train = torch.tensor([0, 1, 0, 1, 0, 2])
    blocks = torch.tensor([[0, 1, 3], [2, 0, 2]])
    probabilities = [2.1 / 6.4, 0.1 / 6.4, 3.1 / 6.4, 1.1 / 6.4]
    expected = math.exp(-sum(map(math.log, probabilities)) / 4)
    assert unigram_perplexity(train, blocks, vocab_size=4) == pytest.approx(expected, rel=1e-12)


def test_bigram_equals_a_count_of_every_pair():
    generator = torch.Generator().manual_seed(3)
    train = torch.randint(0, 17, (500,), generator=generator)
    blocks = torch.randint(0, 17, (9, 11), generator=generator)
    tokens, total, num = train.tolist(), 0.0, 0
    for row in blocks.tolist():
        for a, b in itertools.pairwise(row):
            pair = sum(tokens[i] == a and tokens[i + 1] == b for i in range(499))
            total -= math.log((pair + 0.1) / (sum(token == a for token in tokens[:-1]) + 0.1 * 17))
            num += 1
    assert bigram_perplexity(train, blocks, 17) == pytest.approx(math.exp(total / num), rel=1e-12)


def test_uniform_baselines_without_any_counted_pair():
    nothing_seen = torch.tensor([5, 5])
    blocks = torch.tensor([[0, 1, 2, 3]])
    assert bigram_perplexity(nothing_seen, blocks, 8) == pytest.approx(8.0)


def test_model_perplexity_is_that_of_its_logits_whatever_the_batch():
    config = AtlasConfig(
        vocab_size=11, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, chunk_size=4, initializer_range=0.5
    )
    model = AtlasForCausalLM(config).train()
    blocks = torch.randint(0, 11, (5, 9))
    with torch.no_grad():
        log_probabilities = model(blocks).logits[:, :-1].double().log_softmax(-1)
    expected = math.exp(-log_probabilities.gather(-1, blocks[:, 1:, None]).mean().item())
    for batch_size in (1, 2, 5):
        assert model_perplexity(model, blocks, batch_size) == pytest.approx(expected, rel=1e-5)
    assert model.training


def test_the_first_token_of_a_packed_document_is_nobodys_target():
    config = AtlasConfig(vocab_size=11, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, chunk_size=4)
    model = AtlasForCausalLM(config)
    blocks, train = torch.randint(0, 11, (3, 9)), torch.randint(0, 11, (50,))
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3], [0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
    changed = blocks.clone()
    changed[1] = (changed[1] + 1) % 11
    for measure in (
        lambda b, p=None: model_perplexity(model, b, 2, p),
        lambda b, p=None: unigram_perplexity(train, b, 11, p),
        lambda b, p=None: bigram_perplexity(train, b, 11, p),
    ):
        assert measure(changed, positions) == measure(blocks, positions)
        assert measure(changed) != measure(blocks)
    with torch.no_grad():
        log_probabilities = model(blocks, position_ids=positions).logits[:, :-1].double().log_softmax(-1)
    targets = log_probabilities.gather(-1, blocks[:, 1:, None])[..., 0][positions[:, 1:] != 0]
    assert len(targets) == 14
    assert model_perplexity(model, blocks, 2, positions) == pytest.approx(math.exp(-targets.mean().item()), rel=1e-5)


@pytest.mark.parametrize(
    ("blocks", "positions"),
    [(torch.zeros(0, 5, dtype=int), None), (torch.ones(3, 1, dtype=int), None), (torch.ones(2, 4), torch.zeros(2, 4))],
)
def test_nothing_to_predict(blocks, positions):
    config = AtlasConfig(vocab_size=11, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, chunk_size=4)
    blocks, train = blocks.long(), torch.randint(0, 11, (50,))
    for measure in (
        lambda: model_perplexity(AtlasForCausalLM(config), blocks, 2, positions),
        lambda: unigram_perplexity(train, blocks, 11, positions),
        lambda: bigram_perplexity(train, blocks, 11, positions),
    ):
        with pytest.raises(InputError, match=r"the held-out text of shape \(\d, \d\) has no token to predict"):
            measure()


def test_results_are_json_whatever_they_are():
    results = {"perplexity": math.inf, "losses": [(1, math.nan), (2, 0.5)], "steps": 3, "name": None}
    written = json.loads(to_json(results), parse_constant=pytest.fail)
    assert written == {"perplexity": None, "losses": [[1, None], [2, 0.5]], "steps": 3, "name": None}
