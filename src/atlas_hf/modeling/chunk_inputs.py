"""What the chunks of a sequence need and does not depend on the memory's state: taken for all of them at once.

Legend: N = H B rows (head first), b chunk, c window, R = b + c - 1 tokens in view (c - 1 earlier ones and the chunk's), L
tokens on the grid, n chunks, K key width, V value width, F features, E hidden width, G hidden matrices, W written positions,
P error sources: the R tokens, or with exact errors the b c pairs of a write and a token of its window.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from .memory_network import stack_hidden
from .newton_schulz import precise
from .recurrence_operator import Call, complete_rows
from .recurrence_state import INNER_NORM_EPS, Grid


def log_products(log_gate: torch.Tensor) -> torch.Tensor:
    """`[..., b] -> [..., b, b]`: entry `t, n` is `sum_{n < u <= t} log_gate_u`, `-inf` for `n > t`.

    Summed afresh from every `n`: a difference of running sums would lose the small terms after a large one.
    """
    size = log_gate.shape[-1]
    ones = torch.ones(size, size, dtype=torch.bool, device=log_gate.device)
    terms = torch.where(ones.tril(-1), log_gate[..., None], 0.0)
    return terms.cumsum(-2).masked_fill(ones.triu(1), -torch.inf)


class ChunkInputs(NamedTuple):
    """Everything the scan reads, and gives gradients for. `None`: not a part of this member of the family."""

    # Tokens: the keys' with c - 1 places before the first chunk
    phi_k: torch.Tensor  # [N, c-1+L, F]
    base_k: torch.Tensor | None  # M_0 phi(k) [N, c-1+L, G E], of a linear memory [N, c-1+L, V]
    step_k: torch.Tensor | None  # 1 / |phi(k)|^2 [N, c-1+L], the normalised step
    target: torch.Tensor  # v, less the residual [N, c-1+L, V]
    phi_q: torch.Tensor  # [N, L, F]
    base_q: torch.Tensor | None
    output_start: torch.Tensor | None  # a deep memory's W1 [H, V, E], where the memory fades to its start
    gram_kk: torch.Tensor | None  # phi(k) . phi(k) [N, n, R, R]; for Muon in double, for gd with columns times step_k
    gram_qk: torch.Tensor  # phi(q) . phi(k) [N, n, b, R]; likewise if the memory is linear
    # Decays (docs/recurrence.md, section 5): a_t, what is left of D, and m_t of S, after and before each write, and at the
    # chunk's end
    a: torch.Tensor  # [N, n, b]
    a_before: torch.Tensor
    a_end: torch.Tensor  # [N, n]
    m: torch.Tensor | None
    m_before: torch.Tensor | None
    m_end: torch.Tensor | None
    beta_end: torch.Tensor | None
    # gd: weight of each source's error in `D` at t, and in `D` and `S` at the chunk's end
    weights: torch.Tensor | None  # [N, n, b, P]
    end_weights: torch.Tensor | None  # [N, n, P]
    end_momentum: torch.Tensor | None  # [N, n, P]
    # Muon: weight of each source's error in the momentum at each write, how much of a write is left at t and at the end
    accumulated: torch.Tensor | None  # [N, n, W, P]
    sizes: torch.Tensor | None  # [N, n, b, W]
    end_sizes: torch.Tensor | None  # [N, n, W]
    beta: torch.Tensor | None  # decay of a carried momentum by each position [N, n, b]
    complete: torch.Tensor  # whether the chunk ends inside the grid [N, n] bool


def shared_product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """`x [H, B, T, in]` times one matrix a head, `[H, out, in]`, for all rows and tokens at once."""
    return (x.flatten(1, 2) @ matrix.transpose(-1, -2)).view(*x.shape[:-1], -1)


def _source_weights(gamma, pairwise: bool):
    """`gamma [..., b, c]` (oldest first) spread over the sources: `[..., b, P]`, row `t` the window that ends at `t`."""
    b, c = gamma.shape[-2:]
    if pairwise:
        own = torch.eye(b, dtype=gamma.dtype, device=gamma.device)[:, :, None]
        return (own * gamma[..., None, :]).flatten(-2)
    # Row t begins at token t: rows of R + 1 numbers, read as rows of R
    view = b + c - 1
    rows = pad(gamma, (0, view + 1 - c))
    return rows.flatten(-2)[..., : b * view].unflatten(-1, (b, view))


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """`[B, T, H, ...] -> [H, B, T, ...]`."""
    return x.movedim(2, 0).contiguous()


def features_of_rows(x: torch.Tensor, feature_map) -> torch.Tensor:
    """`phi_k` or `phi_q` once more, from keys or queries: `[B, T, H, K] -> [N, T, F]`."""
    x = heads_first(x)
    return (x if feature_map is None else feature_map(x)).flatten(0, 1)


def gather_inputs(grid: Grid, call: Call, pairwise: bool) -> ChunkInputs:
    """All chunks' inputs; differentiable. `pairwise`: the sources are pairs."""
    options, memory, feature_map = call.options, call.memory, call.feature_map
    b, c = options.chunk_size, grid.tokens.gamma.shape[-1]
    deep, hidden_muon, output_muon = len(memory) > 1, options.rule == "muon", options.output_by_muon

    def in_view(x):
        return x.unfold(2, b + c - 1, b).movedim(-1, 3)

    def kernel(x, y):
        return x @ y.transpose(-1, -2) if feature_map is None else feature_map.kernel(x, y)

    k, v, log_alpha, eta, log_theta, gamma = grid.tokens.map(heads_first)
    q = heads_first(grid.q)
    phi_k, phi_q = (k, q) if feature_map is None else (feature_map(k), feature_map(q))
    target = v
    if call.residual_scale is not None and options.inner_loss == "l2":
        target = v - call.residual_scale[:, None, None, None] * k
    step_k = None
    if options.inner_norm:
        norm = k.square().sum(-1) if feature_map is None else feature_map.squared_norm(k)
        step_k = 1 / (norm + INNER_NORM_EPS)
    base_k = base_q = output_start = None
    if options.decay_to == "init":
        entry = stack_hidden(memory[1:]) if deep else memory[0]
        base_k, base_q = shared_product(phi_k, entry), shared_product(phi_q, entry)
        output_start = memory[0] if deep else None
    k_view = in_view(k)
    scale = None if deep or output_muon or step_k is None else in_view(step_k)[..., None, :]
    gram_kk = None
    in_token_space = hidden_muon and options.momentum != "carry"
    if in_token_space:
        gram_kk = kernel(precise(k_view), precise(k_view))
    elif options.errors_follow_writes and not deep:
        gram_kk = kernel(k_view, k_view) if scale is None else kernel(k_view, k_view) * scale
    gram_qk = kernel(q.unflatten(2, (-1, b)), k_view)
    gram_qk = gram_qk if scale is None else gram_qk * scale

    log_alpha, eta, log_theta, gamma = (
        x[:, :, c - 1 :].unflatten(2, (-1, b)) for x in (log_alpha, eta, log_theta, gamma)
    )
    # At a chunk's end, rows whose chunk goes on later stay as they are
    complete = _completeness(grid, q.device).expand(q.shape[1], -1)[None]  # [1, B, n]

    def at_end(x, otherwise):
        return torch.where(complete.view(*complete.shape, *[1] * (x.ndim - 3)), x, otherwise)

    retention = log_products(log_alpha).exp()
    a = log_alpha.cumsum(-1).exp()
    fields = {"a": a, "a_before": pad(a[..., :-1], (1, 0), value=1.0), "a_end": at_end(a[..., -1], 1.0)}
    sources = _source_weights(gamma.flip(-1), pairwise)  # oldest token of the window first, as the tokens lie
    momentum = None if options.momentum == "none" else log_products(log_theta).exp()
    accumulated = sources if momentum is None else momentum @ sources
    if options.momentum == "carry":
        beta = log_theta.cumsum(-1).exp()
        fields["beta_end"] = at_end(beta[..., -1], 1.0)
        fields["beta"] = beta
    if not output_muon or not hidden_muon:
        gd = retention if momentum is None else retention @ momentum
        weights = (gd * eta[..., None, :]) @ sources
        fields |= {"weights": weights, "end_weights": at_end(weights[..., -1, :], 0.0)}
        if options.momentum == "carry":
            m = (retention @ beta[..., None])[..., 0]
            fields |= {"m": m, "m_before": pad(m[..., :-1], (1, 0)), "m_end": at_end(m[..., -1], 0.0)}
            last = ((momentum[..., -1, :] * eta)[..., None, :] @ sources)[..., 0, :]
            fields["end_momentum"] = at_end(last, 0.0)
    if hidden_muon:
        written = slice(options.muon_interval - 1, None, options.muon_interval)
        # A carried momentum is orthogonalised as it stands, and needed at the chunk's end too: at every position
        positions = slice(None) if options.momentum == "carry" else written
        fields["accumulated"] = accumulated[..., positions, :]
        sizes = (retention * eta[..., None, :])[..., written]
        fields |= {"sizes": sizes, "end_sizes": at_end(sizes[..., -1, :], 0.0)}

    fields |= {
        "complete": complete.expand(q.shape[0], -1, -1),
        "phi_k": phi_k,
        "base_k": base_k,
        "step_k": step_k,
        "target": target,
        "phi_q": phi_q,
        "base_q": base_q,
        "gram_kk": gram_kk,
        "gram_qk": gram_qk,
    }
    flat = {name: None if x is None else x.flatten(0, 1) for name, x in fields.items()}
    return ChunkInputs(**{**dict.fromkeys(ChunkInputs._fields), **flat, "output_start": output_start})


def _completeness(grid: Grid, device):
    """For every chunk `n`, which rows' chunk ends inside the grid: `[1, n]` or `[B, n]` bool."""
    return complete_rows(grid, torch.arange(grid.num_chunks, device=device)[:, None]).mT
