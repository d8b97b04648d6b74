"""`AtlasConfig` fails early: unknown, wrong or contradictory fields raise and say what to do; the others survive saving."""

import json

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from atlas_hf import AtlasConfig, AtlasForCausalLM
from atlas_hf.modeling.configuration_atlas import CHOICES, PRESETS, SIZES

REFUSED = (ValueError, StrictDataclassError)
TINY = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 32}


def test_presets():
    for name, fields in PRESETS.items():
        config = getattr(AtlasConfig, name)()
        assert {field: getattr(config, field) for field in fields} == fields
    atlas = AtlasConfig.atlas()
    assert (atlas.rule, atlas.momentum, atlas.chunk_size, atlas.muon_interval) == ("muon", "restart", 8, 4)
    assert AtlasConfig().to_dict() == atlas.to_dict()
    assert AtlasConfig.atlas_plus_plus().memory == "gated"
    omeganet = AtlasConfig.omeganet()
    assert (omeganet.rule, omeganet.momentum, omeganet.chunk_size, omeganet.muon_interval) == ("gd", "none", 16, 1)
    assert (atlas.learning_rate_init, omeganet.learning_rate_init) == (0.1, 0.5)
    titans = AtlasConfig.titans()
    assert (titans.rule, titans.omega_window, titans.momentum) == ("gd", 1, "carry")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_can_be_overridden(name):
    preset = getattr(AtlasConfig, name)
    config = preset("340M", num_hidden_layers=2, chunk_size=32, memory="linear", rule="gd", muon_interval=1)
    assert (config.num_hidden_layers, config.hidden_size, config.chunk_size) == (2, 1024, 32)
    assert config.memory == "linear"
    with pytest.raises(ValueError, match="size='2B' is none of 170M, 340M, 760M"):
        preset("2B")


def test_sizes_are_the_papers():
    shapes = {name: tuple(size.values()) for name, size in SIZES.items()}
    assert shapes == {"170M": (12, 768, 16), "340M": (24, 1024, 16), "760M": (24, 1536, 16), "1.3B": (18, 2048, 8)}


def test_derived_fields():
    config = AtlasConfig(hidden_size=256, num_heads=8)
    assert (config.num_attention_heads, config.head_dim, config.intermediate_size) == (8, 32, 704)
    assert config.layer_types == ["atlas"] * config.num_hidden_layers
    assert 1 <= config.feature_rank <= 32
    assert AtlasConfig(hidden_size=16, num_attention_heads=8).feature_rank == 2
    assert AtlasConfig(feature_degree=1).feature_rank is None
    assert [AtlasConfig(chunk_size=b).muon_interval for b in (16, 6, 1)] == [4, 2, 1]
    assert AtlasConfig(rule="gd").muon_interval == 1
    assert AtlasConfig(hidden_size=30, num_attention_heads=4, head_dim=16).head_dim == 16
    assert AtlasConfig(hidden_size=30, num_attention_heads=4, head_dim=7).head_dim == 7
    assert config.num_heads == 8


@pytest.mark.parametrize(
    "make",
    [
        AtlasConfig,
        AtlasConfig.atlas,
        lambda **fields: AtlasConfig.from_dict(fields),
        lambda **fields: AutoConfig.for_model("atlas", **fields),
    ],
)
@pytest.mark.parametrize("unknown", [{"chunk_sise": 8}, {"rope_theta": 1e4}, {"top_k": 3}, {"num_key_value_heads": 2}])
def test_unknown_fields(make, unknown):
    (name, value), *_ = unknown.items()
    with pytest.raises(ValueError, match="unknown configuration field") as error:
        make(**unknown)
    assert f"{name}={value!r}" in str(error.value)
    assert "remove or correct them" in str(error.value)
    assert "chunk_size" in str(error.value)  # the fields there are


def test_unknown_field_in_a_file(tmp_path):
    AtlasConfig().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "omega_windows": 2}))
    for load in (AtlasConfig, AutoConfig):
        with pytest.raises(ValueError, match="omega_windows=2"):
            load.from_pretrained(tmp_path)


