"""The program that takes one token of decoding, for one head of one row.

Legend: K key width, V value width, E hidden width, F features, c window, b chunk, R = b + c - 1 slots, of which the window's
tokens fill c. Names that end in P are widths of tiles; hidden units come EB at a time, features FB, entries of keys KB, slots
SB.

The steps are those of `modeling/step_writes.py`. What one of them leaves for the next stands in the results, or in
`scratch [B, H, 3, E]`: the key's hidden pre-activations, the query's by `M_0`, and by `D`.
"""

import triton
import triton.language as tl

from atlas_hf.kernels.newton_schulz_tiles import advance, identity, squared_norm


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


@triton.jit
def _insert_gate(held, value, new, b, h, heads, row, here, j, R: tl.constexpr, WIDTH: tl.constexpr):
    place = ((b * (R - 1) + row) * heads + h) * WIDTH + j
    x = tl.load(held + place, mask=row < R - 1, other=0.0)
    tl.store(new + place, tl.where(here, value, x), mask=row < R - 1)


@triton.jit
def _slots(head, row, column, R: tl.constexpr, WIDTH: tl.constexpr):
    """Addresses and mask of some slots and columns of a tensor `[B, H, R, width]`."""
    inside = (row[:, None] < R) & (column[None, :] < WIDTH)
    return head * R * WIDTH + row[:, None] * WIDTH + column[None, :], inside


@triton.jit
def _window_entries(window, entry, head, recent, e, WINDOW: tl.constexpr, E: tl.constexpr):
    """Hidden pre-activations of the window's tokens, oldest first: those kept, and the new token's."""
    place = head * (WINDOW - 1) * E + recent[:, None] * E + e[None, :]
    u = tl.load(window + place, mask=(recent[:, None] < WINDOW - 1) & (e[None, :] < E), other=0.0)
    return tl.where(recent[:, None] == WINDOW - 1, entry[None, :], u)


@triton.jit
def _output_part(base_0, delta_0, b, h, at_v, e, row_stride, head_stride, V: tl.constexpr, E: tl.constexpr):
    """Some columns of the output matrix's start, and of its delta at the chunk's start."""
    inside = (at_v[:, None] < V) & (e[None, :] < E)
    place = at_v[:, None] * E + e[None, :]
    start = tl.load(base_0 + h * V * E + place, mask=inside, other=0.0)
    return start, tl.load(delta_0 + b * row_stride + h * head_stride + place, mask=inside, other=0.0)


