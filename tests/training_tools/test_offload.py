"""Weights kept on the CPU's side or on disk by accelerate's hooks, and activations by `saved_tensors_hooks`."""

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.utils import send_to_device
from training_checks import assert_equal_gradients, gradients

from atlas_hf.memory_files import load_memory, save_memory
from atlas_hf.modeling.sequence_layout import SequenceLayout


@torch.no_grad()
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offloaded_weights(tiny_model, random_rows, tmp_path, where):
    """Every weight is fetched by the module that uses it, the memory's own parameters among them."""
    model, ids = tiny_model().eval(), torch.tensor(random_rows([13, 13]))
    expected = model(ids).logits
    generated = model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None)
    if where == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
        assert list(tmp_path.glob("*.dat"))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    torch.testing.assert_close(model(ids).logits, expected)
    again = model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert torch.equal(again, generated)


def partly_on_disk(model, folder):
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    places |= {"model.norm": "cpu", "lm_head": "disk"}
    model = dispatch_model(model, places, main_device="cpu", offload_dir=str(folder))
    assert next(model.model.layers[1].parameters()).device.type == "meta"
    return model


@torch.no_grad()
def test_some_layers_on_disk(tiny_model, random_rows, tmp_path):
    model, ids = tiny_model().eval(), torch.tensor(random_rows([13, 13]))
    expected = model(ids).logits
    model = partly_on_disk(model, tmp_path)
    torch.testing.assert_close(model(ids).logits, expected)


def test_gradients_through_offloaded_weights(tiny_model, random_rows):
    """The backward pass makes features again, when the weights that it needs have gone."""
    model, ids = tiny_model().eval(), torch.tensor(random_rows([13, 13]))
    embeds = model.get_input_embeddings()(ids).detach()
    results = []
    for offload in (False, True):
        if offload:
            cpu_offload(model, execution_device=torch.device("cpu"))
        leaf = embeds.clone().requires_grad_()
        model(inputs_embeds=leaf).logits.square().sum().backward()
        results.append(leaf.grad)
    assert results[0].any()
    torch.testing.assert_close(results[1], results[0])


def test_saved_tensors_hooks(tiny_model, random_rows):
    """Activations packed into another form and back: gradients are the same, and every saved tensor went through."""
    model, ids = tiny_model().train(), torch.tensor(random_rows([13, 13]))
    model(ids, labels=ids).loss.backward()
    expected = gradients(model)
    model.zero_grad()
    packed = [0, 0]

    def pack(tensor):
        packed[0] += 1
        return tensor.device, tensor.detach().cpu().clone()

    def unpack(saved):
        packed[1] += 1
        return saved[1].to(saved[0])

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        model(ids, labels=ids).loss.backward()
    assert packed[0] > 100
    assert packed[1] > 100
    assert_equal_gradients(gradients(model), expected, bound=1e-6)
    model.zero_grad()
    with torch.autograd.graph.save_on_cpu():
        model(ids, labels=ids).loss.backward()
    assert_equal_gradients(gradients(model), expected, bound=1e-6)


@torch.no_grad()
def test_rejected_candidates_with_offloaded_weights(tiny_model, random_rows, tmp_path):
    """Prompt lookup takes tokens back, which replays the others outside of a forward pass."""
    model, ids = tiny_model().eval(), torch.tensor(random_rows([7])).repeat(1, 3)
    wanted = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
    model = partly_on_disk(model, tmp_path)
    again = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, prompt_lookup_num_tokens=3)
    assert torch.equal(again, wanted)


@torch.no_grad()
def test_memory_files_of_offloaded_weights(tiny_model, random_rows, tmp_path):
    model, ids = tiny_model().eval(), torch.tensor(random_rows([13]))
    wanted = model(ids).logits[:, 9:]
    first = model(ids[:, :9], use_cache=True)
    save_memory(first.cache, tmp_path / "before.safetensors", model)
    cpu_offload(model, execution_device=torch.device("cpu"))
    cache = load_memory(tmp_path / "before.safetensors", model)
    torch.testing.assert_close(model(ids[:, 9:], cache=cache).logits, wanted)
    save_memory(model(ids[:, :9], use_cache=True).cache, tmp_path / "after.safetensors", model)
    cache = load_memory(tmp_path / "after.safetensors", model)
    torch.testing.assert_close(model(ids[:, 9:], cache=cache).logits, wanted)


def test_a_layout_moves_with_the_layers():
    layout = SequenceLayout.from_mask(torch.tensor([[0, 1, 1], [1, 1, 1]]))
    moved = send_to_device(layout, "meta")
    for name in ("index", "lengths", "last_sequence_of_row", "mask"):
        assert getattr(moved, name).device.type == "meta"
        assert getattr(layout, name).device.type == "cpu"
    packed = SequenceLayout.from_segments(torch.tensor([[0, 0, 1]])).to("meta")
    assert packed.mask is None
