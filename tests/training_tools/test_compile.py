"""`torch.compile` of decoding with a static cache, and `torch.export`."""

import pytest
import torch
from transformers import StaticCache

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