def test_what_transformers_writes_and_accepts(tmp_path):
    """Every key of a saved model's configuration, and arguments that transformers' own loading code passes."""
    model = AtlasForCausalLM(AtlasConfig(**TINY, num_labels=5, problem_type="regression", dtype="bfloat16"))
    model.config.auto_map = {"AutoConfig": "configuration_atlas.AtlasConfig"}
    model.save_pretrained(tmp_path)
    loaded = AtlasForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", output_hidden_states=True, dtype=torch.float32
    )
    loaded.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=False, output_attentions=False)
    assert (config.num_labels, config.architectures) == (5, ["AtlasForCausalLM"])
    assert AtlasConfig(**config.to_dict()).to_dict() == config.to_dict()


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    model = AtlasForCausalLM(AtlasConfig(**TINY))
    model.config.my_note = "a"
    for part in (model, model.config):
        with pytest.raises(ValueError, match=r"unknown configuration field\(s\) my_note='a': remove or correct them"):
            part.save_pretrained(tmp_path / "model")
    assert not list(tmp_path.rglob("*.*"))
    del model.config.my_note
    model.config.tokenizer_class, model.config.sep_token_id = "PreTrainedTokenizerFast", 4
    model.save_pretrained(tmp_path / "model")
    loaded = AutoConfig.from_pretrained(tmp_path / "model")
    assert (loaded.tokenizer_class, loaded.sep_token_id) == ("PreTrainedTokenizerFast", 4)


@pytest.mark.parametrize("name", PRESETS)
def test_round_trip(tmp_path, name):
    config = getattr(AtlasConfig, name)("170M", chunk_size=8, eos_token_id=[3, 4], residual_scale=0.25, hidden_rate=0.3)
    config.save_pretrained(tmp_path)
    for loaded in (AtlasConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is AtlasConfig
        for field in AtlasConfig.__annotations__:
            assert getattr(loaded, field) == getattr(config, field), field
    assert AtlasConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


def test_overriding_while_loading(tmp_path):
    AtlasConfig().save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, num_hidden_layers=3, chunk_size=8, num_heads=6)
    assert (config.num_hidden_layers, len(config.layer_types), config.chunk_size) == (3, 3, 8)
    assert config.num_attention_heads == 6
    with pytest.raises(ValueError, match="num_heads=6 and num_attention_heads=4 are the same field"):
        AutoConfig.from_pretrained(tmp_path, num_heads=6, num_attention_heads=4)
    with pytest.raises(StrictDataclassError, match=r"feature_rank=\d+ has no meaning with feature_degree=1"):
        AutoConfig.from_pretrained(tmp_path, feature_degree=1)


