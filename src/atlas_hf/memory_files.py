"""Memories outside of a forward pass: copies in RAM and files, so that a long text is read once and asked about later."""

import hashlib
import json
import os
from pathlib import Path

import torch
from accelerate.utils import align_module_device
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import Cache, DynamicCache

from atlas_hf.modeling.cache_atlas import AtlasCacheLayer
from atlas_hf.modeling.memory_origin import check_origin, origin_of

FORMAT = "atlas-memory"
FORMAT_VERSION = "1"
METADATA = ("format", "version", "positions", "origin", "fingerprint")


def copy_memory(cache: Cache) -> Cache:
    """A cache in the same state, from then on independent of the first: go on from it as often as is wanted.

    Costs next to nothing (a dynamic cache's tensors are shared, since a forward pass replaces them); a static cache's are
    copied.

    Raises:
        TypeError: the cache is none of an Atlas model.
    """
    _check_layers(cache)
    other = DynamicCache.__new__(type(cache))
    other.__dict__.update(cache.__dict__)
    other.layers = [layer.snapshot() for layer in cache.layers]
    return other


def save_memory(cache: Cache, path: str | Path, model: nn.Module | None = None) -> None:
    """Write what a cache holds to a safetensors file, whole or not at all.

    The file carries a fingerprint of the configuration and dtype of the model that read the text.

    Args:
        cache: a cache that has seen tokens, of any number of rows.
        model: the model that filled it; adds a checksum of its weights to the file, which `load_memory` then compares
            (without those in 4 bits).

    Raises:
        TypeError: the cache is none of an Atlas model.
        ValueError: it has seen no tokens, or those of another model than `model`, or nobody knows whose: a compiled model
            leaves no trace of itself.
        FileNotFoundError: there is no folder of `path`.
        IsADirectoryError: `path` is a folder itself.
    """
    _check_layers(cache)
    first = cache.layers[0]
    if not first.is_initialized:
        raise ValueError("the cache has seen no tokens, so there is no memory to save: pass it to a forward pass first")
    origin = getattr(first, "origin", None)
    if origin is None and model is None:
        raise ValueError(
            "the cache does not say which model filled it, as none does that a compiled model has filled: pass the model too"
        )
    if model is not None:
        base = _base_of(model)
        of_model = origin_of(base.config, base.norm.weight.dtype)
        check_origin(of_model if origin is None else origin, of_model, "the cache")
        origin = {**of_model, "weights": _checksum(base)}
    tensors = {
        f"layers.{i}.{name}": state.detach().to("cpu", copy=True).contiguous()
        for i, layer in enumerate(cache.layers)
        for name, state in layer.get_states().items()
    }
    described = json.dumps(origin)
    metadata = {"format": FORMAT, "version": FORMAT_VERSION, "positions": str(int(cache.get_seq_length()))}
    metadata |= {"origin": described, "fingerprint": _digest(described.encode())}
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to save the memory in: create it first")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file in it, such as {path / 'text.safetensors'}")
    partial = path.with_name(path.name + ".partial")
    try:
        save_file(tensors, partial, metadata)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load_memory(path: str | Path, model: nn.Module) -> DynamicCache:
    """The cache of a file that `save_memory` wrote, on the devices of `model`'s layers, to be passed as its `cache`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file holds no memory, or one of another configuration, dtype or other weights; names them.
    """
    path, base = Path(path), _base_of(model)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}: name one that `save_memory` wrote")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            missing = [name for name in METADATA if name not in metadata]
            if missing or metadata["format"] != FORMAT:
                lacking = f" (its header lacks {', '.join(missing)})" if missing else ""
                raise ValueError(f"{path} holds no memory{lacking}: name a file that `save_memory` wrote")
            if metadata["version"] != FORMAT_VERSION:
                raise ValueError(
                    f"{path} has version {metadata['version']} of the format, this is version {FORMAT_VERSION}: use the "
                    "release that wrote it, or read the text again"
                )
            if metadata["fingerprint"] != _digest(metadata["origin"].encode()):
                raise ValueError(f"{path} does not have the fingerprint that it was written with: read the text again")
            origin = json.loads(metadata["origin"])
            weights = origin.pop("weights", None)
            check_origin(origin, origin_of(base.config, base.norm.weight.dtype), f"the memory in {path}")
            if weights is not None and weights != _checksum(base):
                raise ValueError(
                    f"the memory in {path} was written by a model of other weights: go on with that model, or read "
                    "the text again with this one"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: name one that `save_memory` wrote ({error})") from error
    cache = DynamicCache(config=base.config)
    cache.layers = [AtlasCacheLayer() for _ in range(base.config.num_hidden_layers)]
    for i, layer in enumerate(cache.layers):
        prefix = f"layers.{i}."
        device = _device_of(base.layers[i].memory)
        states = {n.removeprefix(prefix): t.to(device) for n, t in tensors.items() if n.startswith(prefix)}
        layer.update_states(states, int(metadata["positions"]))
    cache.layers[0].origin = origin
    return cache


def _check_layers(cache: Cache) -> None:
    layers = getattr(cache, "layers", None)
    if not layers or not all(hasattr(layer, "get_states") for layer in layers):
        raise TypeError(f"{type(cache).__name__} holds no memory: pass what an Atlas model returned as `cache`")


def _base_of(model: nn.Module) -> nn.Module:
    """The `AtlasModel` inside a model and whatever wraps it, by name: remote code has a class of its own."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if type(module).__name__ == "AtlasModel":
            return module
    raise TypeError(f"{type(model).__name__} is no Atlas model")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _device_of(mixer: nn.Module) -> torch.device:
    """Where a layer works, though its weights may be offloaded."""
    device = mixer.gate_bias.device
    return device if device.type != "meta" else torch.device(mixer._hf_hook.execution_device)


def _checksum(base: nn.Module) -> str:
    total = hashlib.sha256()
    owners = {
        f"{path}.{name}" if path else name: (m, name) for path, m in base.named_modules() for name in _own_state(m)
    }
    for name, (module, own_name) in sorted(owners.items()):
        total.update(name.encode())
        with align_module_device(module):  # fetches what is offloaded
            tensor = _own_state(module)[own_name].detach().cpu()
        total.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return total.hexdigest()


def _own_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's part of the state, without its children's; a layer in 8 bits has more in it than its attributes.

    Weights in 4 bits are left out: bitsandbytes rearranges them at the first pass on some CPUs, and on being asked for their
    state puts them back but in part, so that the model would compute something else from then on.
    """
    state = {}
    if not hasattr(getattr(module, "weight", None), "quant_state"):
        module._save_to_state_dict(state, "", False)
    return state
