"""What one token does to the memory, and what it reads from it: the mathematics of decoding, on working states.

Legend: N rows (head and sequence), H heads, K key width, V value width, E hidden width, G hidden matrices, F features,
c window, b chunk, R slots (of `OnePlace`: those that are filled). Layout `[N, ...]`.

What the chunk's writes need of a token stays the same as long as the chunk lasts, since they are taken at the matrices of
its start; so it is computed once, when the token comes, and kept for the last c - 1 tokens (`step_seen`).
"""

import torch

from .dispatch import select_factors
from .memory_network import activate, activate_with_derivative
from .newton_schulz import newton_schulz, newton_schulz_factors, precise
from .recurrence_operator import Call
from .recurrence_state import State
from .step_layout import TOKENS, TokenLayout, squared_length

# `[N, c - 1, S]`, oldest first, see `StepWrites.look`; a row's own tensor, as `step_tokens` is.
SEEN = "step_seen"


class _Matrix:
    """Names and rules of one memory matrix; its tensors live in the working state."""

    def __init__(self, index: int, by_muon: bool, carry: bool, rate: float):
        self.index = index
        self.delta, self.momentum = f"matrix_{index}", f"momentum_{index}"
        self.offset, self.gradient = f"step_offset_{index}", f"step_gradient_{index}"
        self.by_muon, self.carry, self.rate = by_muon, carry, rate
        self.dense = by_muon and carry


