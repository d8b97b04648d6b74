"""The recurrence in its dual form: a chunk is a handful of matrix products (recurrence, sections 5 and 6).

Legend: H heads, B batch, N chunks, b chunk, c window, R = b + c - 1 tokens in view, K key width, V value width,
E hidden width, F features, G hidden matrices; `xi` the chunk's start, `D = M - M_0`, `S` momentum. Layout `[H, B, ...]`,
so that a product with the shared `M_0` is one matrix product a head for all rows and tokens.
"""

import math
from typing import NamedTuple

import torch
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from .chunk_writes import Decays, DenseMuonWrites, GradientWrites, MuonWrites, to_sources
from .memory_network import activate, activate_with_derivative, output_gain, stack_hidden
from .recurrence_operator import Call, atlas_operator, complete_rows, fold_rows, on_grid
from .recurrence_state import INNER_NORM_EPS, Fast, Grid


def log_products(log_gate: torch.Tensor) -> torch.Tensor:
    """`[..., b] -> [..., b, b]`: entry `t, n` is `sum_{n < u <= t} log_gate_u`, `-inf` for `n > t`.

    Summed afresh from every `n`: a difference of running sums would lose the small terms after a large one.
    """
    size = log_gate.shape[-1]
    ones = torch.ones(size, size, dtype=torch.bool, device=log_gate.device)
    terms = torch.where(ones.tril(-1), log_gate[..., None], 0.0)
    return terms.cumsum(-2).masked_fill(ones.triu(1), -torch.inf)


def shared_product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """`x [H, B, T, in]` times one matrix a head, `[H, out, in]`, for all rows and tokens at once."""
    return (x.flatten(1, 2) @ matrix.transpose(-1, -2)).view(*x.shape[:-1], -1)


def _chunk_gates(log_alpha, eta, log_theta, options):
    """`Decays` of all chunks, `[H, B, N, ...]`."""
    retention = log_products(log_alpha).exp()
    momentum = beta = m = None
    gd = retention
    if options.momentum != "none":
        momentum = log_products(log_theta).exp()
        gd = retention @ momentum
    if options.momentum == "carry":
        beta = log_theta.cumsum(-1).exp()
        m = (retention @ beta[..., None])[..., 0]
    return Decays(retention, momentum, eta, log_alpha.cumsum(-1).exp(), m, beta, gd * eta[..., None, :])


class Chunk(NamedTuple):
    """One chunk's tokens: in view `[H, B, R, ...]` and its own `[H, B, b, ...]`."""

    k: torch.Tensor
    phi_k: torch.Tensor
    base_k: torch.Tensor | None  # M_0 phi(k)
    phi_norm: torch.Tensor  # |phi(k)|^2
    target: torch.Tensor  # v, less the residual
    q: torch.Tensor
    phi_q: torch.Tensor
    base_q: torch.Tensor | None
    residual: torch.Tensor | None
    gamma: torch.Tensor
    decays: Decays


