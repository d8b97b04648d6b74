"""How one matrix of the memory is written inside a chunk, in the dual form: no matrix per token is built.

Legend: b tokens of the chunk, R tokens in view (c - 1 earlier ones and the chunk's), W written positions, P error sources:
the R tokens, or with exact errors the b c pairs of a write and a token of its window, `p = (n, m)` with `i(p) = n + m`;
`e_p [P, out]` errors, `x_i [R, in]` inputs. Everything has leading axes `[H, B]`.

Every class gives, for its matrix, what the writes up to token `t` took away:

    W_t z = W_0 z + a_t D z - m_t S z - offset_t(z)         D, S at the chunk's start
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

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


def pairs_by_token(x: torch.Tensor, window: int) -> torch.Tensor:
    """Pairs ordered by their token: `[..., P, out] -> [..., R, c, out]`, zero where a token has no such pair."""
    pairs = x.unflatten(-2, (-1, window))
    shifted = [pad(pairs[..., m, :], (0, 0, m, window - 1 - m)) for m in range(window)]
    return torch.stack(shifted, -2)


def sum_over_tokens(x: torch.Tensor, window: int | None) -> torch.Tensor:
    """Add up the sources of each token: `[..., P, out] -> [..., R, out]`."""
    return x if window is None else pairs_by_token(x, window).sum(-2)


def errors_at_writes(decays: Decays, source_weights, errors, window, positions) -> torch.Tensor:
    """`E_t [W, R, out]`: every token's errors, weighted and decayed as the momentum of the writes at `positions` has them."""
    accumulated = source_weights if decays.momentum is None else decays.momentum @ source_weights
    accumulated = accumulated[..., positions, :]  # [W, P]
    if window is None:
        return accumulated[..., None] * errors[..., None, :, :]
    # A token has one pair in each of c windows: c terms for every write, summed by a matrix product for each token.
    terms = pairs_by_token(errors, window)  # [R, c, out]
    weights = pairs_by_token(accumulated.transpose(-1, -2), window).transpose(-1, -2)  # [R, W, c]
    return (weights @ terms).transpose(-3, -2)


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
    """Muon without carried momentum, in token space (recurrence, section 6).

    A write's momentum is `S_t = E_t^T X`, `E_t [R, out]` the errors of the tokens in view as decayed and summed by `t`;
    `NS(S_t) = E_t^T C_t X` needs the Gram matrices of `E_t` and `X` alone.
    """

    def __init__(self, decays: Decays, source_weights, errors, window, gram_x, positions, rate, options):
        self.decays = decays
        # How much of each write is left at each token [b, W]
        self.sizes = rate * (decays.retention * decays.eta[..., None, :])[..., positions]
        summed = errors_at_writes(decays, source_weights, errors, window, positions)  # E_t [W, R, out]
        factors = newton_schulz_factors(
            summed @ summed.transpose(-1, -2),
            gram_x[..., None, :, :],
            options.newton_schulz_steps,
            options.newton_schulz_coefficients,
        )
        self.steps = factors.transpose(-1, -2) @ summed  # C_t^T E_t [W, R, out]

    def offset(self, z, gram):
        weights = self.sizes[..., None] * gram[..., None, :]  # [b, W, R]
        return weights.flatten(-2) @ self.steps.flatten(-3, -2)

    def end(self, delta, momentum, x):
        combined = self.sizes[..., -1:, :] @ self.steps.flatten(-2)
        combined = combined.unflatten(-1, self.steps.shape[-2:])[..., 0, :, :]  # [R, out]
        return self.decays.a[..., -1, None, None] * delta - combined.transpose(-1, -2) @ x, None


class DenseMuonWrites:
    """Muon with carried momentum: `S_t = beta_t S + E^T diag(A_t) X` has full rank and is orthogonalised as it is."""

    def __init__(self, decays: Decays, source_weights, errors, window, x, momentum, positions, rate, options):
        self.decays = decays
        self.sizes = rate * (decays.retention * decays.eta[..., None, :])[..., positions]
        summed = errors_at_writes(decays, source_weights, errors, window, slice(None))
        fresh = summed.transpose(-1, -2) @ x[..., None, :, :]
        states = decays.beta[..., None, None] * momentum[..., None, :, :] + fresh
        self.last = states[..., -1, :, :]
        self.steps = newton_schulz(
            states[..., positions, :, :], options.newton_schulz_steps, options.newton_schulz_coefficients
        )

    def offset(self, z, gram):
        moved = z[..., None, :, :] @ self.steps.transpose(-1, -2)  # [W, b, out]
        return (self.sizes.transpose(-1, -2)[..., None] * moved).sum(-3)

    def end(self, delta, momentum, x):
        step = (self.sizes[..., -1, :, None, None] * self.steps).sum(-3)
        return self.decays.a[..., -1, None, None] * delta - step, self.last
