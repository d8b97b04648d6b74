"""A memory kept in RAM or in a file goes on exactly where it stopped, and only with the model that it belongs to."""

import copy
import pickle

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, StaticCache

from atlas_hf import AtlasForCausalLM, copy_memory, load_memory, save_memory

ROUNDING = {"rtol": 1e-9, "atol": 1e-9}
GREEDY = {"do_sample": False, "max_new_tokens": 14}


@torch.no_grad()
def read(model, ids, mask=None):
    cache = DynamicCache(config=model.config)
    model(ids, attention_mask=mask, cache=cache)
    return cache


def states_of(cache):
    return [{name: state.clone() for name, state in layer.get_states().items()} for layer in cache.layers]


def assert_equal_states(actual, expected):
    for found, wanted in zip(actual, expected, strict=True):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@torch.no_grad()
@pytest.mark.parametrize("prompt", [1, 6, 13])
def test_a_file_goes_on_as_if_nothing_had_been_between(small_model, random_ids, tmp_path, variant, prompt):
    """From a prefill and from the midst of decoding, with rows of different lengths. The states are equal bit for bit; the
    continuation to rounding, because a product may sum in another order where its operands lie differently in memory.
    """
    model, ids = small_model(variant, dtype=torch.float64), random_ids(2, 24)
    mask = torch.ones(2, prompt)
    mask[1, : prompt // 2] = 0
    cache = read(model, ids[:, :prompt], mask)
    for step in range(prompt, prompt + 3):
        save_memory(cache, tmp_path / "memory.safetensors")
        loaded = load_memory(tmp_path / "memory.safetensors", model)
        assert loaded.get_seq_length() == cache.get_seq_length() == step
        assert_equal_states(states_of(loaded), states_of(cache))
        expected = model(ids[:, step : step + 1], cache=cache).logits
        torch.testing.assert_close(model(ids[:, step : step + 1], cache=loaded).logits, expected, **ROUNDING)
    rest = ids[:, prompt + 3 :]
    torch.testing.assert_close(model(rest, cache=loaded).logits, model(rest, cache=cache).logits, **ROUNDING)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_read_once_and_ask_later(small_model, random_ids, tmp_path, preset, dtype):
    """By another instance of the model, after writing the model too; several questions about one document."""
    small_model(preset, dtype=torch.float32, initializer_range=0.2).save_pretrained(tmp_path / "model")
    model = AtlasForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype).eval()
    document, path = random_ids(1, 37), tmp_path / "memory.safetensors"
    save_memory(read(model, document), path, model)
    reader = AtlasForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype).eval()
    for seed in (3, 4):
        question = random_ids(1, 5, seed=seed)
        whole = torch.ones(1, 42, dtype=torch.long)
        answer = reader.generate(question, attention_mask=whole, cache=load_memory(path, reader), **GREEDY)
        cache = read(model, document)
        assert torch.equal(answer, model.generate(question, attention_mask=whole, cache=cache, **GREEDY))
        if dtype == torch.float32:  # in bfloat16 the pieces' rounding may turn a close choice
            uninterrupted = model.generate(torch.cat([document, question], 1), **GREEDY)
            assert torch.equal(answer, uninterrupted[:, 37:])


REFUSED = {
    "chunk_size": {"chunk_size": 8},
    "rule": {"rule": "gd"},
    "hidden_size": {"hidden_size": 32, "head_dim": 8},
    "num_hidden_layers": {"num_hidden_layers": 3},
    "inner_norm": {"inner_norm": False},
    "hidden_rate": {"hidden_rate": 0.2},
    "momentum": {"momentum": "none"},
    "vocab_size": {"vocab_size": 68},
}


@pytest.mark.parametrize("field", REFUSED)
def test_another_models_memory_is_refused_by_field(small_model, random_ids, tmp_path, field):
    model, other = small_model(), small_model(**REFUSED[field])
    cache = read(model, random_ids(1, 6))
    save_memory(cache, tmp_path / "memory.safetensors")
    value = getattr(model.config, field)
    message = rf"{field}={value!r} \(this model: {getattr(other.config, field)!r}\).*: go on with that model"
    with pytest.raises(ValueError, match=message) as refusal:
        load_memory(tmp_path / "memory.safetensors", other)
    assert "memory.safetensors was written by another model" in str(refusal.value)
    if field != "num_hidden_layers":
        for snapshot in (cache, copy_memory(cache)):
            with pytest.raises(ValueError, match=message):
                other(random_ids(1, 1), cache=snapshot)
    with pytest.raises(ValueError, match=message):
        save_memory(cache, tmp_path / "other.safetensors", other)
    assert [path.name for path in tmp_path.iterdir()] == ["memory.safetensors"]


