"""`torch.compile` of decoding with a static cache, and `torch.export`."""

from itertools import pairwise

import pytest
import torch
from transformers import DynamicCache, StaticCache

FORMS = {
    "degree 1": {"feature_degree": 1, "feature_rank": None},
    "gated": {"memory": "gated", "feature_degree": 1, "feature_rank": None},
    "gd": {"rule": "gd", "muon_interval": 1, "momentum": "carry", "feature_degree": 1, "feature_rank": None},
    "features": {},
}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@torch.no_grad()
def decode(model, step, ids, prompts=(1, 5, 9), num_steps=6):
    """Largest error of compiled steps after prompts of several lengths, each on a cache of its own."""
    expected, worst = model(ids, use_cache=False).logits, 0.0
    for prompt in prompts:
        cache = StaticCache(config=model.config, max_cache_len=64)
        model(ids[:, :prompt], cache=cache)
        for t in range(prompt, prompt + num_steps):
            logits = step(ids[:, t : t + 1], cache=cache).logits
            worst = max(worst, (logits - expected[:, t : t + 1]).abs().max().item())
        assert int(cache.get_seq_length()) == prompt + num_steps
    return worst, expected.abs().max().item()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_decoding_is_one_graph(tiny_model, random_rows, form):
    """Full graph, and the same one for all steps and prompt lengths: chunk ends and first steps included."""
    model = tiny_model(num_hidden_layers=1, **FORMS[form]).eval()
    ids = torch.tensor(random_rows([16, 16]))
    step = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        error, scale = decode(model, step, ids)
    assert error < 1e-5 * scale


@torch.no_grad()
def test_a_chunk_is_folded_in_a_branch(tiny_model, random_rows):
    """On a CPU the graph of a step folds a chunk where one ends only, one branch a layer; a step before keeps its memory."""
    model, ids, branches = tiny_model(num_hidden_layers=2).eval(), torch.tensor(random_rows([16, 16])), []

    def count(graph, inputs):
        branches.append(sum(node.target is torch.ops.higher_order.cond for node in graph.graph.nodes))
        return graph.forward

    step = torch.compile(model.forward, fullgraph=True, backend=count)
    cache, expected = DynamicCache(config=model.config), model(ids, use_cache=False).logits
    for seen in (slice(6), slice(6, 7)):
        model(ids[:, seen], cache=cache)
    kept, firsts = [], []
    for t in range(7, 16):
        states = cache.layers[0].get_states()
        kept.append((states, {name: x.clone() for name, x in states.items()}))
        logits = step(ids[:, t : t + 1], cache=cache).logits
        torch.testing.assert_close(logits, expected[:, t : t + 1], rtol=1e-4, atol=1e-5)
    assert set(branches) == {2}
    for states, before in kept:
        torch.testing.assert_close(states, before, rtol=0, atol=0)
        firsts.append(before["matrix_0"])
    assert any(not torch.equal(a, b) for a, b in pairwise(firsts))


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch")  # of the compiler's own
@pytest.mark.parametrize("padded", [False, True])
def test_generated_code(tiny_model, random_rows, padded):
    """By inductor, over chunk ends that rows reach together or, behind padding, at different tokens."""
    model, ids = tiny_model(num_hidden_layers=1).eval(), torch.tensor(random_rows([16, 16]))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :3] = mask[0, 9] = 0
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    step, cache = torch.compile(model.forward, fullgraph=True), StaticCache(config=model.config, max_cache_len=32)
    model(ids[:, :6], attention_mask=mask[:, :6], cache=cache)
    for t in range(6, 16):
        here = slice(t, t + 1)
        logits = step(ids[:, here], attention_mask=mask[:, here] if padded else None, cache=cache).logits
        real = mask[:, here].bool()
        torch.testing.assert_close(logits[real], expected[:, here][real], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by the compiler itself
def test_compiled_training_at_several_lengths(tiny_model, random_rows):
    """Loss and gradients of the whole model, compiled with its defaults but for code generation."""
    model = tiny_model(num_hidden_layers=1)
    compiled = torch.compile(model, backend="aot_eager")
    for length in (5, 9, 14):
        ids, found = torch.tensor(random_rows([length, length])), []
        for form in (model, compiled):
            model.zero_grad()
            loss = form(ids, labels=ids, use_cache=False).loss
            loss.backward()
            found.append((loss.detach(), [p.grad for p in model.parameters()]))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_a_prompt_in_pieces_on_a_static_cache(tiny_model, random_rows):
    """States keep their form and addresses through prompts, single tokens and further turns."""
    model, ids = tiny_model().eval(), torch.tensor(random_rows([20, 20]))
    expected = model(ids, use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=32)
    addresses, seen = None, 0
    for size in (1, 1, 6, 1, 4, 2, 1, 1, 3):
        logits = model(ids[:, seen : seen + size], cache=cache).logits
        torch.testing.assert_close(logits, expected[:, seen : seen + size], rtol=1e-4, atol=1e-5)
        seen += size
        found = {name: state.data_ptr() for name, state in cache.layers[1].states.items()}
        assert addresses in (None, found)
        addresses = found
    assert seen == 20


@pytest.mark.slow
def test_export_of_a_fixed_length_and_any_batch(tiny_model, random_rows, tmp_path):
    model, ids = tiny_model(num_hidden_layers=1).eval(), torch.tensor(random_rows([7, 7]))
    shapes = {"input_ids": {0: torch.export.Dim.AUTO}, "use_cache": None}
    program = torch.export.export(model, (ids,), {"use_cache": False}, dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "atlas.pt2")
    loaded = torch.export.load(tmp_path / "atlas.pt2").module()
    other = torch.tensor(random_rows([7, 7, 7], seed=5))
    with torch.no_grad():
        torch.testing.assert_close(loaded(other, use_cache=False).logits, model(other, use_cache=False).logits)


def test_export_of_any_length_is_refused(tiny_model, random_rows):
    model, ids = tiny_model(num_hidden_layers=1).eval(), torch.tensor(random_rows([9, 9]))
    length = torch.export.Dim("length", min=2, max=64)
    with pytest.raises(ValueError, match=r"torch\.export of Atlas needs a fixed number of tokens"):
        torch.export.export(
            model, (ids,), {"use_cache": False}, dynamic_shapes={"input_ids": {1: length}, "use_cache": None}
        )
