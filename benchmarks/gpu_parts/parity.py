"""Are the numbers those of PyTorch's path, on the device at hand? Errors are measured against float64 on the same device.

Legend: B rows, T tokens, H heads, K = V head width, E hidden width, F features, c window.
"""

import torch
from torch.nn.functional import normalize

from atlas_hf import AtlasConfig, AtlasForCausalLM
from atlas_hf.modeling.configuration_atlas import PRESETS
from atlas_hf.modeling.dispatch import describe, select_factors
from atlas_hf.modeling.model_statistics import memory_shapes
from atlas_hf.modeling.newton_schulz import COEFFICIENTS, newton_schulz_factors
from atlas_hf.modeling.recurrence_state import RecurrenceOptions
from atlas_hf.ops import PolynomialFeatureMap, chunk_atlas, step_atlas
from gpu_parts.contenders import SkippedError

# Beside twice the error of PyTorch's path in the same dtype: a few units of rounding of the largest entry
FLOOR = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
DTYPES = (torch.float32, torch.bfloat16)


def options_of(config: AtlasConfig) -> dict:
    names = [name for name in RecurrenceOptions.__dataclass_fields__ if hasattr(config, name)]
    return {name: getattr(config, name) for name in names}


def problem(config: AtlasConfig, batch: int, tokens: int, dtype, device, seed: int = 0) -> dict:
    """Arguments of the recurrence for one layer of `config`, every gate and feature at work, rounded to `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    heads, width = config.num_attention_heads, config.head_dim

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    feature_map = None
    features = width
    if config.feature_degree > 1:
        feature_map = PolynomialFeatureMap(heads, width, config.feature_degree, config.feature_rank)
        for parameter in feature_map.parameters():
            parameter.data = normal(*parameter.shape) * parameter.shape[-1] ** -0.5
        features = feature_map.num_features
    hidden = config.memory_expansion * width
    memory = [normal(heads, width, hidden) * 0.1] + [
        normal(heads, hidden, features) for _ in range(2 if config.memory == "gated" else 1)
    ]
    return {
        "q": normalize(normal(batch, tokens, heads, width), dim=-1),
        "k": normalize(normal(batch, tokens, heads, width), dim=-1),
        "v": normal(batch, tokens, heads, width),
        "memory": memory,
        "log_alpha": -0.05 * uniform(batch, tokens, heads),
        "eta": 0.5 * uniform(batch, tokens, heads),
        "log_theta": -0.2 - uniform(batch, tokens, heads),
        "gamma": uniform(batch, tokens, heads, config.omega_window) / config.omega_window,
        "feature_map": feature_map,
    }


def outcomes(arguments: dict, dtype, kernels: str, options: dict, split: int) -> dict[str, torch.Tensor]:
    """Outputs of all forms, final state and gradients: `split` tokens in chunks, the others one by one, one row padded."""
    arguments = {**arguments}
    feature_map = arguments.pop("feature_map")
    leaves = {name: x.to(dtype) for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    leaves |= {f"memory_{i}": m.to(dtype) for i, m in enumerate(arguments["memory"])}
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    if feature_map is not None:
        feature_map = feature_map.to(torch.promote_types(dtype, torch.float32))
        leaves |= {name: x.requires_grad_() for name, x in feature_map.named_parameters()}
    memory = [x for name, x in leaves.items() if name.startswith("memory_")]

    def call(form, tokens, **more):
        parts = {n: leaves[n][:, tokens] for n in ("log_alpha", "eta", "log_theta", "gamma")}
        return form(
            *(leaves[n][:, tokens] for n in ("q", "k", "v")),
            memory,
            **parts,
            **options,
            **more,
            feature_map=feature_map,
            kernels=kernels,
            output_final_state=True,
        )

    batch = len(leaves["q"])
    lengths = torch.full((batch,), split, device=leaves["q"].device)
    lengths[-1] -= options["chunk_size"] // 2 + 1
    y, state = call(chunk_atlas, slice(0, split), lengths=lengths)
    found = {"output": y, **{name: x for name, x in state.items() if name.startswith(("matrix", "momentum"))}}
    generator = torch.Generator().manual_seed(1)
    total = sum(
        (x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)).sum()
        for x in found.values()
    )
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    found |= {f"gradient by {n}": g for n, g in zip(leaves, grads, strict=True) if g is not None}
    with torch.no_grad():
        steps = []
        for t in range(split, leaves["q"].shape[1]):
            y, state = call(step_atlas, slice(t, t + 1), initial_state=state)
            steps.append(y)
        found["decoding"] = torch.cat(steps, 1)
        # All of the first row's document and a short second one, packed
        packed = {n: leaves[n][:1] for n in ("q", "k", "v", "log_alpha", "eta", "log_theta", "gamma")}
        ends = torch.tensor([0, split - 2, leaves["q"].shape[1]], device=y.device)
        tensors = [packed.pop(n) for n in ("q", "k", "v")]
        found["packed"] = chunk_atlas(
            *tensors, memory, **packed, **options, feature_map=feature_map, kernels=kernels, cu_seqlens=ends
        )[0]
    return {name: x.detach().double() for name, x in found.items()}


def compare(mine: dict, torchs: dict, exact: dict, dtype) -> dict:
    """The tensor that does worst: its error, that of PyTorch's path, and whether it is allowed."""
    worst = None
    for name, c in exact.items():
        scale = c.abs().max().clamp_min(1e-30)
        error, other = (((x[name] - c).abs().max() / scale).item() for x in (mine, torchs))
        allowed = 2 * other + FLOOR[dtype]
        # A comparison with a NaN is false
        row = {"tensor": name, "error": error, "torch_error": other, "allowed": allowed, "passed": error <= allowed}
        if worst is None or not row["passed"] or error / allowed > worst["error"] / worst["allowed"]:
            worst = row
        if not row["passed"]:
            break
    return worst


