"""One token of decoding in one launch: the token's write and its read, for the presets with an mlp memory.

Legend: B batch, H heads, K key width, V value width, E hidden width, F features, c window, b chunk, R = b + c - 1 slots.

A program serves one head of one row, and does what `modeling/recurrence_step.py` does in `_write` and `_output`: errors are
taken for all slots, of which the window's gates leave those of the window. At a chunk's end PyTorch folds the slots.
"""

import json

import torch
import triton
import triton.language as tl

from atlas_hf.kernels.newton_schulz import WIDEST, advance, norm_of_sum
from atlas_hf.modeling.newton_schulz import CANCELLED, EPS
from atlas_hf.modeling.recurrence_state import INNER_NORM_EPS

# Elements of the output matrix, which stands on the chip.
LARGEST_MATRIX = 64 * 256
FEATURES_AT_ONCE = 32
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
    if _padded(widths["value_dim"]) * _padded(widths["hidden_dim"]) > LARGEST_MATRIX:
        return (
            f"an output matrix of {widths['value_dim']} x {widths['hidden_dim']} is too large for the decoding kernel"
        )
    return None


def _padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length()) if width else 16


@triton.jit
def _dot(x, y):
    return tl.dot(x, y, input_precision="ieee", out_dtype=x.dtype)


@triton.jit
def _gelu(u):
    return 0.5 * u * (1 + tl.erf(u * 0.7071067811865476))


@triton.jit
def _gelu_derivative(u):
    return 0.5 * (1 + tl.erf(u * 0.7071067811865476)) + u * tl.exp(-0.5 * u * u) * 0.3989422804014327


@triton.jit
def _polynomial(gram, projected, coefficients, DEGREE: tl.constexpr):
    """Kernel of the features from inner products of keys and of projected keys."""
    value = gram
    if DEGREE > 1:
        c = tl.load(coefficients).to(gram.dtype)
        value = c * c + tl.zeros_like(gram)
        c = tl.load(coefficients + 1).to(gram.dtype)
        value += c * c * gram
        power = projected
        for i in tl.static_range(2, DEGREE + 1):
            power = power * projected
            c = tl.load(coefficients + i).to(gram.dtype)
            value += c * c * power
    return value


@triton.jit
def _insert(held, token, new, b, h, heads, row, column, here, R: tl.constexpr, WIDTH: tl.constexpr):
    """Keys or values of all slots `[R, width]`, with the new token's at its own; written out too."""
    inside = (row[:, None] < R) & (column[None, :] < WIDTH)
    place = ((b * (R - 1) + row[:, None]) * heads + h) * WIDTH + column[None, :]
    x = tl.load(held + place, mask=inside & (row[:, None] < R - 1), other=0.0)
    x = tl.where(here[:, None], tl.load(token + (b * heads + h) * WIDTH + column, mask=column < WIDTH, other=0.0), x)
    tl.store(new + ((b * R + row[:, None]) * heads + h) * WIDTH + column[None, :], x, mask=inside)
    return x


@triton.jit
def _insert_gate(held, value, new, b, h, heads, row, here, j, R: tl.constexpr, WIDTH: tl.constexpr):
    place = ((b * (R - 1) + row) * heads + h) * WIDTH + j
    x = tl.load(held + place, mask=row < R - 1, other=0.0)
    tl.store(new + place, tl.where(here, value, x), mask=row < R - 1)


