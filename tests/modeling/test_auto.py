"""The Auto factories and pipelines know Atlas after `import atlas_hf`; the modeling files travel with a checkpoint."""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DynamicCache,
)
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _BaseAutoModelClass

import atlas_hf
from atlas_hf import (
    AtlasConfig,
    AtlasForCausalLM,
    AtlasForSequenceClassification,
    AtlasForTokenClassification,
    AtlasModel,
)

MODELING = Path(inspect.getfile(AtlasConfig)).parent

FACTORIES = {
    AutoModel: (AtlasModel, "MODEL_MAPPING_NAMES"),
    AutoModelForCausalLM: (AtlasForCausalLM, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    AutoModelForSequenceClassification: (
        AtlasForSequenceClassification,
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    ),
    AutoModelForTokenClassification: (AtlasForTokenClassification, "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"),
}


def test_public_names():
    assert all(hasattr(atlas_hf, name) for name in atlas_hf.__all__)


@pytest.mark.parametrize("factory", FACTORIES)
def test_factories(small_config, tmp_path, factory: _BaseAutoModelClass):
    kind, names = FACTORIES[factory]
    assert getattr(modeling_auto, names)["atlas"] == kind.__name__
    model = factory.from_config(small_config(num_labels=3))
    assert type(model) is kind
    model.eval().save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is AtlasConfig
    loaded = factory.from_pretrained(tmp_path).eval()
    assert type(loaded) is kind
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids)[0], model(ids)[0])


def test_heads_share_the_base_model(small_model, tmp_path):
    model = small_model(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path)
    labelled = AutoModelForTokenClassification.from_pretrained(tmp_path, num_labels=5)
    for other in (base, labelled.model):
        for name, parameter in model.model.named_parameters():
            assert torch.equal(other.get_parameter(name), parameter), name


def test_tied_embeddings(small_model, tmp_path):
    model = small_model(dtype=torch.float32, tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


@pytest.mark.parametrize("variant", ["atlas", "atlas_plus_plus"])
def test_starts(small_config, variant):
    """Gates, features and memory begin as the configuration says, made directly or by `from_config`."""
    config = small_config(variant, initializer_range=0.02, retention_init=0.99, residual_scale=0.25)
    for model in (AtlasForCausalLM(config), AutoModelForCausalLM.from_config(config)):
        memory = model.model.layers[1].memory
        alpha, eta, theta, newest, *older = memory.gate_bias.sigmoid().mean(0).tolist()
        assert alpha == pytest.approx(0.99)
        assert eta == pytest.approx(config.learning_rate_init)
        assert theta == pytest.approx(config.momentum_init)
        assert newest > 0.95
        assert older == pytest.approx([config.window_gate_init] * 2)
        # Only the gated memory's open gate needs the constant feature.
        constant = 1 if variant == "atlas_plus_plus" else 0
        assert memory.feature_map.feature_coefficients[0].tolist() == pytest.approx([constant, 1, 0.5**0.5])
        assert memory.residual_scale.tolist() == [0.25, 0.25]
        assert memory.memory_weights[0].std() < 0.05
        assert memory.memory_weights[1].std() > 0.5
        assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    "missing", ["gate_bias", "conv.weight", "memory_weights.0", "memory_weights.1", "feature_map.feature_projection"]
)
def test_a_missing_weight_alone_is_made_anew(small_model, tmp_path, missing):
    """Beside loaded ones of the same mixer, which must stay as they are."""
    model = small_model(dtype=torch.float32)
    memory = model.model.layers[0].memory
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.fill_(7)
    state = {name: p for name, p in model.state_dict().items() if name != f"model.layers.0.memory.{missing}"}
    model.save_pretrained(tmp_path, state_dict=state)
    loaded = AtlasForCausalLM.from_pretrained(tmp_path).model.layers[0].memory
    for name, parameter in loaded.named_parameters():
        assert parameter.isfinite().all(), name
        if name == missing:
            assert 1e-2 < parameter.abs().max() < 6.99
        else:
            assert (parameter == 7).all(), name


def test_old_name_of_the_cache(small_model, random_ids, assert_equal_logits):
    model, ids = small_model(), random_ids(2, 8)
    cache = DynamicCache(config=model.config)
    expected = model(ids, use_cache=False).logits[:, 4:]
    for called in (model, model.model):
        cache.reset()
        with pytest.warns(FutureWarning, match="past_key_values"):
            called(ids[:, :4], past_key_values=cache)
        output = model(ids[:, 4:], cache=cache)
        assert_equal_logits(output.logits, expected)
        assert output.past_key_values is cache


def test_files_import_each_other_alone_and_flatly():
    """Saving with remote code finds imports by a pattern, docstrings included, and copies one folder's files."""
    pattern = re.compile(r"^\s*(?:from|import)\s+(\.\S*)", re.MULTILINE)
    for file in MODELING.glob("*.py"):
        source = file.read_text()
        found = pattern.findall(source)
        imported = []
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] != "atlas_hf", f"{file.name} needs the package"
                if node.level:
                    imported.append("." * node.level + (node.module or ""))
            elif isinstance(node, ast.Import):
                assert not any(alias.name.startswith("atlas_hf") for alias in node.names), file.name
        assert sorted(found) == sorted(imported), f"{file.name}: a line of text that looks like an import"
        for name in imported:
            assert re.fullmatch(r"\.[a-z_0-9]+", name), f"{file.name}: {name}"
            assert (MODELING / f"{name[1:]}.py").exists(), f"{file.name}: {name}"


REMOTE = """
import sys
sys.modules["atlas_hf"] = None  # as if it were not installed
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
folder = sys.argv[1]
assert type(AutoConfig.from_pretrained(folder, trust_remote_code=True)).__name__ == "AtlasConfig"
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
assert type(model).__module__.startswith("transformers_modules.")
ids = torch.arange(3, 12)[None]
logits = torch.load(folder + "/logits.pt")
with torch.no_grad():
    torch.testing.assert_close(model(ids).logits, logits["logits"])
generated = model.generate(ids, max_new_tokens=6, do_sample=False)
assert torch.equal(generated, logits["generated"])
assert torch.equal(generated, model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False))
assert type(AutoModel.from_pretrained(folder, trust_remote_code=True)).__name__ == "AtlasModel"
print("loaded")
"""


def test_remote_code_without_the_package(small_model, tmp_path, monkeypatch):
    monkeypatch.setattr(AtlasConfig, "_auto_class", "AutoConfig")
    monkeypatch.setattr(AtlasForCausalLM, "_auto_class", "AutoModelForCausalLM")
    model = small_model(dtype=torch.float32, initializer_range=0.3)
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        logits = model(ids).logits
    generated = model.generate(ids, max_new_tokens=6, do_sample=False)
    model.config.auto_map = {"AutoModel": "modeling_atlas.AtlasModel"}  # saving adds the classes that were saved
    model.save_pretrained(tmp_path)
    assert {"modeling_atlas.py", "cache_atlas.py", "memory_layer.py"} <= {file.name for file in tmp_path.iterdir()}
    torch.save({"logits": logits, "generated": generated}, tmp_path / "logits.pt")
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", REMOTE, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "loaded"