def recurrence(preset: str, dtype, scale, device, kernels: str, precision: str = "highest") -> dict:
    """One preset's recurrence in one dtype; the kernels', not PyTorch's, with products of float32 at `precision`."""
    if precision != "highest" and device.type != "cuda":
        raise SkippedError("products of float32 are taken as they are here")
    size = scale.parity
    fields = {"hidden_size": size["heads"] * size["head_dim"], "num_attention_heads": size["heads"]}
    fields |= {"memory_expansion": size["expansion"]} | scale.atlas
    if PRESETS[preset].get("feature_degree") == 1:
        fields.pop("feature_rank", None)
    config = getattr(AtlasConfig, preset)(**fields)
    options = options_of(config)
    split = size["chunks"] * config.chunk_size + 1
    arguments = problem(config, size["batch"], split + 3, dtype, device)
    exact = outcomes(arguments, torch.float64, "torch", options, split)
    torchs = outcomes(arguments, dtype, "torch", options, split)
    torch.set_float32_matmul_precision(precision)
    try:
        mine = outcomes(arguments, dtype, kernels, options, split)
    finally:
        torch.set_float32_matmul_precision("highest")
    path = path_taken(config, kernels)
    return {
        "case": f"recurrence {preset}",
        "dtype": str(dtype)[6:],
        "path": path,
        **compare(mine, torchs, exact, dtype),
    }


def path_taken(config: AtlasConfig, kernels: str) -> str:
    """`"triton"` or `"torch"`: the path of the recurrence in chunks."""
    options = RecurrenceOptions(**options_of(config), newton_schulz_coefficients=COEFFICIENTS)
    shapes = memory_shapes(config)
    widths = {"key_dim": config.head_dim, "value_dim": config.head_dim, "features": shapes[-1][1]}
    described = describe(kernels, options, len(shapes), config.omega_window, hidden_dim=shapes[0][1], **widths)
    return described.split()[0]


def model(preset: str, dtype, scale, device, kernels: str) -> dict:
    """A whole model: logits, the loss's gradients, and the logits of the same tokens in pieces and one by one."""
    size = scale.parity
    config = getattr(AtlasConfig, preset)(**{**scale.skeleton, **scale.atlas, "num_hidden_layers": size["layers"]})
    torch.manual_seed(0)
    net = AtlasForCausalLM(config).to(device, dtype).eval()
    length = size["chunks"] * config.chunk_size + 5
    ids = torch.randint(config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0)).to(device)

    def run(kernels):
        net.config.kernels = kernels
        net.zero_grad()
        out = net(ids, labels=ids, use_cache=False)
        out.loss.backward()
        found = {"logits": out.logits, **{f"gradient by {n}": p.grad for n, p in net.named_parameters()}}
        with torch.no_grad():
            first = net(ids[:, :-3], use_cache=True)
            pieces = [first.logits]
            for t in range(length - 3, length):
                pieces.append(net(ids[:, t : t + 1], cache=first.cache).logits)
        found["logits in pieces"] = torch.cat(pieces, 1)
        return {name: x.detach().double().clone() for name, x in found.items()}

    mine, torchs = run(kernels), run("torch")
    net.double()
    exact = run("torch")
    return {
        "case": f"model {preset}",
        "dtype": str(dtype)[6:],
        "path": path_taken(config, kernels),
        **compare(mine, torchs, exact, dtype),
    }


