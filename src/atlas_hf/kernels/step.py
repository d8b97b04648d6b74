"""One token of decoding in one launch: the token's write and its read, for the presets with an mlp memory.

Legend: B batch, H heads, K key width, V value width, E hidden width, F features, c window, b chunk, R = b + c - 1 slots.

`take` does what `_Step.take` does in `modeling/recurrence_step.py`, by the mathematics of `step_writes.py`. At a chunk's end
PyTorch folds the slots.
"""

import json

import torch

from atlas_hf.kernels.newton_schulz import WIDEST
from atlas_hf.kernels.step_kernel import step_kernel
from atlas_hf.modeling.newton_schulz import EPS
from atlas_hf.modeling.recurrence_state import INNER_NORM_EPS

# What shared memory holds of a GPU of compute capability 8.0.
WIDEST_HEAD = 256
WIDEST_WINDOW = 16
# Features and hidden units that are worked on at one time.
AT_ONCE = 16
NUM_WARPS = 8
GATES = ("log_alpha", "eta", "log_theta")


def supports(options, num_matrices: int, window: int, **widths: int) -> str | None:
    """What of a call this kernel cannot do; None: nothing, it can. Arguments as for `scan.supports`."""
    wanted = {"inner_loss": "l2", "output_errors": "exact", "inner_norm": True, "decay_to": "init"}
    for name, value in wanted.items():
        if getattr(options, name) != value:
            return f"{name}={getattr(options, name)!r} has no decoding kernel, {value!r} has"
    if options.momentum == "carry":
        return "momentum='carry' has no decoding kernel, 'restart' and 'none' have"
    if num_matrices != 2:
        return f"a memory of {num_matrices} matrices has no decoding kernel, one of 2 (mlp) has"
    if options.chunk_size + window - 1 > WIDEST:
        return f"chunk_size + omega_window - 1 = {options.chunk_size + window - 1} exceeds {WIDEST}"
    if window > WIDEST_WINDOW:
        return f"omega_window={window} exceeds {WIDEST_WINDOW}"
    if max(widths["key_dim"], widths["value_dim"]) > WIDEST_HEAD:
        return f"heads of {max(widths['key_dim'], widths['value_dim'])} are wider than {WIDEST_HEAD}"
    return None


def _padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length()) if width else 16


@torch.library.custom_op("atlas_hf::decoding_step", mutates_args=())
def decoding_step(
    token: list[torch.Tensor], weights: list[torch.Tensor], state: list[torch.Tensor], plan: str
) -> list[torch.Tensor]:
    """`y [B, H, V]` and what a token changes of the state, see `take`; `plan` holds the kernel's constants as JSON."""
    constants, (delta_0, delta_1) = json.loads(plan), state[:2]
    results = _results(token, state, constants["R"])
    batch, heads = delta_0.shape[:2]
    strides = delta_0.stride()[:2] + delta_1.stride()[:2]
    scratch = delta_0.new_empty(batch, heads, 3, constants["E"])
    given, made = [*token, *weights, *state], list(results)
    if not constants["MOMENTUM"]:
        # In the gradients' places: nothing that is read, and room for the hidden matrix's step
        given[-2:-2] = [delta_0, delta_0]
        made[-1:-1] = [delta_0, torch.empty_like(results[-2])]
    with torch.cuda.device_of(delta_0):
        step_kernel[(batch * heads,)](
            *given, *made, scratch, *strides, heads, **constants, num_warps=NUM_WARPS, num_stages=1
        )
    return results


def _results(token, state, slots: int) -> list[torch.Tensor]:
    changed = [torch.empty_like(token[2])]
    for x in state[3:5]:
        changed.append(x.new_empty(x.shape[0], slots, *x.shape[2:]))
    return changed + [torch.empty_like(x) for x in state[5:-1]]


@decoding_step.register_fake
def _(token, weights, state, plan):
    return _results(token, state, json.loads(plan)["R"])


@torch.compiler.assume_constant_result  # torch.compile cannot follow json
def _as_text(**constants) -> str:
    return json.dumps(constants)


class Step:
    """`take` for the tokens of one call; holds what does not change from token to token."""

    def __init__(self, options, memory, feature_map, window: int):
        self.feature_map, self.momentum = feature_map, options.momentum != "none"
        output, entry = (m.contiguous() for m in memory)
        coefficients = projection = output  # not read
        degree, rank = 1, 0
        if feature_map is not None and feature_map.degree > 1:
            degree, coefficients = feature_map.degree, feature_map.feature_coefficients
            if feature_map.feature_projection is not None:
                rank, projection = feature_map.rank, feature_map.feature_projection
        self.weights = [output, entry, *(x.to(output.dtype).contiguous() for x in (coefficients, projection))]
        a, b, c = options.newton_schulz_coefficients
        key_dim = entry.shape[-1] if feature_map is None else feature_map.key_dim
        slots = options.chunk_size + window - 1
        self.plan = _as_text(
            **{"K": key_dim, "V": output.shape[1], "E": output.shape[2], "F": entry.shape[2], "R": slots},
            **{"KP": _padded(key_dim), "VP": _padded(output.shape[1]), "RP": _padded(slots), "CP": WIDEST_WINDOW},
            **{"FB": AT_ONCE, "EB": AT_ONCE, "KB": 32, "SB": 16, "WINDOW": window, "CHUNK": options.chunk_size},
            **{"DEGREE": degree, "RANK": rank, "RANKP": _padded(rank)},
            **{"MUON": options.rule == "muon", "MOMENTUM": self.momentum, "INTERVAL": options.muon_interval},
            **{"HIDDEN_RATE": options.rates(output.shape[2])[1], "STEPS": options.newton_schulz_steps},
            **{"A": a, "B": b, "C": c, "EPS": EPS, "NORM_EPS": INNER_NORM_EPS},
        )

    def take(self, work: dict, token: dict, q: torch.Tensor) -> tuple[dict, torch.Tensor]:
        """The state after the token's writes, as `StepWrites.write` gives it, and the output at `q [B, H, K]`."""
        both = torch.stack([q, token["k"]], -2)  # [B, H, 2, K]
        phi = both if self.feature_map is None else self.feature_map(both, head_axis=1)
        tokens = [q, *(token[n] for n in ("k", "v", *GATES, "gamma")), phi[..., 0, :], phi[..., 1, :]]
        names = ["k", "v", *GATES, "gamma", "step_x", "step_window", "step_offset_0", "step_offset_1"]
        names += ["step_gradient_0", "step_gradient_1"] if self.momentum else []
        names += ["step_log_a"]
        held = [work[n].contiguous() for n in (*names, "position")]
        state = [work["matrix_0"], work["matrix_1"], work["step_columns"].contiguous(), *held]
        y, *changed = decoding_step([x.contiguous() for x in tokens], self.weights, state, self.plan)
        return {**work, **dict(zip(names, changed, strict=True)), "position": work["position"] + 1}, y
