"""The recurrence token by token, matrix by matrix, as the paper writes it: the reference for its faster twins.

Legend: H heads, B batch, K key width, V value width, E hidden width, F features, c window, b chunk;
`M = (W1, W2[, W3])` or `(W,)`, `D = M - M_0` with decay_to = "init" (else `D = M`), `S` momentum, `xi` the chunk's start.
"""

import torch

from .memory_network import activate, activate_with_derivative, stack_hidden
from .newton_schulz import newton_schulz
from .recurrence_operator import Call, atlas_operator, complete_rows, fold_rows, on_grid
from .recurrence_state import INNER_NORM_EPS, Fast, Grid


def _apply(matrix, x):
    """`[..., out, in] @ [..., in]`."""
    return (matrix @ x[..., None])[..., 0]


def read_memory(memory, features, z, residual_scale):
    """`M(z)` (Eq. 42, 43): matrices `[..., out, in]`, `features = phi(z)`, `residual_scale` broadcast to `z`."""
    out = features
    if len(memory) > 1:
        out = activate(_apply(stack_hidden(memory[1:]), features), len(memory) - 1)
    out = _apply(memory[0], out)
    return out if residual_scale is None else out + residual_scale * z


def inner_gradients(memory, latest_output, features, z, v, residual_scale, options):
    """Gradients of one token's inner loss by the memory's matrices, normalised step and rates of gd not applied.

    `latest_output` is the output matrix whose error the token makes (Eq. 10), `memory` the anchor at which hidden
    activations and the hidden layer's slope are taken (Eq. 15).

    Returns:
        a list of `(error [..., out], input [..., in])`, the gradient of each matrix being `error input^T`.
    """
    if len(memory) == 1:
        inputs, slope = features, None
    else:
        inputs, slope = activate_with_derivative(_apply(stack_hidden(memory[1:]), features), len(memory) - 1)
    error = -v
    if options.inner_loss == "l2":
        error = error + _apply(latest_output, inputs)
        if residual_scale is not None:
            error = error + residual_scale * z
    factors = [(error, inputs)]
    if slope is not None:
        back = _apply(memory[0].transpose(-1, -2), error)
        factors += [(back * part, features) for part in slope.chunk(len(memory) - 1, -1)]
    return factors


def hidden_gain(memory, features):
    """`|d M(z) / d u|_F^2`, how strongly the hidden pre-activations `u` move the output (normalised step)."""
    _, slope = activate_with_derivative(_apply(stack_hidden(memory[1:]), features), len(memory) - 1)
    jacobians = [memory[0] * part[..., None, :] for part in slope.chunk(len(memory) - 1, -1)]
    return sum(jacobian.square().sum((-2, -1)) for jacobian in jacobians)


@atlas_operator
@on_grid
def naive_atlas(grid: Grid, fast: Fast, call: Call):
    """The Atlas recurrence, one token after the other (docs/recurrence.md, section 2; paper, Eq. 9-16, 32, 33, 39).

    Same signature, outputs and state as `chunk_atlas`; slow, and meant to be read beside the paper. They agree to
    rounding for every choice of options. A reference has no kernels: `kernels="triton"` raises a ValueError.
    """
    if call.kernels == "triton":
        raise ValueError(
            "kernels='triton' cannot run: naive_atlas is the reference and has none; leave the argument out"
        )
    options, memory = call.options, call.memory
    b, window = options.chunk_size, grid.tokens.gamma.shape[-1]
    k, v, log_alpha, eta, log_theta, gamma = grid.tokens.map(lambda x: x.transpose(0, 2).transpose(1, 2))
    q = grid.q.transpose(0, 2).transpose(1, 2)  # all [H, B, tokens, ...] from here on
    identity = call.feature_map is None
    phi_k, phi_q = (k, q) if identity else (call.feature_map(k), call.feature_map(q))
    rho = None if call.residual_scale is None else call.residual_scale[:, None, None]
    base = [m[:, None] if options.decay_to == "init" else torch.zeros_like(m[:, None]) for m in memory]
    output_rate, hidden_rate = options.rates(memory[0].shape[-1])

    deltas = list(fast.delta)
    momenta = list(fast.momentum) or [torch.zeros_like(d) for d in deltas]
    outputs = []
    for t in range(q.shape[2]):
        if t % b == 0:
            anchor = [m + d for m, d in zip(base, deltas, strict=True)]
            if options.momentum == "restart":
                momenta = [torch.zeros_like(s) for s in momenta]
        # G_t: the window's gradients, newest first
        gradients = [torch.zeros_like(d) for d in deltas]
        latest = base[0] + deltas[0] if options.errors_follow_writes else anchor[0]
        for j in range(window):
            i = window - 1 + t - j
            factors = inner_gradients(anchor, latest, phi_k[:, :, i], k[:, :, i], v[:, :, i], rho, options)
            weight = gamma[:, :, window - 1 + t, j, None, None]
            gain = hidden_gain(anchor, phi_k[:, :, i])[..., None].clamp_min(1) if len(memory) > 1 else None
            for n, (error, inputs) in enumerate(factors):
                if options.inner_norm:
                    size = inputs.square().sum(-1, keepdim=True) + INNER_NORM_EPS
                    error = error / (size if n == 0 else size * gain)
                gradients[n] = gradients[n] + weight * error[..., None] * inputs[..., None, :]
        here = window - 1 + t
        alpha = log_alpha[:, :, here].exp()[..., None, None]
        rate = eta[:, :, here][..., None, None]
        theta = log_theta[:, :, here].exp()[..., None, None] if options.momentum != "none" else 0.0
        writes = (t % b + 1) % options.muon_interval == 0
        for n, gradient in enumerate(gradients):
            scale = output_rate if n == 0 else hidden_rate
            if options.rule == "gd" or (n == 0 and not options.output_by_muon):
                momenta[n] = theta * momenta[n] + rate * scale * gradient
                deltas[n] = alpha * deltas[n] - momenta[n]
            else:
                momenta[n] = theta * momenta[n] + gradient
                deltas[n] = alpha * deltas[n]
                if writes:
                    step = newton_schulz(momenta[n], options.newton_schulz_steps, options.newton_schulz_coefficients)
                    deltas[n] = deltas[n] - rate * scale * step
        now = [m + d for m, d in zip(base, deltas, strict=True)]
        outputs.append(read_memory(now, phi_q[:, :, t], q[:, :, t], rho))
        if (t + 1) % b == 0:
            carried = tuple(momenta) if options.momentum == "carry" else ()
            fast = fold_rows(complete_rows(grid, t // b), Fast(tuple(deltas), carried), fast)
            deltas = list(fast.delta)
            if carried:
                momenta = list(fast.momentum)
    return torch.stack(outputs, 2).transpose(1, 2).transpose(0, 2), fast