class _Scan:
    """Everything the chunks share: tokens in the scan's layout, products with `M_0`, gates."""

    def __init__(self, grid: Grid, call: Call):
        options, memory = call.options, call.memory
        self.options, self.feature_map, self.grid = options, call.feature_map, grid
        b, window = options.chunk_size, grid.tokens.gamma.shape[-1]
        self.chunk_size, self.window, self.view = b, window, b + window - 1
        self.deep = len(memory) > 1
        self.num_hidden = len(memory) - 1
        self.output_rate, self.hidden_rate = options.rates(memory[0].shape[-1])

        k, v, log_alpha, eta, log_theta, gamma = grid.tokens.map(self._heads_first)
        q = self._heads_first(grid.q)
        phi_k, phi_q = (k, q) if self.feature_map is None else (self.feature_map(k), self.feature_map(q))
        phi_norm = k.square().sum(-1) if self.feature_map is None else self.feature_map.squared_norm(k)
        target, residual = v, None
        if call.residual_scale is not None:
            rho = call.residual_scale[:, None, None, None]
            residual = rho * q
            target = v - rho * k if options.inner_loss == "l2" else v
        self.output_base = base_k = base_q = None
        if options.decay_to == "init":
            entry = stack_hidden(memory[1:]) if self.deep else memory[0]
            base_k, base_q = shared_product(phi_k, entry), shared_product(phi_q, entry)
            self.output_base = memory[0] if self.deep else None

        gates = [x[:, :, window - 1 :].unflatten(2, (-1, b)) for x in (log_alpha, eta, log_theta, gamma)]
        decays = [self._unbind(g) for g in vars(_chunk_gates(*gates[:3], options)).values()]
        views = [self._unbind(self._in_view(x)) for x in (k, phi_k, base_k, phi_norm, target)]
        own = [self._unbind(None if x is None else x.unflatten(2, (-1, b))) for x in (q, phi_q, base_q, residual)]
        # Oldest token of the window first, as the tokens lie
        gammas = self._unbind(gates[3].flip(-1))
        self.chunks = [
            Chunk(*(x[n] for x in (*views, *own)), gammas[n], Decays(*(g[n] for g in decays)))
            for n in range(grid.num_chunks)
        ]
        # A step reaches every `muon_interval`-th token of a chunk
        self.written = slice(options.muon_interval - 1, None, options.muon_interval)

    def _unbind(self, x):
        # All chunks at once: their gradients are then put together once, not added up in as many whole sequences.
        return [None] * self.grid.num_chunks if x is None else x.unbind(2)

    def _in_view(self, x):
        """`[H, B, c - 1 + N b, ...] -> [H, B, N, R, ...]`, the chunks with the tokens before each of them."""
        return None if x is None else x.unfold(2, self.view, self.chunk_size).movedim(-1, 3)

    @staticmethod
    def _heads_first(x):
        return x.movedim(2, 0).contiguous()

    def _kernel(self, x, y):
        return x @ y.transpose(-1, -2) if self.feature_map is None else self.feature_map.kernel(x, y)

    def _source_weights(self, gamma, pairwise: bool):
        """`gamma` spread over the sources: `[b, P]`, row `t` the window that ends at `t`."""
        b, c = self.chunk_size, self.window
        if pairwise:
            own = torch.eye(b, dtype=gamma.dtype, device=gamma.device)[:, :, None]
            return (own * gamma[..., None, :]).flatten(-2)
        # Row t begins at token t: rows of R + 1 numbers, read as rows of R
        rows = pad(gamma, (0, self.view + 1 - c))
        return rows.flatten(-2)[..., : b * self.view].unflatten(-1, (b, self.view))

    def _exact_errors(self, decays, gamma, weight, gram, start, moved, carried):
        """Errors that the output matrix's latest value makes, for all pairs: one unit lower-triangular solve.

        `weight [R]` scales each token's errors where they are written; `start [R, V]` is what `M_0` predicts less the
        target, `moved`, `carried` are `D x`, `S x`. Source: paper, Eq. 10 and 11.
        """
        c = self.window
        before = pad(decays.gd[..., :-1, :], (0, 0, 1, 0))  # the writes before each token
        gram = (gram * weight[..., None, :]).unfold(-2, c, 1).unfold(-2, c, 1)  # [n, n', m, m']
        weights = (before[..., None] * gamma[..., None, :, :])[..., None, :, :]  # [n, 1, n', m']
        system = (gram.transpose(-3, -2) * weights).flatten(-4, -3).flatten(-2)

        def pairs(x):
            return x.unfold(-2, c, 1).transpose(-1, -2)

        a = pad(decays.a[..., :-1], (1, 0), value=1.0)[..., None, None]
        errors = pairs(start) + a * pairs(moved)
        if carried is not None:
            errors = errors - pad(decays.m[..., :-1], (1, 0))[..., None, None] * pairs(carried)
        return torch.linalg.solve_triangular(system, errors.flatten(-3, -2), upper=False, unitriangular=True)

    def _writes(self, by_muon, decays, weights, errors, window, gram, x, momentum, rate):
        if not by_muon:
            return GradientWrites(decays, rate * weights, errors, window)
        if momentum is None:
            return MuonWrites(decays, weights, errors, window, gram, self.written, rate, self.options)
        return DenseMuonWrites(decays, weights, errors, window, x, momentum, self.written, rate, self.options)

    def _read(self, writes, by_muon, decays, base, delta, momentum, z, gram):
        value = decays.a[..., None] * (z @ delta.transpose(-1, -2)) - writes.offset(z, gram)
        if momentum is not None and not by_muon:
            value = value - decays.m[..., None] * (z @ momentum.transpose(-1, -2))
        return value if base is None else value + base

    def chunk(self, n: int, fast: Fast):
        """Outputs `[H, B, b, V]` and the fast weights after chunk `n`."""
        options = self.options
        k, phi_k, base_k, phi_norm, target, q, phi_q, base_q, residual, gamma, decays = self.chunks[n]
        delta, momentum = fast.delta, fast.momentum or (None,) * len(fast.delta)
        gram_phi = None if self.deep and options.rule == "gd" else self._kernel(k, k)

        # What the output matrix reads at the tokens in view, at the chunk's start
        if self.deep:
            hidden = phi_k @ delta[1].transpose(-1, -2)
            x, slope = activate_with_derivative(hidden if base_k is None else hidden + base_k, self.num_hidden)
            gram_x, norm = x @ x.transpose(-1, -2), x.square().sum(-1)
            start = None if self.output_base is None else shared_product(x, self.output_base)
            current = delta[0] if self.output_base is None else delta[0] + self.output_base[:, None]
        else:
            x, gram_x, norm, start = phi_k, gram_phi, phi_norm, base_k
        # The normalised step: a weight for each token's error
        step_x = step_phi = torch.ones_like(norm)
        if options.inner_norm:
            step_x, size = 1 / (norm + INNER_NORM_EPS), phi_norm + INNER_NORM_EPS
            step_phi = 1 / (size * output_gain(slope, current).clamp_min(1)) if self.deep else 1 / size

        # Errors of the sources: tokens at the chunk's start, or pairs at the latest write
        window = None
        if options.inner_loss == "dot":
            errors = -target
        else:
            moved = x @ delta[0].transpose(-1, -2)
            begin = -target if start is None else start - target
            if options.errors_follow_writes:
                carried = None if momentum[0] is None else x @ momentum[0].transpose(-1, -2)
                errors = self._exact_errors(decays, gamma, step_x, gram_x, begin, moved, carried)
                window = None if self.window == 1 else self.window
            else:
                errors = moved + begin
        weights = self._source_weights(gamma, window is not None)

        def stepped(step):
            return weights * to_sources(step, window, -1)[..., None, :]

        by_muon = options.output_by_muon
        output = self._writes(
            by_muon, decays, stepped(step_x), errors, window, gram_x, x, momentum[0], self.output_rate
        )
        folded = [output.end(delta[0], momentum[0], x)]

        z, gram_z, base = phi_q, None, base_q
        if self.deep:
            back = errors @ current
            back = (back.repeat(1, 1, 1, self.num_hidden) if self.num_hidden > 1 else back) * to_sources(
                slope, window, -2
            )
            gram_zk = self._kernel(q, k)
            sources = decays, stepped(step_phi), back, window
            hidden, end = self._hidden(sources, gram_phi, gram_zk, phi_k, phi_q, base_q, fast)
            folded.append(end)
            z = activate(hidden, self.num_hidden)
            gram_z = z @ x.transpose(-1, -2)
            base = None if self.output_base is None else shared_product(z, self.output_base)
        else:
            gram_z = self._kernel(q, k)
        y = self._read(output, by_muon, decays, base, delta[0], momentum[0], z, gram_z)
        if residual is not None:
            y = y + residual
        new = Fast(tuple(d for d, _ in folded), tuple(s for _, s in folded) if fast.momentum else ())
        return y, fold_rows(complete_rows(self.grid, n), new, fast)

    def _hidden(self, sources, gram_phi, gram_zk, phi_k, phi_q, base_q, fast):
        """Hidden pre-activations of the queries `[b, G E]`, and the stacked hidden matrices after the chunk."""
        decays, weights, errors, window = sources
        delta, momentum = fast.delta[1], fast.momentum[1] if fast.momentum else None
        by_muon = self.options.rule == "muon"
        # Each matrix is orthogonalised by itself; gd treats the stack as one
        groups = self.num_hidden if by_muon else 1
        reads, ends = [], []
        for part in range(groups):
            d, e = delta.chunk(groups, -2)[part], errors.chunk(groups, -1)[part]
            s = None if momentum is None else momentum.chunk(groups, -2)[part]
            base = None if base_q is None else base_q.chunk(groups, -1)[part]
            writes = self._writes(by_muon, decays, weights, e, window, gram_phi, phi_k, s, self.hidden_rate)
            reads.append(self._read(writes, by_muon, decays, base, d, s, phi_q, gram_zk))
            ends.append(writes.end(d, s, phi_k))
        new = torch.cat([d for d, _ in ends], -2)
        return torch.cat(reads, -1), (new, None if momentum is None else torch.cat([s for _, s in ends], -2))