@triton.jit
def step_kernel(
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
    scratch,
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
    RP: tl.constexpr,
    CP: tl.constexpr,
    FB: tl.constexpr,
    EB: tl.constexpr,
    KB: tl.constexpr,
    SB: tl.constexpr,
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
    NORM_EPS: tl.constexpr,
):
    b, h = tl.program_id(0).to(tl.int64) // heads, tl.program_id(0).to(tl.int64) % heads
    head = b * heads + h
    row, at_v = tl.arange(0, RP), tl.arange(0, VP)
    seen = tl.load(position + b)
    phase = seen % CHUNK
    slot = WINDOW - 1 + phase
    here = row == slot

    # 1. The token takes its slot
    _insert(held_k, k, new_k, b, h, heads, row, tl.arange(0, KP), here, R, K)
    _insert(held_v, v, new_v, b, h, heads, row, at_v, here, R, V)
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

    tl.debug_barrier()

    # 2. Inner products of the keys' features, in double precision as Newton-Schulz needs them
    gram_keys, gram_query = tl.zeros((RP, RP), tl.float64), tl.zeros((RP,), tl.float32)
    at_r = tl.arange(0, RANKP)
    pk, pq = tl.zeros((RP, RANKP), tl.float64), tl.zeros((RANKP,), tl.float32)
    for first in range(0, K, KB):
        at_k = first + tl.arange(0, KB)
        place = ((b * R + row[:, None]) * heads + h) * K + at_k[None, :]
        keys = tl.load(new_k + place, mask=(row[:, None] < R) & (at_k[None, :] < K), other=0.0)
        query = tl.load(q + head * K + at_k, mask=at_k < K, other=0.0)
        wide = keys.to(tl.float64)
        gram_keys += _dot(wide, tl.trans(wide))
        gram_query += tl.sum(keys * query[None, :], 1)
        if RANK > 0:
            in_projection = (at_r[:, None] < RANK) & (at_k[None, :] < K)
            p = tl.load(projection + h * RANK * K + at_r[:, None] * K + at_k[None, :], mask=in_projection, other=0.0)
            pk += _dot(wide, tl.trans(p.to(tl.float64)))
            pq += tl.sum(p * query[None, :], 1)
    projected, projected_query = gram_keys, gram_query
    if RANK > 0:
        projected = _dot(pk, tl.trans(pk))
        projected_query = tl.sum(pk.to(tl.float32) * pq[None, :], 1)
    c = coefficients + h * (DEGREE + 1)
    gram_query = _polynomial(gram_query, projected_query, c, DEGREE)
    gram_keys = _polynomial(gram_keys, projected, c, DEGREE)
    diagonal = tl.sum(tl.where(row[:, None] == row[None, :], gram_keys, 0.0), 1).to(tl.float32)

    # 3. Hidden pre-activations: the key's at the chunk's start; the query's, but for what the chunk has written. Errors of
    # the window's tokens, oldest first, by the latest output matrix, but for what the chunk has written.
    recent = tl.arange(0, CP)
    of_slot = slot - (WINDOW - 1) + recent
    in_window = recent < WINDOW
    spread = (of_slot[:, None] == row[None, :]) & in_window[:, None]
    log_decay = tl.load(log_a + head)
    decay = tl.exp(log_decay)
    errors = tl.zeros((CP, VP), tl.float32)
    squares, gain = tl.zeros((CP,), tl.float32), tl.zeros((CP,), tl.float32)
    for first in range(0, E, EB):
        e = first + tl.arange(0, EB)
        entry = tl.zeros((EB,), tl.float32)
        query_base, query_delta = tl.zeros((EB,), tl.float32), tl.zeros((EB,), tl.float32)
        for start_f in range(0, F, FB):
            f = start_f + tl.arange(0, FB)
            inside = (e[:, None] < E) & (f[None, :] < F)
            place = e[:, None] * F + f[None, :]
            base = tl.load(base_1 + h * E * F + place, mask=inside, other=0.0)
            delta = tl.load(delta_1 + b * delta_1_row + h * delta_1_head + place, mask=inside, other=0.0)
            features_k = tl.load(phi_k + head * F + f, mask=f < F, other=0.0)[None, :]
            features_q = tl.load(phi_q + head * F + f, mask=f < F, other=0.0)[None, :]
            entry += tl.sum((base + delta) * features_k, 1)
            query_base += tl.sum(base * features_q, 1)
            query_delta += tl.sum(delta * features_q, 1)
        tl.store(scratch + head * 3 * E + e, entry, mask=e < E)
        tl.store(scratch + head * 3 * E + E + e, query_base, mask=e < E)
        tl.store(scratch + head * 3 * E + 2 * E + e, query_delta, mask=e < E)
        u = _window_entries(window, entry, head, recent, e, WINDOW, E)
        kept = (recent[:, None] > 0) & in_window[:, None] & (e[None, :] < E)
        tl.store(new_window + head * (WINDOW - 1) * E + (recent[:, None] - 1) * E + e[None, :], u, mask=kept)
        place, inside = _slots(head, row, e, R, E)
        x = tl.load(activations + place, mask=inside, other=0.0)
        tl.store(new_activations + place, tl.where(here[:, None], _gelu(entry)[None, :], x), mask=inside)
        start, delta = _output_part(base_0, delta_0, b, h, at_v, e, delta_0_row, delta_0_head, V, E)
        x = _gelu(u)
        errors += _dot(x, tl.trans(start + decay * delta))
        squares += tl.sum(x * x, 1)
        slope = _gelu_derivative(u)
        lengths = tl.load(columns + head * E + e, mask=e < E, other=0.0)
        gain += tl.sum(slope * slope * lengths[None, :], 1)
    tl.debug_barrier()

    # 4. What the chunk has written, slots by slots; the values; the normalised step
    for first in range(0, R, SB):
        r = first + tl.arange(0, SB)
        gram = tl.zeros((CP, SB), tl.float32)
        for first_e in range(0, E, EB):
            e = first_e + tl.arange(0, EB)
            entry = tl.load(scratch + head * 3 * E + e, mask=e < E, other=0.0)
            place, inside = _slots(head, r, e, R, E)
            x = tl.load(new_activations + place, mask=inside, other=0.0)
            gram += _dot(_gelu(_window_entries(window, entry, head, recent, e, WINDOW, E)), tl.trans(x))
        place, inside = _slots(head, r, at_v, R, V)
        errors -= _dot(gram, tl.load(offset_0 + place, mask=inside, other=0.0))
    values = new_v + ((b * R + of_slot[:, None]) * heads + h) * V + at_v[None, :]
    errors -= tl.load(values, mask=in_window[:, None] & (at_v[None, :] < V), other=0.0)
    norm = tl.sum(tl.where(spread, diagonal[None, :], 0.0), 1)
    weight = tl.sum(tl.where(spread, weight[None, :], 0.0), 1)
    size_hidden = (norm + NORM_EPS) * tl.maximum(gain, 1.0)

    # 5. Writes. The output matrix's:
    alpha = tl.exp(alpha_log)
    to_slots = tl.trans(spread.to(tl.float32))
    step_v = rate * _dot(to_slots, errors * (weight / (squares + NORM_EPS))[:, None])
    place_v, inside_v = _slots(head, row, at_v, R, V)
    if MOMENTUM:
        step_v += tl.exp(theta_log) * tl.load(gradient_0 + place_v, mask=inside_v, other=0.0)
        tl.store(new_gradient_0 + place_v, step_v, mask=inside_v)
    offset = alpha * tl.load(offset_0 + place_v, mask=inside_v, other=0.0) + step_v
    tl.store(new_offset_0 + place_v, offset, mask=inside_v)
    # The hidden matrix's
    gram = tl.zeros((RP, RP), tl.float64)
    for first in range(0, E, EB):
        e = first + tl.arange(0, EB)
        entry = tl.load(scratch + head * 3 * E + e, mask=e < E, other=0.0)
        u = _window_entries(window, entry, head, recent, e, WINDOW, E)
        start, delta = _output_part(base_0, delta_0, b, h, at_v, e, delta_0_row, delta_0_head, V, E)
        back = _dot(errors, start + delta) * _gelu_derivative(u) * (weight / size_hidden)[:, None]
        step = _dot(to_slots, back)
        place, inside = _slots(head, row, e, R, E)
        if not MUON:
            step = rate * HIDDEN_RATE * step
        if MOMENTUM:
            step += tl.exp(theta_log) * tl.load(gradient_1 + place, mask=inside, other=0.0)
        tl.store(new_gradient_1 + place, step, mask=inside)
        if MUON:
            gram += _dot(step.to(tl.float64), tl.trans(step.to(tl.float64)))
    factor = identity(RP)
    writes = (phase + 1) % INTERVAL == 0
    if MUON:  # noqa: SIM102  # known when compiling, the other when running
        if writes:
            gram_keys = tl.where((row[:, None] < R) & (row[None, :] < R), gram_keys, 0.0)
            square, _ = squared_norm(gram, gram_keys, EPS, RP)
            scaled = gram / square
            for _step in range(STEPS):
                factor = advance(factor, gram_keys, scaled, A, B, C)
            factor = factor / tl.sqrt(square)
    tl.debug_barrier()

    # 6. The read
    log_decay += alpha_log
    tl.store(new_log_a + head, log_decay)
    decay = tl.exp(log_decay)
    output, gram_z = tl.zeros((VP,), tl.float32), tl.zeros((RP,), tl.float32)
    for first in range(0, E, EB):
        e = first + tl.arange(0, EB)
        place, inside = _slots(head, row, e, R, E)
        step = tl.load(new_gradient_1 + place, mask=inside, other=0.0)
        if MUON:
            step = tl.where(writes, rate * HIDDEN_RATE * _dot(tl.trans(factor.to(tl.float32)), step), 0.0)
        hidden = alpha * tl.load(offset_1 + place, mask=inside, other=0.0) + step
        tl.store(new_offset_1 + place, hidden, mask=inside)
        query_base = tl.load(scratch + head * 3 * E + E + e, mask=e < E, other=0.0)
        query_delta = tl.load(scratch + head * 3 * E + 2 * E + e, mask=e < E, other=0.0)
        z = _gelu(query_base + decay * query_delta - tl.sum(gram_query[:, None] * hidden, 0))
        start, delta = _output_part(base_0, delta_0, b, h, at_v, e, delta_0_row, delta_0_head, V, E)
        output += tl.sum((start + decay * delta) * z[None, :], 1)
        gram_z += tl.sum(tl.load(new_activations + place, mask=inside, other=0.0) * z[None, :], 1)
    output -= tl.sum(gram_z[:, None] * offset, 0)
    tl.store(y + head * V + at_v, output, mask=at_v < V)
