"""How one matrix of the memory is written inside a chunk, in the dual form: no matrix per token is built.

Legend: b tokens of the chunk, R tokens in view (c - 1 earlier ones and the chunk's), W written positions, P error sources:
the R tokens, or with exact errors the b c pairs of a write and a token of its window, `p = (n, m)` with `i(p) = n + m`;
`e_p [P, out]` errors, `x_i [R, in]` inputs. Everything has leading axes `[H, B]`.

Every class gives, for its matrix, what the writes up to token `t` took away:

    W_t z = W_0 z + a_t D z - m_t S z - offset_t(z)         D, S at the chunk's start
"""

from dataclasses import dataclass

import torch

from .newton_schulz import newton_schulz, newton_schulz_factors


@dataclass
class Decays:
    """Products of one chunk's gates: `L_a`, `L_h` (None without momentum), `a_t`, and `m_t`, `beta_t` if carried."""

    retention: torch.Tensor  # L_a [b, b]
    momentum: torch.Tensor | None  # L_h [b, b]
    eta: torch.Tensor  # [b]
    a: torch.Tensor  # [b]
    m: torch.Tensor | None  # [b]
    beta: torch.Tensor | None  # [b]
    gd: torch.Tensor  # Q = L_a L_h diag(eta) [b, b]


def to_sources(x: torch.Tensor, window: int | None, dim: int) -> torch.Tensor:
    """Token quantities for every source: `x` at `i(p)` along `dim`, -1 or -2 (`window=None`: sources are tokens)."""
    if window is None:
        return x
    pairs = x.unfold(dim, window, 1)
    return pairs.flatten(-2) if dim == -1 else pairs.transpose(-1, -2).flatten(-3, -2)


def sum_over_tokens(x: torch.Tensor, window: int | None) -> torch.Tensor:
    """Add up the sources of each token: `[..., P, out] -> [..., R, out]`."""
    if window is None:
        return x
    pairs = x.unflatten(-2, (-1, window))
    return sum(torch.nn.functional.pad(pairs[..., m, :], (0, 0, m, window - 1 - m)) for m in range(window))


class GradientWrites:
    """gd: `offset_t(z) = sum_p w_p[t] e_p (x_i(p) . z)`, the writes' sum a linear attention (recurrence, section 5)."""

    def __init__(self, decays: Decays, source_weights, errors, window):
        # source_weights [b, P]: weight of each source in the window that ends at t
        self.decays, self.errors, self.window, self.source_weights = decays, errors, window, source_weights
        self.weights = decays.gd @ source_weights

    def offset(self, z, gram):
        """`z [b, in]` and `gram = z x^T [b, R]` to `[b, out]`."""
        return (self.weights * to_sources(gram, self.window, -1)) @ self.errors

    def end(self, delta, momentum, x):
        """`D` and `S` after the chunk's last token; `x [R, in]`."""
        d = self.decays
        new = d.a[..., -1, None, None] * delta - self._outer(self.weights[..., -1, :], x)
        if momentum is None:
            return new, None
        new = new - d.m[..., -1, None, None] * momentum
        weights = ((d.momentum[..., -1, :] * d.eta)[..., None, :] @ self.source_weights)[..., 0, :]
        return new, d.beta[..., -1, None, None] * momentum + self._outer(weights, x)

    def _outer(self, weights, x):
        errors = sum_over_tokens(weights[..., None] * self.errors, self.window)
        return errors.transpose(-1, -2) @ x


class MuonWrites:
    """Muon without carried momentum: `S_t = E^T diag(A_t) X`, orthogonalised in token space (recurrence, section 6)."""

    def __init__(self, decays: Decays, source_weights, errors, window, gram_x, positions, rate, options):
        # Gradient weights A [W, P] and write sizes [b, W] at the written positions
        accumulated = source_weights if decays.momentum is None else decays.momentum @ source_weights
        self.accumulated = accumulated[..., positions, :]
        self.sizes = rate * (decays.retention * decays.eta[..., None, :])[..., positions]
        self.decays, self.errors, self.window = decays, errors, window
        gram_e = (errors @ errors.transpose(-1, -2))[..., None, :, :]
        gram_e = self.accumulated[..., :, None] * gram_e * self.accumulated[..., None, :]
        gram_e = sum_over_tokens(sum_over_tokens(gram_e, window).transpose(-1, -2), window)
        self.factors = newton_schulz_factors(
            gram_e, gram_x[..., None, :, :], options.newton_schulz_steps, options.newton_schulz_coefficients
        )

    def offset(self, z, gram):
        # C_n (x z_t) for every write n and read t; then decayed and summed over the writes, per source
        seen = to_sources(gram[..., None, :, :] @ self.factors.transpose(-1, -2), self.window, -1)  # [W, b, P]
        weights = self.sizes.transpose(-1, -2)[..., None] * self.accumulated[..., :, None, :] * seen
        return weights.sum(-3) @ self.errors

    def end(self, delta, momentum, x):
        factors = to_sources(self.factors, self.window, -2) * self.accumulated[..., None]  # [W, P, R]
        combined = (self.sizes[..., -1, :, None, None] * factors).sum(-3)  # [P, R]
        return self.decays.a[..., -1, None, None] * delta - self.errors.transpose(-1, -2) @ (combined @ x), None


class DenseMuonWrites:
    """Muon with carried momentum: `S_t = beta_t S + E^T diag(A_t) X` has full rank and is orthogonalised as it is."""

    def __init__(self, decays: Decays, source_weights, errors, window, x, momentum, positions, rate, options):
        accumulated = decays.momentum @ source_weights
        self.decays = decays
        self.sizes = rate * (decays.retention * decays.eta[..., None, :])[..., positions]
        states = self._momentum_at(accumulated, decays.beta, errors, window, x, momentum)
        self.last = states[..., -1, :, :]
        self.steps = newton_schulz(
            states[..., positions, :, :], options.newton_schulz_steps, options.newton_schulz_coefficients
        )

    @staticmethod
    def _momentum_at(accumulated, beta, errors, window, x, momentum):
        sums = sum_over_tokens(accumulated[..., None] * errors[..., None, :, :], window)  # [b, R, out]
        fresh = sums.transpose(-1, -2) @ x[..., None, :, :]
        return beta[..., None, None] * momentum[..., None, :, :] + fresh

    def offset(self, z, gram):
        moved = z[..., None, :, :] @ self.steps.transpose(-1, -2)  # [W, b, out]
        return (self.sizes.transpose(-1, -2)[..., None] * moved).sum(-3)

    def end(self, delta, momentum, x):
        step = (self.sizes[..., -1, :, None, None] * self.steps).sum(-3)
        return self.decays.a[..., -1, None, None] * delta - step, self.last
