"""Whether loaded weights are those of the configuration: which fields the shapes of a checkpoint speak of."""

import re

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")
_MEMORIES = {1: "linear", 2: "mlp", 3: "gated"}


def fields_of_shapes(shapes: dict[str, tuple[int, ...] | None]) -> dict[str, tuple[object, str]]:
    """Configuration fields that the weights' shapes decide, as `{field: (value, name of the weight that says so)}`.

    `shapes` maps names, with or without the base model's prefix, to shapes (`None`: there, but of a shape not known). Fields
    that no weight speaks of are left out.
    """
    fields: dict[str, tuple[object, str]] = {}
    layers: dict[str, list[tuple[str, tuple[int, ...] | None]]] = {}
    indices = set()
    for name, shape in shapes.items():
        if match := _LAYER.search(name):
            indices.add(int(match[1]))
            layers.setdefault(match[2], []).append((name, shape))
        elif shape is not None and name.endswith("embed_tokens.weight"):
            fields["vocab_size"], fields["hidden_size"] = (shape[0], name), (shape[1], name)
        elif shape is not None and name == "score.weight":
            fields["num_labels"] = (shape[0], name)
    if not indices:
        return fields
    fields["num_hidden_layers"] = (max(indices) + 1, f"layers.{max(indices)}")

    def read(part, field, value_of):
        known = [(name, shape) for name, shape in layers.get(part, ()) if shape is not None]
        if known:
            name, shape = known[0]
            fields[field] = (value_of(shape), name)

    read("mlp.gate_proj.weight", "intermediate_size", lambda shape: shape[0])
    read("memory.gate_bias", "num_attention_heads", lambda shape: shape[0])
    read("memory.gate_bias", "omega_window", lambda shape: shape[1] - 3)
    read("memory.norm.weight", "head_dim", lambda shape: shape[0])
    read("memory.conv.weight", "conv_kernel_size", lambda shape: shape[2])
    read("memory.feature_map.feature_coefficients", "feature_degree", lambda shape: shape[1] - 1)
    read("memory.feature_map.feature_projection", "feature_rank", lambda shape: shape[1])
    coefficients = "memory.feature_map.feature_coefficients"
    fields.setdefault("feature_degree", ("more than 1" if coefficients in layers else 1, coefficients))
    matrices = sorted(part for part in layers if re.fullmatch(r"memory\.memory_weights\.\d", part))
    if matrices:
        fields["memory"] = (_MEMORIES.get(len(matrices)), matrices[-1])
    if fields.get("memory", ("linear",))[0] != "linear" and "head_dim" in fields:
        head_dim = fields["head_dim"][0]
        read("memory.memory_weights.0", "memory_expansion", lambda shape: shape[2] // head_dim)
    fields["residual_scale"] = ("memory.residual_scale" in layers, "memory.residual_scale")
    return fields


def check_fit(model, info: dict) -> None:
    """Raise if what `from_pretrained` found missing, unexpected or of another shape contradicts the model's configuration.

    Single weights that a checkpoint lacks, such as a new head, contradict nothing; nor does one without any of the weights.

    Args:
        info: the loading info of `from_pretrained`, with keys `missing_keys`, `unexpected_keys` and `mismatched_keys`.

    Raises:
        RuntimeError: names the field, its value, the one that the weights have, and the remedy.
    """
    if not (info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]):
        return
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    mismatched = {name: tuple(found) for name, found, _ in info["mismatched_keys"]}
    missing = set(info["missing_keys"]) - set(mismatched)
    found = {name: shape for name, shape in wanted.items() if name not in missing}
    if not found:
        return
    found |= mismatched | dict.fromkeys(info["unexpected_keys"])
    remedy = "correct config.json; or pass ignore_mismatched_sizes=True to start what does not fit anew"
    here, there, problems = fields_of_shapes(wanted), fields_of_shapes(found), []
    for field, (value, name) in there.items():
        if field not in here or here[field][0] == value:
            continue
        configured = getattr(model.config, field)
        if field == "residual_scale":
            value = "another than 0" if value else 0
        problems.append(f"{field}={configured!r}, but the weights have {value!r} ({name})")
    config = model.config
    if "lm_head.weight" in missing and type(model).__name__ in (getattr(config, "architectures", None) or ()):
        problems.append(
            f"tie_word_embeddings={config.tie_word_embeddings}, but the weights have no lm_head.weight of their own"
        )
    if not problems:
        problems = [
            f"{name} has shape {list(s)}, wanted {list(wanted[name])}" for name, s in sorted(mismatched.items())
        ]
    if problems:
        raise RuntimeError(f"the checkpoint does not fit its configuration: {'; '.join(problems)}: {remedy}")
