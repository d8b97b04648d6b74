"""What is saved comes back bit for bit, whole, in every way transformers has of loading; what does not fit is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from atlas_hf import AtlasForCausalLM, AtlasForTokenClassification
from atlas_hf.modeling.memory_layer import AtlasMemory

WEIGHTS = "model.safetensors"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def assert_equal_bits(actual, expected):
    """Every tensor of `state_dict` and every buffer, in dtype and bits."""
    pairs = [(actual.state_dict(), expected.state_dict())]
    pairs.append((dict(actual.named_buffers()), dict(expected.named_buffers())))
    for found, wanted in pairs:
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert found[name].dtype == tensor.dtype, name
            assert found[name].device == tensor.device, name
            assert torch.equal(bits(found[name]), bits(tensor)), name


def load_whole(folder, **arguments):
    """Load and check that every weight came from the file, nothing in it was left over, and no start was drawn."""
    before = torch.get_rng_state()
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **arguments)
    assert {name: list(found) for name, found in info.items()} == {kind: [] for kind in info}
    assert torch.equal(torch.get_rng_state(), before)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_bits(small_model, random_ids, tmp_path, variant, dtype):
    model = small_model(variant, dtype=torch.float32)
    model.save_pretrained(tmp_path / "first")
    model = load_whole(tmp_path / "first", dtype=dtype)
    model.save_pretrained(tmp_path / "second")
    loaded = load_whole(tmp_path / "second", dtype=dtype)
    assert_equal_bits(loaded, model)
    assert_equal_bits(load_whole(tmp_path / "second", dtype="auto"), model)
    ids = random_ids(2, 9)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("arguments", [{}, {"device_map": "cpu"}, {"device_map": {"": "cpu"}}])
def test_sharded_and_mapped(small_model, tmp_path, tied, arguments):
    model = small_model(dtype=torch.float32, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert ("lm_head.weight" in index["weight_map"]) is not tied
    loaded = load_whole(tmp_path, **arguments)
    assert_equal_bits(loaded, model)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied


def test_meta_device(small_model, small_config, random_ids, variant):
    """A model made without memory for its weights takes those of another, and has nothing beside them."""
    model = small_model(variant, dtype=torch.float32)
    with torch.device("meta"):
        empty = AtlasForCausalLM(small_config(variant)).eval()
    assert all(tensor.is_meta for tensor in [*empty.parameters(), *empty.buffers()])
    for module in empty.modules():
        assert not any(isinstance(value, torch.Tensor) for value in vars(module).values()), type(module).__name__
    empty.load_state_dict(model.state_dict(), assign=True)
    ids = random_ids(2, 9)
    with torch.no_grad():
        assert torch.equal(empty(ids).logits, model(ids).logits)


def test_every_weight_is_drawn_when_there_is_no_checkpoint(small_config, variant):
    """From poisoned memory: a weight without a start would keep the poison."""
    with torch.device("meta"):
        model = AtlasForCausalLM(small_config(variant))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model.init_weights()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("change", "multiple", "size"), [(3, None, 70), (-5, None, 62), (3, 8, 72), (0, 64, 128)])
def test_resized_vocabulary(small_model, random_ids, tmp_path, tied, change, multiple, size):
    model, ids = small_model(dtype=torch.float32, tie_word_embeddings=tied), random_ids(2, 9) % 60
    with torch.no_grad():
        before = model(ids).logits
    model.resize_token_embeddings(67 + change, pad_to_multiple_of=multiple, mean_resizing=False)
    assert model.config.vocab_size == model.vocab_size == size
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    output = model(ids, labels=ids)
    assert output.logits.shape[-1] == size
    kept = min(size, 67)
    torch.testing.assert_close(output.logits[..., :kept].detach(), before[..., :kept])
    output.loss.backward()
    model.save_pretrained(tmp_path)
    loaded = load_whole(tmp_path)
    assert_equal_bits(loaded, model)
    assert loaded.generate(ids, max_new_tokens=4, do_sample=False).max() < size


MISFITS = {
    "vocab_size": (66, r"vocab_size=66, but the weights have 67 \(model.embed_tokens.weight\)"),
    "hidden_size": (32, r"hidden_size=32, but the weights have 16 \(model.embed_tokens.weight\)"),
    "intermediate_size": (20, "intermediate_size=20, but the weights have 24"),
    "num_hidden_layers": (3, "num_hidden_layers=3, but the weights have 2"),
    "num_attention_heads": (4, "num_attention_heads=4, but the weights have 2"),
    "head_dim": (4, "head_dim=4, but the weights have 8"),
    "conv_kernel_size": (3, "conv_kernel_size=3, but the weights have 4"),
    "memory": ("gated", "memory='gated', but the weights have 'mlp'"),
    "memory_expansion": (3, "memory_expansion=3, but the weights have 2"),
    "omega_window": (2, "omega_window=2, but the weights have 3"),
    "feature_degree": (3, "feature_degree=3, but the weights have 2"),
    "feature_rank": (2, "feature_rank=2, but the weights have 3"),
    "residual_scale": (0.5, "residual_scale=0.5, but the weights have 0 "),
}


@pytest.mark.parametrize("field", MISFITS)
def test_a_configuration_that_does_not_fit_is_refused_by_field(small_model, tmp_path, field):
    value, message = MISFITS[field]
    small_model(dtype=torch.float32).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert field in config
    (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(RuntimeError, match=message) as refusal:
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "correct config.json" in str(refusal.value)
    assert str(refusal.value).count(", but the weights have") <= 2, "fields that do fit are named too"


@pytest.mark.parametrize(
    ("variant", "fields", "message"),
    [
        ("atlas_plus_plus", {"memory": "mlp"}, "memory='mlp', but the weights have 'gated'"),
        ("linear", {"memory": "mlp"}, "memory='mlp', but the weights have 'linear'"),
        ("atlas", {"num_hidden_layers": 1}, "num_hidden_layers=1, but the weights have 2"),
        ("atlas", {"feature_degree": 1, "feature_rank": None}, "feature_degree=1, but the weights have 'more than 1'"),
        ("hebbian", {"residual_scale": 0.0}, "residual_scale=0.0, but the weights have 'another than 0'"),
        ("full_features", {"tie_word_embeddings": False}, "tie_word_embeddings=False, but the weights have no lm_head"),
    ],
)
def test_more_or_fewer_weights_than_configured(small_model, tmp_path, variant, fields, message):
    small_model(variant, dtype=torch.float32).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(RuntimeError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_what_does_not_fit_may_be_started_anew_on_request(small_model, tmp_path):
    model = small_model(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    loaded = AtlasForCausalLM.from_pretrained(tmp_path, vocab_size=40, ignore_mismatched_sizes=True)
    assert loaded.model.embed_tokens.weight.shape == (40, 16)
    assert torch.equal(loaded.model.layers[0].memory.gate_bias, model.model.layers[0].memory.gate_bias)


def test_other_misfits_name_the_weight(small_model, tmp_path):
    small_model(dtype=torch.float32).save_pretrained(tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    save_file({**weights, "model.norm.weight": torch.ones(5)}, tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(RuntimeError, match=r"model.norm.weight has shape \[5\], wanted \[16\]"):
        AtlasForCausalLM.from_pretrained(tmp_path)


def test_a_new_head_is_no_misfit(small_model, tmp_path):
    small_model(dtype=torch.float32).save_pretrained(tmp_path)
    loaded = AtlasForTokenClassification.from_pretrained(tmp_path, num_labels=4)
    assert loaded.score.weight.shape == (4, 16)
    loaded.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"num_labels=3, but the weights have 4 \(score.weight\)"):
        AtlasForTokenClassification.from_pretrained(tmp_path, num_labels=3)
    assert isinstance(loaded.model.layers[0].memory, AtlasMemory)