@pytest.mark.parametrize("field", CHOICES)
def test_choices(field):
    for value in CHOICES[field]:
        overrides = {"muon_interval": 1, **({"output_errors": "anchored"} if value == "linear" else {})}
        assert getattr(AtlasConfig(**{field: value, **overrides}), field) == value
    with pytest.raises(StrictDataclassError) as error:
        AtlasConfig(**{field: "nonsense"})
    assert f"{field}='nonsense' is not allowed" in str(error.value)
    assert ", ".join(CHOICES[field]) in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": "8"}, "hidden_size.*expected int"),
        ({"inner_norm": 1.0}, "inner_norm"),
        ({"hidden_size": 0}, "hidden_size=0 .*at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"head_dim": -1}, "head_dim=-1"),
        ({"omega_window": 0}, "omega_window=0"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"conv_kernel_size": 0}, "conv_kernel_size=0"),
        ({"memory_expansion": 0}, "memory_expansion=0"),
        ({"muon_interval": 0}, "muon_interval=0"),
        ({"newton_schulz_steps": -1}, "newton_schulz_steps=-1"),
        ({"hidden_rate": -0.1}, "hidden_rate=-0.1"),
        ({"hidden_rate": float("nan")}, "hidden_rate=nan"),
        ({"residual_scale": float("inf")}, "residual_scale=inf"),
        ({"initializer_range": -1.0}, "initializer_range=-1.0"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps=inf"),
        ({"hidden_act": "swish2"}, "hidden_act='swish2' is not allowed: choose one of .*silu"),
        ({"retention_init": 1.0}, "retention_init=1.0 .*between 0 and 1"),
        ({"learning_rate_init": 0.0}, "learning_rate_init=0.0"),
        ({"momentum_init": 1.5}, "momentum_init=1.5"),
        ({"window_gate_init": -0.5}, "window_gate_init=-0.5"),
        ({"feature_degree": 5}, "feature_degree=5 .*choose 1"),
        ({"feature_degree": 0}, "feature_degree=0"),
        ({"feature_rank": 0}, "feature_rank=0 .*between 1 and head_dim"),
        ({"feature_rank": 65}, "feature_rank=65 .*head_dim=64"),
        ({"max_position_embeddings": 0}, "max_position_embeddings=0"),
        # contradictions
        (
            {"hidden_size": 100, "num_attention_heads": 7},
            "hidden_size=100 is not a multiple of num_attention_heads=7",
        ),
        ({"feature_degree": 1, "feature_rank": 4}, "feature_rank=4 has no meaning with feature_degree=1: leave it out"),
        (
            {"memory": "linear", "rule": "muon", "output_errors": "exact"},
            "set output_errors='anchored', rule='gd' or a deep",
        ),
        ({"chunk_size": 16, "muon_interval": 32}, "muon_interval=32 does not divide chunk_size=16"),
        ({"chunk_size": 16, "muon_interval": 3}, "muon_interval=3 does not divide chunk_size=16.*choose a divisor"),
        ({"rule": "gd", "muon_interval": 2}, "muon_interval=2 has no meaning with rule='gd'.*set it to 1"),
        ({"memory": "linear", "rule": "gd", "residual_scale": 1.0}, "residual_scale=1.0 belongs to deep memories"),
        ({"layer_types": ["full_attention"] * 12}, "layer_types may only hold 'atlas'.*no attention layers.*leave"),
        ({"layer_types": ["atlas"] * 3}, "layer_types has 3 entries for num_hidden_layers=12"),
        ({"num_heads": 4, "num_attention_heads": 8}, "num_heads=4 and num_attention_heads=8 are the same field"),
        ({"num_heads": 4, "num_attention_heads": 12}, "num_heads=4 and num_attention_heads=12 are the same field"),
    ],
)
def test_refused(fields, message):
    with pytest.raises(REFUSED, match=f"(?s){message}"):
        AtlasConfig(**fields)


def test_changes_after_the_check_are_found(tmp_path):
    with pytest.raises(StrictDataclassError, match="chunk_size"):
        AtlasConfig(**TINY).chunk_size = "8"
    config = AtlasConfig(**TINY)
    config.momentum = "sometimes"
    with pytest.raises(
        StrictDataclassError, match="momentum='sometimes' is not allowed: choose one of carry, restart, none"
    ):
        config.save_pretrained(tmp_path)
    with pytest.raises(StrictDataclassError, match="momentum='sometimes'"):
        AtlasForCausalLM(config)


def test_no_field_is_a_generation_parameter():
    from transformers import GenerationConfig

    parameters = set(GenerationConfig().to_dict()) - {"use_cache", "pad_token_id", "bos_token_id", "eos_token_id"}
    assert not parameters & set(AtlasConfig.__annotations__)


def test_whole_numbers_are_numbers():
    assert AtlasConfig.atlas(hidden_rate=1, residual_scale=1).residual_scale == 1


@pytest.mark.parametrize("pad", [-1, 50])
def test_the_padding_token_has_an_embedding(pad):
    with pytest.raises(StrictDataclassError, match=f"pad_token_id={pad} is not allowed.*vocab_size=50"):
        AtlasConfig(vocab_size=50, pad_token_id=pad)


def test_presets_and_sizes_take_the_alias():
    assert AtlasConfig.atlas("340M", num_heads=8).num_attention_heads == 8
    with pytest.raises(ValueError, match="num_heads=8 and num_attention_heads=4 are the same field"):
        AtlasConfig.atlas(num_heads=8, num_attention_heads=4)


def test_a_misspelt_field_of_a_saved_configuration(tmp_path):
    AtlasConfig(hidden_size=32, num_attention_heads=2).save_pretrained(tmp_path)
    assert AtlasConfig.from_pretrained(tmp_path, chunk_size=4).chunk_size == 4
    with pytest.raises(ValueError, match="chunk_sise is not a field of AtlasConfig: did you mean chunk_size"):
        AtlasConfig.from_pretrained(tmp_path, chunk_sise=4)