def test_another_dtypes_memory_is_refused(small_model, random_ids, tmp_path):
    cache = read(small_model(dtype=torch.float32), random_ids(1, 6))
    save_memory(cache, tmp_path / "memory.safetensors")
    other = small_model(dtype=torch.bfloat16)
    message = r"dtype='float32' \(this model: 'bfloat16'\)"
    with pytest.raises(ValueError, match=message):
        load_memory(tmp_path / "memory.safetensors", other)
    with pytest.raises(ValueError, match=message):
        other(random_ids(1, 1), cache=cache)


def test_other_weights_are_refused_where_the_file_knows_them(small_model, random_ids, tmp_path):
    model, other = small_model(), small_model(seed=7)
    cache = read(model, random_ids(1, 6))
    save_memory(cache, tmp_path / "memory.safetensors", model)
    load_memory(tmp_path / "memory.safetensors", model)
    with pytest.raises(ValueError, match="by a model of other weights"):
        load_memory(tmp_path / "memory.safetensors", other)


@torch.no_grad()
def test_a_compiled_models_memory_is_saved_with_the_model(small_model, random_ids, tmp_path, monkeypatch):
    model, ids, path = small_model(num_hidden_layers=1), random_ids(1, 9), tmp_path / "memory.safetensors"
    cache = DynamicCache(config=model.config)
    with monkeypatch.context() as patch:
        patch.setattr("atlas_hf.modeling.modeling_atlas.check_cache", lambda *cache: None)  # as in a graph
        model(ids[:, :6], cache=cache)
    with pytest.raises(ValueError, match=r"does not say which model filled it.*: pass the model too"):
        save_memory(cache, path)
    save_memory(cache, path, model)
    assert torch.equal(model(ids[:, 6:], cache=load_memory(path, model)).logits, model(ids[:, 6:], cache=cache).logits)
    with pytest.raises(ValueError, match=r"chunk_size=4 \(this model: 8\)"):
        load_memory(path, small_model(chunk_size=8))


class WithScales(torch.nn.Linear):
    """Its state has a tensor that is no attribute, as a layer in 8 bits has."""

    scale = 1.0

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "SCB"] = torch.full((3,), self.scale)


def test_states_that_are_no_attributes_are_weights_too(small_model, random_ids, tmp_path):
    model, path = small_model(), tmp_path / "memory.safetensors"
    cache = read(model, random_ids(1, 6))
    quantised = WithScales(16, 16, bias=False, dtype=torch.float64)
    quantised.weight = model.model.layers[0].memory.q_proj.weight
    model.model.layers[0].memory.q_proj = quantised
    save_memory(cache, path, model)
    load_memory(path, model)
    quantised.scale = 2.0
    with pytest.raises(ValueError, match="by a model of other weights"):
        load_memory(path, model)


def test_fields_that_do_not_touch_the_memory_may_differ(small_model, random_ids, tmp_path):
    cache = read(small_model(), random_ids(1, 6))
    save_memory(cache, tmp_path / "memory.safetensors")
    load_memory(tmp_path / "memory.safetensors", small_model(newton_schulz_steps=3, max_position_embeddings=9))