def far_factors(scale, device, kernels: str) -> dict:
    """Newton-Schulz on more than `2^31` elements: the last problems' results are those of PyTorch."""
    tokens = 16
    kernel = select_factors(kernels, tokens, torch.empty(0, device=device))
    if kernel is None:
        raise SkippedError("Newton-Schulz runs on PyTorch here: no kernel whose offsets could be short")
    count = scale.offsets // tokens**2 + 8
    e = torch.randn(8, tokens, 24, generator=torch.Generator().manual_seed(0)).to(device)
    gram = e @ e.mT
    many = torch.empty(count, tokens, tokens, device=device).copy_(torch.eye(tokens, device=device))
    many[-8:] = gram
    with torch.no_grad():
        found = kernel(many[:, None], gram[:1])[-8:, 0]
    wanted = newton_schulz_factors(gram.double(), gram[:1].double())
    error = ((found - wanted).abs().max() / wanted.abs().max()).item()
    return {"case": "offsets of Newton-Schulz", "dtype": "float32", "path": "triton", "elements": many.numel(),
            "tensor": "factors", "error": error, "allowed": 1e-4, "passed": error <= 1e-4}  # fmt: skip


@torch.no_grad()
def far_scan(scale, device, kernels: str) -> dict:
    """A batch whose features are more than `2^31` numbers: its last row is the same as when it is alone."""
    config = AtlasConfig.omeganet(hidden_size=scale.parity["head_dim"], num_attention_heads=1, feature_degree=2,
                                  **{**scale.atlas, "feature_rank": 3 * scale.parity["rank"] - 1})  # fmt: skip
    options = options_of(config)
    rows = 64
    one = problem(config, 1, 4 * config.chunk_size, torch.float32, device)
    features = one["memory"][1].shape[-1]
    repeats = scale.offsets // (rows * features * 4 * config.chunk_size) + 1
    feature_map, memory = one.pop("feature_map").to(device), one.pop("memory")
    # The same passage again and again in all rows; the last row goes through it backwards
    long = {
        n: x.repeat(1, repeats, *[1] * (x.ndim - 2)).expand(rows, *[-1] * (x.ndim - 1)).clone() for n, x in one.items()
    }
    long = {n: x.index_copy_(0, torch.tensor([rows - 1], device=device), x[-1:].flip(1)) for n, x in long.items()}

    def last_row(tensors, kernels):
        tensors = dict(tensors)
        q, k, v = (tensors.pop(n) for n in ("q", "k", "v"))
        y, _ = chunk_atlas(q, k, v, memory, **tensors, **options, feature_map=feature_map, kernels=kernels)
        return y[-1].clone()

    alone = {n: x[-1:].clone() for n, x in long.items()}
    elements = rows * repeats * 4 * config.chunk_size * features
    found = last_row(long, kernels)
    del long
    wanted = last_row(alone, "torch")
    error = ((found - wanted).abs().max() / wanted.abs().max()).item()
    return {"case": "offsets of the scan", "dtype": "float32", "path": path_taken(config, kernels), "elements": elements,
            "tensor": "output", "error": error, "allowed": 1e-3, "passed": error <= 1e-3}  # fmt: skip


def cases(scale, device, kernels: str):
    """`(name, function)` of every comparison."""
    for dtype in DTYPES:
        for preset in PRESETS:
            yield (
                f"recurrence {preset} {str(dtype)[6:]}",
                lambda p=preset, d=dtype: recurrence(p, d, scale, device, kernels),
            )
        for preset in ("atlas", "omeganet"):
            yield f"model {preset} {str(dtype)[6:]}", lambda p=preset, d=dtype: model(p, d, scale, device, kernels)
    for preset in PRESETS:  # other kernels than those above: these are the ones that are timed
        yield (
            f"recurrence {preset} float32, products in three parts",
            lambda p=preset: recurrence(p, torch.float32, scale, device, kernels, "high"),
        )
    yield "offsets of Newton-Schulz", lambda: far_factors(scale, device, kernels)
    yield "offsets of the scan", lambda: far_scan(scale, device, kernels)