@triton.jit
def _step_kernel(
    q,
    k,
    v,
    log_alpha,
    eta,
    log_theta,
    gamma,
    phi_q,
    phi_k,
    base_0,
    base_1,
    coefficients,
    projection,
    delta_0,
    delta_1,
    columns,
    held_k,
    held_v,
    held_log_alpha,
    held_eta,
    held_log_theta,
    held_gamma,
    activations,
    window,
    offset_0,
    offset_1,
    gradient_0,
    gradient_1,
    log_a,
    position,
    y,
    new_k,
    new_v,
    new_log_alpha,
    new_eta,
    new_log_theta,
    new_gamma,
    new_activations,
    new_window,
    new_offset_0,
    new_offset_1,
    new_gradient_0,
    new_gradient_1,
    new_log_a,
    delta_0_row,
    delta_0_head,
    delta_1_row,
    delta_1_head,
    heads,
    K: tl.constexpr,
    V: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    R: tl.constexpr,
    KP: tl.constexpr,
    VP: tl.constexpr,
    EP: tl.constexpr,
    RP: tl.constexpr,
    FB: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    DEGREE: tl.constexpr,
    RANK: tl.constexpr,
    RANKP: tl.constexpr,
    MUON: tl.constexpr,
    MOMENTUM: tl.constexpr,
    INTERVAL: tl.constexpr,
    HIDDEN_RATE: tl.constexpr,
    STEPS: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    EPS: tl.constexpr,
    CANCELLED: tl.constexpr,
    NORM_EPS: tl.constexpr,
):
    b, h = tl.program_id(0).to(tl.int64) // heads, tl.program_id(0).to(tl.int64) % heads
    head = b * heads + h
    row, at_k, at_v, at_e = tl.arange(0, RP), tl.arange(0, KP), tl.arange(0, VP), tl.arange(0, EP)
    seen = tl.load(position + b)
    phase = seen % CHUNK
    slot = WINDOW - 1 + phase
    here = row == slot

    # 1. The token takes its slot
    keys = _insert(held_k, k, new_k, b, h, heads, row, at_k, here, R, K)
    values = _insert(held_v, v, new_v, b, h, heads, row, at_v, here, R, V)
    alpha_log, rate, theta_log = tl.load(log_alpha + head), tl.load(eta + head), tl.load(log_theta + head)
    _insert_gate(held_log_alpha, alpha_log, new_log_alpha, b, h, heads, row, here, 0, R, 1)
    _insert_gate(held_eta, rate, new_eta, b, h, heads, row, here, 0, R, 1)
    _insert_gate(held_log_theta, theta_log, new_log_theta, b, h, heads, row, here, 0, R, 1)
    weight = tl.zeros((RP,), tl.float32)
    for j in tl.static_range(WINDOW):
        # Tokens before the sequence's first do not exist
        gate = tl.where(j <= seen, tl.load(gamma + head * WINDOW + j), 0.0)
        _insert_gate(held_gamma, gate, new_gamma, b, h, heads, row, here, j, R, WINDOW)
        weight += tl.where(row == slot - j, gate, 0.0)

    # 2. Hidden pre-activations: the key's at the chunk's start; the query's, but for what the chunk has written
    entry = tl.zeros((EP,), tl.float32)
    query_base, query_delta = tl.zeros((EP,), tl.float32), tl.zeros((EP,), tl.float32)
    for first in range(0, F, FB):
        f = first + tl.arange(0, FB)
        inside = (at_e[:, None] < E) & (f[None, :] < F)
        place = at_e[:, None] * F + f[None, :]
        base = tl.load(base_1 + h * E * F + place, mask=inside, other=0.0)
        delta = tl.load(delta_1 + b * delta_1_row + h * delta_1_head + place, mask=inside, other=0.0)
        features_k = tl.load(phi_k + head * F + f, mask=f < F, other=0.0)[None, :]
        features_q = tl.load(phi_q + head * F + f, mask=f < F, other=0.0)[None, :]
        entry += tl.sum((base + delta) * features_k, 1)
        query_base += tl.sum(base * features_q, 1)
        query_delta += tl.sum(delta * features_q, 1)
    slots_e = (row[:, None] < R) & (at_e[None, :] < E)
    place_e = head * R * E + row[:, None] * E + at_e[None, :]
    # Slopes are asked for in the window alone: of the tokens before this one their pre-activations are kept, oldest first
    since = row - (slot - (WINDOW - 1))
    earlier = (since[:, None] >= 0) & (since[:, None] < WINDOW - 1) & (at_e[None, :] < E)
    place_window = head * (WINDOW - 1) * E + since[:, None] * E + at_e[None, :]
    u = tl.where(here[:, None], entry[None, :], tl.load(window + place_window, mask=earlier, other=0.0))
    kept = (since[:, None] > 0) & (since[:, None] < WINDOW) & (at_e[None, :] < E)
    tl.store(new_window + place_window - E, u, mask=kept)
    slope = _gelu_derivative(u)
    x = tl.where(here[:, None], _gelu(u), tl.load(activations + place_e, mask=slots_e, other=0.0))
    tl.store(new_activations + place_e, x, mask=slots_e)

    # 3. Errors of all slots by the latest output matrix, and back-propagated by that of the chunk's start
    inside = (at_v[:, None] < V) & (at_e[None, :] < E)
    place = at_v[:, None] * E + at_e[None, :]
    start = tl.load(base_0 + h * V * E + place, mask=inside, other=0.0)
    delta = tl.load(delta_0 + b * delta_0_row + h * delta_0_head + place, mask=inside, other=0.0)
    slots_v = (row[:, None] < R) & (at_v[None, :] < V)
    place_v = head * R * V + row[:, None] * V + at_v[None, :]
    offset = tl.load(offset_0 + place_v, mask=slots_v, other=0.0)
    log_decay = tl.load(log_a + head)
    decayed = start + tl.exp(log_decay) * delta
    errors = _dot(x, tl.trans(decayed)) - _dot(_dot(x, tl.trans(x)), offset) - values
    current = start + delta
    back = _dot(errors, current) * slope
    lengths = tl.load(columns + head * E + at_e, mask=at_e < E, other=0.0)
    gain = tl.sum(slope * slope * lengths[None, :], 1)
    gram = tl.zeros((RP, RP), tl.float64)
    wide = keys.to(tl.float64)
    if MUON:
        gram = _dot(wide, tl.trans(wide))
    norm = tl.sum(keys * keys, 1)
    query = tl.load(q + head * K + at_k, mask=at_k < K, other=0.0)
    gram_query = tl.sum(keys * query[None, :], 1)
    projected, projected_norm, projected_query = gram, norm, gram_query
    if RANK > 0:
        at_r = tl.arange(0, RANKP)
        inside_r = (at_r[:, None] < RANK) & (at_k[None, :] < K)
        p = tl.load(projection + h * RANK * K + at_r[:, None] * K + at_k[None, :], mask=inside_r, other=0.0)
        pk = _dot(keys, tl.trans(p))
        projected_norm = tl.sum(pk * pk, 1)
        projected_query = tl.sum(pk * tl.sum(p * query[None, :], 1)[None, :], 1)
        if MUON:
            wide_pk = _dot(wide, tl.trans(p.to(tl.float64)))
            projected = _dot(wide_pk, tl.trans(wide_pk))
    c = coefficients + h * (DEGREE + 1)
    norm = _polynomial(norm, projected_norm, c, DEGREE)
    gram_query = _polynomial(gram_query, projected_query, c, DEGREE)
    errors = errors * (weight / (tl.sum(x * x, 1) + NORM_EPS))[:, None]
    back = back * (weight / ((norm + NORM_EPS) * tl.maximum(gain, 1.0)))[:, None]

    # 4. Writes
    alpha = tl.exp(alpha_log)
    step_0 = rate * errors
    if MOMENTUM:
        step_0 += tl.exp(theta_log) * tl.load(gradient_0 + place_v, mask=slots_v, other=0.0)
        tl.store(new_gradient_0 + place_v, step_0, mask=slots_v)
    offset = alpha * offset + step_0
    tl.store(new_offset_0 + place_v, offset, mask=slots_v)
    step_1 = back
    if not MUON:
        step_1 = rate * HIDDEN_RATE * back
    if MOMENTUM:
        step_1 += tl.exp(theta_log) * tl.load(gradient_1 + place_e, mask=slots_e, other=0.0)
        tl.store(new_gradient_1 + place_e, step_1, mask=slots_e)
    offset_hidden = alpha * tl.load(offset_1 + place_e, mask=slots_e, other=0.0)
    if MUON:
        if (phase + 1) % INTERVAL == 0:
            wide_step = step_1.to(tl.float64)
            gram_e = _dot(wide_step, tl.trans(wide_step))
            gram_x = tl.where((row[:, None] < R) & (row[None, :] < R), _polynomial(gram, projected, c, DEGREE), 0.0)
            size, _ = norm_of_sum(gram_e, gram_x, CANCELLED, EPS, RP)
            scaled = gram_e * (1.0 / (size * size))
            factor = (row[:, None] == row[None, :]).to(tl.float64)
            for _step in range(STEPS):
                factor = advance(factor, gram_x, scaled, A, B, C)
            offset_hidden += rate * HIDDEN_RATE * _dot(tl.trans((factor * (1.0 / size)).to(tl.float32)), step_1)
    else:
        offset_hidden += step_1
    tl.store(new_offset_1 + place_e, offset_hidden, mask=slots_e)

    # 5. The read
    log_decay += alpha_log
    tl.store(new_log_a + head, log_decay)
    decay = tl.exp(log_decay)
    z = _gelu(query_base + decay * query_delta - tl.sum(gram_query[:, None] * offset_hidden, 0))
    output = tl.sum((start + decay * delta) * z[None, :], 1)
    output -= tl.sum(tl.sum(x * z[None, :], 1)[:, None] * offset, 0)
    tl.store(y + head * V + at_v, output, mask=at_v < V)


