"""bitsandbytes on the CPU: linear layers in 8 and 4 bits, everything of the memory in float32 as before."""

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from training_checks import PEFT_WARNING
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from atlas_hf import load_memory, save_memory

bitsandbytes = pytest.importorskip("bitsandbytes", reason="BITSANDBYTES IS NOT INSTALLED: quantisation was not tested")

KINDS = {
    "8 bit": ({"load_in_8bit": True}, "Linear8bitLt", 0.05),
    "4 bit": (
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32},
        "Linear4bit",
        0.5,
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_quantised(tiny_model, random_rows, tmp_path, kind):
    options, layer, bound = KINDS[kind]
    # Widths of 64, the block of 4-bit quantisation.
    full = tiny_model(hidden_size=64, intermediate_size=64, initializer_range=0.1).eval()
    full.save_pretrained(tmp_path)
    config = BitsAndBytesConfig(**options)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, device_map="cpu").eval()
    kinds = {name: type(module).__name__ for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {k for name, k in kinds.items() if name != "lm_head" and "memory.gate_proj" not in name} == {layer}
    assert {k for name, k in kinds.items() if name == "lm_head" or "memory.gate_proj" in name} == {"Linear"}
    memory = model.model.layers[0].memory
    for parameter in (*memory.memory_weights, memory.gate_bias, *memory.feature_map.parameters()):
        assert parameter.dtype == torch.float32
    ids = torch.tensor(random_rows([17, 17]))
    expected, logits = full(ids).logits, model(ids).logits.float()
    error = (logits - expected).norm() / expected.norm()
    assert 0 < error < bound
    # Decoding from the cache stays exact.
    first = model(ids[:, :9])
    pieces = [first.logits] + [model(ids[:, t : t + 1], cache=first.cache).logits for t in range(9, 17)]
    torch.testing.assert_close(torch.cat(pieces, 1).float(), logits, rtol=2e-2, atol=2e-2 * logits.abs().max().item())
    assert model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None).shape == (2, 21)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_memory_in_a_file(tiny_model, random_rows, tmp_path, kind):
    """Goes on with the same model before and after its first pass, is refused by other weights, and changes no weight."""
    widths = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 1}
    models, path, ids = [], tmp_path / "memory.safetensors", torch.tensor(random_rows([17]))
    for seed in (0, 0, 1):
        tiny_model(seed, **widths).save_pretrained(tmp_path)
        config = BitsAndBytesConfig(**KINDS[kind][0])
        models.append(
            AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, device_map="cpu").eval()
        )
    model, same, other = models
    output = model(ids, use_cache=True)
    for _ in range(2):
        save_memory(output.cache, path, model)
        assert torch.equal(model(ids).logits, output.logits)
    assert load_memory(path, same).get_seq_length() == 17
    assert load_memory(path, model).get_seq_length() == 17
    with pytest.raises(ValueError, match="by a model of other weights"):
        load_memory(path, other)


@PEFT_WARNING
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_on_a_quantised_model_learn(tiny_model, random_rows, tmp_path, kind):
    options = KINDS[kind][0]
    tiny_model(hidden_size=64, intermediate_size=64).save_pretrained(tmp_path)
    config = BitsAndBytesConfig(**options)
    base = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, device_map="cpu")
    base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    model = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)).train()
    ids = torch.tensor(random_rows([11, 11]))
    model(input_ids=ids, labels=ids).loss.backward()
    adapters = {name: p for name, p in model.named_parameters() if "lora_" in name}
    assert len(adapters) == 36
    for name, parameter in adapters.items():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name