def test_files_that_hold_no_memory(small_model, random_ids, tmp_path):
    model, path = small_model(), tmp_path / "memory.safetensors"
    with pytest.raises(FileNotFoundError):
        load_memory(path, model)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"memory.safetensors is no safetensors file"):
        load_memory(path, model)
    save_file({"x": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="holds no memory"):
        load_memory(path, model)
    with pytest.raises(ValueError, match="has seen no tokens"):
        save_memory(DynamicCache(config=model.config), path)
    with pytest.raises(TypeError, match="DynamicCache holds no memory"):
        save_memory(DynamicCache(), path)
    save_memory(read(model, random_ids(1, 6)), path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    for changed, message in (({"version": "0"}, "has version 0"), ({"origin": "{}"}, "does not have the fingerprint")):
        save_file(load_file(path), tmp_path / "changed.safetensors", metadata | changed)
        with pytest.raises(ValueError, match=message):
            load_memory(tmp_path / "changed.safetensors", model)
    save_file(
        load_file(path), tmp_path / "changed.safetensors", {n: x for n, x in metadata.items() if n != "positions"}
    )
    with pytest.raises(ValueError, match=r"holds no memory \(its header lacks positions\)"):
        load_memory(tmp_path / "changed.safetensors", model)
    with pytest.raises(IsADirectoryError, match=r"is a folder: name a file in it"):
        save_memory(read(model, random_ids(1, 6)), tmp_path)
    for wrong in (None, "a name"):
        with pytest.raises(TypeError, match=f"{type(wrong).__name__} is no Atlas model"):
            load_memory(path, wrong)
    with pytest.raises(TypeError, match="str is no Atlas model"):
        save_memory(read(model, random_ids(1, 6)), path, "a name")
    with pytest.raises(TypeError, match="Linear is no Atlas model"):
        load_memory(path, torch.nn.Linear(2, 2))


@torch.no_grad()
@pytest.mark.parametrize("copied", [copy_memory, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@pytest.mark.parametrize("static", [False, True])
def test_snapshots_are_independent(small_model, random_ids, preset, copied, static):
    model, ids = small_model(preset), random_ids(2, 14)
    cache = StaticCache(model.config, max_cache_len=32) if static else DynamicCache(config=model.config)
    model(ids[:, :5], cache=cache)
    model(ids[:, 5:6], cache=cache)
    snapshot = copied(cache)
    kept = states_of(snapshot)
    expected = [model(ids[:, t : t + 1], cache=cache).logits for t in range(6, 14)]
    assert_equal_states(states_of(snapshot), kept)
    assert int(snapshot.get_seq_length()) == 6
    if copied is not copy_memory:  # whose tensors are shared until a forward pass replaces them
        for state in copied(snapshot).layers[0].states.values():
            state.zero_()
    for again in (copied(snapshot), snapshot):
        assert all(torch.equal(model(ids[:, t : t + 1], cache=again).logits, expected[t - 6]) for t in range(6, 14))


def test_a_snapshot_of_a_graph_is_part_of_it(small_model, random_ids):
    model, ids = small_model(), random_ids(1, 9)
    first = model(ids[:, :5], use_cache=True).cache
    gradients = []
    for cache in (copy_memory(first), copy.deepcopy(first), first):
        model(ids[:, 5:], cache=cache).logits.sum().backward(retain_graph=True)
        gradients.append(model.model.embed_tokens.weight.grad.clone())
        model.zero_grad()
    assert gradients[0][ids[0, :5]].abs().min() > 0
    assert torch.equal(gradients[0], gradients[2])
    assert torch.equal(gradients[1], gradients[2])


@pytest.mark.parametrize("how", ["assisted", "prompt lookup", "assisted by itself"])
def test_speculative_decoding_from_a_snapshot(small_model, random_ids, tmp_path, preset, how):
    """Equal to greedy, from a copy and from a file, and without touching what was kept."""
    model = small_model(preset)
    document, question = random_ids(1, 6).repeat(1, 3), random_ids(1, 6)
    kept = read(model, document)
    save_memory(kept, tmp_path / "memory.safetensors")
    before = states_of(kept)
    arguments = {"attention_mask": torch.ones(1, 24, dtype=torch.long), **GREEDY}
    expected = model.generate(torch.cat([document, question], 1), **GREEDY)[:, 18:]
    assert torch.equal(model.generate(question, cache=copy_memory(kept), **arguments), expected)
    if how == "prompt lookup":
        arguments["prompt_lookup_num_tokens"] = 3
    else:
        helper = model if how.endswith("itself") else small_model(preset, seed=5, num_hidden_layers=1)
        arguments["assistant_model"] = helper
    for cache in (copy_memory(kept), load_memory(tmp_path / "memory.safetensors", model)):
        assert torch.equal(model.generate(question, cache=cache, **arguments), expected)
    assert_equal_states(states_of(kept), before)
    assert kept.get_seq_length() == 18


def test_refuses_places_that_are_not_there(small_model, random_ids, tmp_path):
    model = small_model()
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*missing to save the memory in"):
        save_memory(read(model, random_ids(1, 5)), tmp_path / "missing" / "memory.safetensors")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        load_memory(tmp_path, model)
