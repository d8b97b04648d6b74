"""Which model a memory belongs to: the fields that give its numbers their meaning."""

import torch

# Not the starts of weights, special tokens and the like; nor `newton_schulz_steps`, which may be changed at inference.
ORIGIN_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("hidden_act", "conv_kernel_size", "memory", "memory_expansion", "rule", "inner_loss", "momentum", "omega_window"),
    *("chunk_size", "muon_interval", "output_errors", "feature_degree", "feature_rank", "inner_norm", "hidden_rate"),
    *("decay_to", "residual_scale", "rms_norm_eps"),
)


def origin_of(config, dtype: torch.dtype) -> dict:
    """`{field: value}` of a model with these weights' dtype, fit for JSON."""
    return {**{name: getattr(config, name) for name in ORIGIN_FIELDS}, "dtype": str(dtype).removeprefix("torch.")}


def check_origin(found: dict, wanted: dict, what: str) -> None:
    """Raise `ValueError`, naming every field, unless the memory `found` is one of the model `wanted`."""
    if found == wanted:
        return
    names = [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]
    differences = ", ".join(f"{name}={found.get(name)!r} (this model: {wanted.get(name)!r})" for name in names)
    raise ValueError(
        f"{what} was written by another model, with {differences}: go on with that model, or read the text again with "
        "this one"
    )