@atlas_operator
@on_grid
def chunk_atlas(grid: Grid, fast: Fast, call: Call):
    """The Atlas recurrence in its dual form, chunk by chunk, without a matrix per token (recurrence, sections 2, 5 and 6).

    With `M` the memory, `S` its momentum, `xi` the start of the chunk and `G_t = sum_j gamma_t[j] grad loss_{t-j}`:

        gd     S_t = theta_t S_{t-1} + eta_t G_t    M_t = alpha_t M_{t-1} - S_t              paper, Eq. 10, 39
        muon   S_t = theta_t S_{t-1} + G_t          M_t = alpha_t M_{t-1} - eta_t NS(S_t)    paper, Eq. 32, 33
        y_t = M_t(q_t)

    Args:
        q, k: `[B, T, H, K]`, queries and keys; of unit length, unless the caller means otherwise.
        v: `[B, T, H, V]`, values.
        memory: the matrices the memory starts from, per head: `W [H, V, F]`, or `W1 [H, V, E], W2 [H, E, F]`, or these and
            `W3 [H, E, F]` (linear, mlp, gated; Eq. 42, 43).
        log_alpha: `[B, T, H]`, logarithm of the retention, `<= 0`.
        eta: `[B, T, H]`, inner learning rate, `>= 0`.
        log_theta: `[B, T, H]`, logarithm of the momentum decay, `<= 0`; may be `None` with `momentum="none"`.
        gamma: `[B, T, H, c]`, weights in [0, 1] of the window's tokens, newest first; its width is the window `c >= 1`.
        feature_map: `PolynomialFeatureMap`, or `None` for the identity (`F = K`).
        residual_scale: `[H]`, `rho` of Eq. 42, or `None` for zero; needs `V = K`.
        chunk_size: `b >= 1`, how long what is anchored stays anchored. Part of the model, not a matter of speed.
        rule: `"gd"` or `"muon"`.
        momentum: `"carry"` across chunks, `"restart"` from zero at each chunk's start, `"none"`.
        inner_loss: `"l2"` (Eq. 9) or `"dot"` (Eq. 19).
        output_errors: `"exact"`: the output matrix is written by gd and sees the error of its latest value (Eq. 10, 11);
            `"anchored"`: all gradients are taken at the chunk's start (Eq. 15, 16). With `rule="muon"`, `"exact"` leaves
            Muon to the hidden matrices.
        muon_interval: Muon writes at every so-manieth token of a chunk.
        newton_schulz_steps, newton_schulz_coefficients: `k >= 0` and the quintic's `(a, b, c)`.
        inner_norm: divide each matrix's error by its input's squared length (normalised least mean squares).
        hidden_rate: rate of the hidden matrices against the output matrix, `>= 0`; under Muon times `sqrt(E)`.
        decay_to: what retention fades the memory to: `"init"`, its start, or `"zero"`, as in the paper.
        lengths: `[B]`, number of real tokens of each row; the rest is padding and does not exist.
        initial_state: a state returned by this function or one of its twins, to go on from; never changed in place.
        output_final_state: whether to return the state.
        cu_seqlens: `[N + 1]`, ends of `N` documents packed in a batch of one row, as in flash-linear-attention; states
            then have `N` rows.

    Returns:
        `y [B, T, H, V]` in v's dtype (zero at padding), and the state, a dictionary of float32 (for float64 inputs
        float64) tensors with the batch first, or `None`.

    Raises:
        ValueError: a shape, option or state that does not fit; the message names it.

    Differs from `naive_atlas` and `step_atlas` in speed alone. Training keeps the fast weights at the start of every
    group of chunks, and computes the rest again in the backward pass.
    """
    scan = _Scan(grid, call)
    # W2 and W3 read the same features: one stacked matrix inside the scan
    stacked = Fast(*(tuple(m) if len(m) < 3 else (m[0], stack_hidden(m[1:])) for m in fast))
    carried = bool(stacked.momentum)

    def run(first: int, last: int, *flat: torch.Tensor):
        state = Fast(flat[: len(stacked.delta)], flat[len(stacked.delta) :])
        outputs = []
        for n in range(first, last):
            y, state = scan.chunk(n, state)
            outputs.append(y)
        return torch.cat(outputs, 2), *state.delta, *state.momentum

    # Kept for the backward pass: the fast weights at the start of every group of chunks. The rest is computed again.
    group = math.isqrt(grid.num_chunks)
    flat, outputs = (*stacked.delta, *stacked.momentum), []
    recompute = torch.is_grad_enabled() and grid.num_chunks >= 8
    for first in range(0, grid.num_chunks, group):
        last = min(first + group, grid.num_chunks)
        if recompute:
            y, *flat = checkpoint(run, first, last, *flat, use_reentrant=False, preserve_rng_state=False)
        else:
            y, *flat = run(first, last, *flat)
        outputs.append(y)
    y = torch.cat(outputs, 2).movedim(0, 2)
    state = Fast(tuple(flat[: len(stacked.delta)]), tuple(flat[len(stacked.delta) :]) if carried else ())
    if len(call.memory) == 3:
        state = Fast(*((m[0], *m[1].chunk(2, -2)) if m else () for m in state))
    return y, state
