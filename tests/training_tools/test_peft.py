"""PEFT: LoRA on every linear layer trains, merges and is saved alone."""

import copy

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from torch import nn
from training_checks import PEFT_WARNING

pytestmark = PEFT_WARNING

TARGETS = ("q_proj", "k_proj", "v_proj", "g_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture
def adapted(tiny_model):
    def make(targets="all-linear", start=False, **changes):
        torch.manual_seed(3)
        config = LoraConfig(r=2, target_modules=targets, init_lora_weights=start, task_type="CAUSAL_LM", **changes)
        return get_peft_model(tiny_model(), config)

    return make


def test_all_linear_names_the_documented_layers(adapted, tiny_model):
    """`gate_proj` stands for two layers: the memory's gates and the SwiGLU's."""
    layers = {name for name, module in tiny_model().named_modules() if isinstance(module, nn.Linear)}
    assert {name.rsplit(".", 1)[-1] for name in layers} == {*TARGETS, "lm_head"}
    found = {name.split(".base_layer")[0] for name, _ in adapted().named_modules() if name.endswith(".base_layer")}
    assert {name.removeprefix("base_model.model.") for name in found} == layers - {"lm_head"}
    listed = {name for name, _ in adapted(list(TARGETS)).named_parameters() if "lora_" in name}
    assert listed == {name for name, _ in adapted().named_parameters() if "lora_" in name}


def test_every_adapter_learns_and_nothing_else(adapted, random_rows):
    model, ids = adapted().train(), torch.tensor(random_rows([11, 11]))
    model(input_ids=ids, labels=ids).loss.backward()
    adapters = {name: p for name, p in model.named_parameters() if "lora_" in name}
    assert len(adapters) == 2 * 2 * (len(TARGETS) + 1)  # A and B, layers, and two kinds of gate_proj
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (name in adapters), name
    for name, parameter in adapters.items():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@torch.no_grad()
def test_merged_equals_unmerged(adapted, tiny_model, random_rows):
    model, ids = adapted().eval(), torch.tensor(random_rows([11, 11]))
    expected = model(input_ids=ids).logits
    assert (expected - tiny_model()(ids).logits).abs().max() > 1e-3
    merged = model.merge_and_unload()
    assert type(merged) is type(tiny_model())
    torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_saved_alone_and_loaded(adapted, tiny_model, random_rows, tmp_path):
    model, ids = adapted().eval(), torch.tensor(random_rows([11]))
    tiny_model().save_pretrained(tmp_path / "base")
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    expected = model(input_ids=ids).logits
    for loaded in (
        PeftModel.from_pretrained(tiny_model(), tmp_path / "adapter"),
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter"),
    ):
        assert torch.equal(loaded.eval()(input_ids=ids).logits, expected)
    generated = loaded.generate(input_ids=ids, max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert torch.equal(generated, model.generate(input_ids=ids, max_new_tokens=5, do_sample=False, eos_token_id=None))


def test_modules_to_save_and_the_head(adapted, random_rows):
    model, ids = (
        adapted([*TARGETS, "lm_head"], modules_to_save=["embed_tokens"]).train(),
        torch.tensor(random_rows([9])),
    )
    model(input_ids=ids, labels=ids).loss.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert any("lm_head.lora_B" in name for name in trained)
    assert any("embed_tokens.modules_to_save" in name for name in trained)


def test_whole_mixers_among_the_modules_to_save(adapted, random_rows, tmp_path):
    """What is not a linear layer (learned starts, gate biases, convolutions) trains as a part of its mixer."""
    model, ids = adapted(["up_proj"], modules_to_save=["memory"]).train(), torch.tensor(random_rows([9]))
    model(input_ids=ids, labels=ids).loss.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    for part in ("memory_weights.1", "gate_bias", "conv.weight"):
        assert any(f"memory.modules_to_save.default.{part}" in name for name in trained), part
    first = model(input_ids=ids[:, :5], use_cache=True)
    second = model(input_ids=ids[:, 5:], cache=first.cache).logits
    torch.testing.assert_close(second, model(input_ids=ids).logits[:, 5:], rtol=1e-4, atol=1e-5)


def test_training_lowers_the_loss(adapted, random_rows):
    model, ids = adapted(start=True).train(), torch.tensor(random_rows([12] * 2))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for _ in range(12):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]


@torch.no_grad()
def test_a_memory_saved_as_a_module_follows_the_models_settings(tiny_model, random_rows):
    """PEFT works on a copy of the module; a copy of the whole model has settings of its own."""
    base, ids = tiny_model(), torch.tensor(random_rows([11]))
    other = copy.deepcopy(base)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["up_proj"], modules_to_save=["memory"])).eval()
    assert base.model.layers[0].memory.modules_to_save["default"] is not base.model.layers[0].memory.original_module
    before = model(input_ids=ids).logits
    base.config.newton_schulz_steps = 1
    assert (model(input_ids=ids).logits - before).abs().max() > 1e-6
    assert other.config.newton_schulz_steps == 5
    assert other.model.layers[0].memory.config is other.config