@torch.library.custom_op("atlas_hf::decoding_step", mutates_args=())
def decoding_step(
    token: list[torch.Tensor], weights: list[torch.Tensor], state: list[torch.Tensor], plan: str
) -> list[torch.Tensor]:
    """`y [B, H, V]` and what a token changes of the state, see `take`; `plan` holds the kernel's constants as JSON."""
    constants, (delta_0, delta_1) = json.loads(plan), state[:2]
    results = _results(token, state, constants["R"])
    batch, heads = delta_0.shape[:2]
    strides = delta_0.stride()[:2] + delta_1.stride()[:2]
    # Without momentum the gradients' places hold tensors that the kernel does not touch
    gap = [] if constants["MOMENTUM"] else [delta_0, delta_0]
    given, made = [*token, *weights, *state[:-2], *gap, *state[-2:]], [*results[:-1], *gap, results[-1]]
    with torch.cuda.device_of(delta_0):
        _step_kernel[(batch * heads,)](*given, *made, *strides, heads, **constants, num_warps=NUM_WARPS, num_stages=1)
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
            **{"KP": _padded(key_dim), "VP": _padded(output.shape[1]), "EP": _padded(output.shape[2])},
            **{"RP": _padded(slots), "FB": FEATURES_AT_ONCE, "WINDOW": window, "CHUNK": options.chunk_size},
            **{"DEGREE": degree, "RANK": rank, "RANKP": _padded(rank)},
            **{"MUON": options.rule == "muon", "MOMENTUM": self.momentum, "INTERVAL": options.muon_interval},
            **{"HIDDEN_RATE": options.rates(output.shape[2])[1], "STEPS": options.newton_schulz_steps},
            **{"A": a, "B": b, "C": c, "EPS": EPS, "CANCELLED": CANCELLED, "NORM_EPS": INNER_NORM_EPS},
        )

    def take(self, work: dict, token: dict, q: torch.Tensor) -> tuple[dict, torch.Tensor]:
        """The state after the token's writes, as `_Step._write` gives it, and the output at `q [B, H, K]`."""
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