class StepWrites:
    """One call's options, memory and matrices, and what a token does by them."""

    def __init__(self, call: Call):
        self.call, self.options = call, call.options
        self.memory, self.feature_map = call.memory, call.feature_map
        self.deep, self.num_hidden = len(call.memory) > 1, len(call.memory) - 1
        self.batch, self.heads = call.q.shape[0], call.q.shape[2]
        self.window, self.earlier = call.tokens.gamma.shape[-1], call.tokens.gamma.shape[-1] - 1
        self.slots = self.earlier + call.options.chunk_size
        key_dim, value_dim = call.q.shape[-1], call.memory[0].shape[1]
        self.layout = TokenLayout(
            key_dim, value_dim, call.feature_map, self.window, call.options.chunk_size, self.heads
        )
        output_rate, hidden_rate = call.options.rates(call.memory[0].shape[-1])
        muon, carry = call.options.rule == "muon", call.options.momentum == "carry"
        self.matrices = [_Matrix(0, call.options.output_by_muon, carry, output_rate)]
        self.matrices += [_Matrix(i, muon, carry, hidden_rate) for i in range(1, len(call.memory))]
        self.output, self.hidden = self.matrices[0], self.matrices[1:]
        # Those that read the features
        self.entry = self.hidden or [self.output]
        self.shared = call.options.decay_to == "init"
        # Widths of `step_seen`: slopes of the hidden units, error and what moves it, scale of the output's gradient
        self.seen = [call.memory[0].shape[-1]] * self.num_hidden + [value_dim]
        if self.options.errors_follow_writes:
            self.seen += [value_dim] * (2 if self._follows_momentum else 1)
        self.seen += [1] if self.options.inner_norm else []
        self.rho = None
        if call.residual_scale is not None:
            self.rho = call.residual_scale.repeat_interleave(self.batch)[:, None, None]
        self.factors = select_factors(call.kernels, self.slots, call.q) or newton_schulz_factors

    @property
    def _follows_momentum(self) -> bool:
        """Whether the output matrix moves by the momentum at the chunk's start too."""
        return self.output.carry and not self.output.by_muon

    # Products with the memory's start, one a head for all its rows

    def start(self, m: _Matrix):
        """`M_0^T [H, in, out]`, where there is a start to fade to."""
        return self.memory[m.index].mT if self.shared else None

    def plus_shared(self, y, x, matrix):
        """`y [N, n, out] + x [N, n, in] matrix`, `matrix [H, in, out]` or None for zero; `y` may be None."""
        if matrix is None:
            return y
        by_head = x.reshape(self.heads, -1, x.shape[-1])
        if y is None:
            return torch.bmm(by_head, matrix).view(*x.shape[:-1], matrix.shape[-1])
        return torch.baddbmm(y.reshape(self.heads, -1, y.shape[-1]), by_head, matrix).view(y.shape)

    def products(self, work: State, matrices, x) -> tuple[list, list]:
        """`D x` and `M_0 x` (or None) of each matrix for `x [N, n, in]`, each `[N, n, out]`."""
        moved = [torch.bmm(x, work[m.delta].mT) for m in matrices]
        return moved, [self.plus_shared(None, x, self.start(m)) for m in matrices]

    def at_start(self, moved: list, base: list) -> torch.Tensor:
        """The sum of both, of all matrices side by side: what they give as they stood at the chunk's start."""
        whole = [m if b is None else m + b for m, b in zip(moved, base, strict=True)]
        return whole[0] if len(whole) == 1 else torch.cat(whole, -1)

    # One token

    def look(self, work: State, phi, k, v, moved: list, base: list) -> tuple[torch.Tensor, torch.Tensor]:
        """What the chunk's writes need of `n` tokens: `step_seen`'s rows `[N, n, S]`, and the output matrix' inputs.

        `phi [N, n, F]`, `k`, `v`; `moved`, `base`: `products` of the matrices that read the features.
        """
        options, slopes, x = self.options, [], phi
        size = squared_length(phi) if options.inner_norm else None
        if self.deep:
            x, slope = activate_with_derivative(self.at_start(moved, base), self.num_hidden)
            if options.inner_norm:
                columns = work["step_columns"]
                columns = (columns if self.num_hidden == 1 else columns.repeat(1, self.num_hidden))[..., None]
                slope = slope / (torch.bmm(slope.square(), columns).clamp_min(1) * size)
                size = squared_length(x)
            slopes = [slope]
            if options.inner_loss == "l2":
                moved, base = self.products(work, [self.output], x)
        parts = []
        if options.inner_loss == "dot":
            error = -v
        else:
            error = -v if base[0] is None else base[0] - v
            error = error if self.rho is None else error + self.rho * k
            if options.errors_follow_writes:
                parts = [moved[0]]
                parts += [torch.bmm(x, work[self.output.momentum].mT)] if self._follows_momentum else []
            else:
                error = error + moved[0]
        parts = [*slopes, error, *parts]
        return torch.cat([*parts, size.reciprocal()] if size is not None else parts, -1), x

    def write(self, work: State, token: torch.Tensor, phi, moved, base, place) -> tuple[State, torch.Tensor]:
        """The state after this token's writes, and the tokens of the filled slots `[N, R, W]`.

        `token [N, 1, W]`; `phi`, `moved`, `base`: as `look` takes them.
        """
        options, new = self.options, dict(work)
        own = self.layout.split(token)
        new[TOKENS] = place.put(work[TOKENS], token)
        tokens = place.filled(new[TOKENS], token)
        features = tokens[..., self.layout.phi]
        seen, x = self.look(work, phi, own["k"], own["v"], moved, base)
        seen = torch.cat([work[SEEN], seen], 1)
        new[SEEN] = seen[:, 1:]
        if self.deep:
            new["step_x"] = place.put(work["step_x"], x)
            x = place.filled(new["step_x"])
        else:
            x = features

        columns = seen.split_with_sizes(self.seen, -1)
        slopes, error, parts = columns[: self.num_hidden], columns[self.num_hidden], columns[self.num_hidden + 1 :]
        log_a = work["step_log_a"].view(-1, 1, 1)
        if options.errors_follow_writes:
            error = self._error_now(work, error, parts, log_a.exp(), x, place)
        weight = own["gamma"].flip(-1).mT  # [N, c, 1]
        by_gd = weight * own["eta"]
        weights = [weight if m.by_muon else by_gd if m.rate == 1 else by_gd * m.rate for m in self.matrices]
        if options.inner_norm:
            weights[0] = weights[0] * parts[-1]
        gradients = [error]
        if self.deep:
            back = torch.bmm(error, work[self.output.delta])
            back = self.plus_shared(back, error, self.memory[0] if self.shared else None)
            gradients += [back * slope for slope in slopes]
        alpha, gram = own["log_alpha"].exp(), None
        if place.muon_writes and options.momentum != "carry":
            k = precise(self.layout.split(tokens)["k"].unflatten(0, (self.heads, -1)))
            gram = (k @ k.mT if self.feature_map is None else self.feature_map.kernel(k, k)).flatten(0, 1)
        for m, gradient, weight in zip(self.matrices, gradients, weights, strict=True):
            inputs = x if m.index == 0 else features
            offset = work[m.offset] * alpha
            if options.momentum != "none":
                gradient = place.add(work[m.gradient] * own["log_theta"].exp(), gradient, weight)
                new[m.gradient] = gradient
            if not m.by_muon:
                new[m.offset] = offset + gradient if options.momentum != "none" else place.add(offset, gradient, weight)
                continue
            if options.momentum == "none":
                gradient = place.add(torch.zeros_like(offset), gradient, weight)
            if place.muon_writes:
                known = None if self.deep and m.index == 0 else gram
                step = self._orthogonal(work, m, place.filled(gradient), own, inputs, known)
                offset = place.add_filled(offset, step * (own["eta"] * m.rate))
            new[m.offset] = offset

        new["step_log_a"] = (log_a + own["log_alpha"]).view(-1)
        if options.momentum == "carry":
            new["step_log_beta"] = work["step_log_beta"] + own["log_theta"][:, 0, 0]
            new["step_m"] = alpha[:, 0, 0] * work["step_m"] + new["step_log_beta"].exp()
        new["position"] = work["position"] + 1
        return new, tokens

    def _error_now(self, work, error, parts, a, x, place):
        """Errors of the window's tokens `[N, c, V]` by the output matrix at its latest value, `a = exp(step_log_a)`."""
        error = torch.addcmul(error, parts[0], a)
        if self._follows_momentum:
            error = error - work["step_m"][:, None, None] * parts[1]
        gram = torch.bmm(place.in_window(x), x.mT)
        return torch.baddbmm(error, gram, place.filled(work[self.output.offset]), alpha=-1)

    def _orthogonal(self, work, m: _Matrix, gradient, own, x, gram):
        """The momentum with its singular values near one: in token space `[N, R, out]`, or dense `[N, out, in]`.

        `x [N, R, in]`: the matrix's inputs; `gram`: their inner products where they are known.
        """
        options = self.options
        if m.dense:
            beta = (work["step_log_beta"] + own["log_theta"][:, 0, 0]).exp()[:, None, None]
            state = torch.baddbmm(beta * work[m.momentum], gradient.mT, x)
            return newton_schulz(state, options.newton_schulz_steps, options.newton_schulz_coefficients)
        e = precise(gradient)
        gram = precise(x) @ precise(x).mT if gram is None else gram
        factors = self.factors(e @ e.mT, gram, options.newton_schulz_steps, options.newton_schulz_coefficients)
        return torch.bmm(factors.to(gradient.dtype).mT, gradient)

    def _now(self, work, m: _Matrix, a, z, gram, moved, base, place):
        """`W_t z` for `z [N, n, in]`, `gram = z x^T [N, n, R]`; `moved`, `base`: its `products`, `a = exp(step_log_a)`."""
        y = moved * a if base is None else torch.addcmul(base, moved, a)
        if m.carry and not m.by_muon:
            y = y - work["step_m"][:, None, None] * torch.bmm(z, work[m.momentum].mT)
        if m.dense:
            return torch.baddbmm(y, z, work[m.offset].mT, alpha=-1)
        return torch.baddbmm(y, gram, place.filled(work[m.offset]), alpha=-1)

    def read(self, work: State, tokens, q, phi, moved, base, place):
        """`M_t(q) [N, 1, V]` from `phi(q)` and its `products`; `work` and `tokens`: what `write` gave."""
        a = work["step_log_a"].view(-1, 1, 1).exp()
        z, gram = phi, torch.bmm(phi, tokens[..., self.layout.phi].mT)
        parts = zip(self.entry, moved, base, strict=True)
        parts = [self._now(work, m, a, phi, gram, d, b, place) for m, d, b in parts]
        y = parts[0]
        if self.deep:
            z = activate(parts[0] if len(parts) == 1 else torch.cat(parts, -1), self.num_hidden)
            gram = torch.bmm(z, place.filled(work["step_x"]).mT)
            (moved,), (base,) = self.products(work, [self.output], z)
            y = self._now(work, self.output, a, z, gram, moved, base, place)
        return y if self.rho is None else y + self.rho * q
