"""The recurrence in its dual form: a chunk is a handful of matrix products (docs/recurrence.md, sections 5 and 6).

Legend: H heads, B batch, N = H B rows, b chunk, R = b + c - 1 tokens in view, V value width, E hidden width, F features; `D =
M - M_0`, `S` momentum.
"""

import math

import torch

from .chunk_backward import ChunkBackward
from .chunk_inputs import ChunkInputs, features_of_rows, gather_inputs
from .chunk_scan import Chunk, ChunkScan
from .dispatch import select_walk
from .memory_network import stack_hidden
from .recompute import recomputed
from .recurrence_operator import Call, atlas_operator, on_grid
from .recurrence_state import Fast, Grid

# Inputs that only the outputs and the errors come from: the backward pass has the errors, and asks for no outputs. And the
# features, which are wider than the keys and queries that they are made of.
_NOT_KEPT = ("base_k", "base_q", "target", "phi_k", "phi_q")
_KEPT_OF_CHUNK = 3


class _Walk(torch.autograd.Function):
    """All chunks of a sequence, one after the other, as one node of the graph.

    Kept for the backward pass: the inputs, of every chunk the hidden pre-activations and the errors, in the inputs' place
    that they were made of, and the state at the start of every group of chunks. The backward pass goes through the groups
    from the last to the first, makes the rest of each chunk again, and then its gradients. Not twice differentiable.
    """

    @staticmethod
    def forward(ctx, settings, num_state, *tensors):
        state, inputs = tensors[:num_state], ChunkInputs(*tensors[num_state:])
        scan = ChunkScan(inputs, *settings.arguments)
        needed = settings.keeps and any(ctx.needs_input_grad)
        starts, kept, outputs = [], [], []
        groups = settings.groups(state, inputs)
        for first, last in groups:
            starts += state if needed else ()
            for n in range(first, last):
                chunk = Chunk(scan, n, state)
                outputs.append(chunk.forward())
                if needed:
                    kept += chunk.kept
                if settings.takes_end(n):
                    chunk.ending()
                    state = chunk.end()
        if needed:
            ctx.settings, ctx.num_state, ctx.groups = settings, num_state, groups
            ctx.shapes = ChunkInputs(*(None if x is None else x.shape for x in inputs))
            inputs = inputs._replace(**dict.fromkeys(_NOT_KEPT))
            ctx.save_for_backward(*settings.take_sources(), *starts, *kept, *inputs)
        # A state that no chunk changed is an input, and an output must be a tensor of its own
        return torch.cat(outputs, 1), *(x.clone() if any(x is s for s in tensors[:num_state]) else x for x in state)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy, *d_state):
        # Under autocast the products below would fall back to half precision.
        with torch.autocast(device_type=dy.device.type, enabled=False):
            return _Walk._gradients(ctx, dy, d_state)

    @staticmethod
    def _gradients(ctx, dy, d_state):
        settings, num_state, groups = ctx.settings, ctx.num_state, ctx.groups
        k, q, *saved = ctx.saved_tensors
        num_starts, num_kept = len(groups) * num_state, _KEPT_OF_CHUNK * settings.num_chunks
        inputs = ChunkInputs(*saved[num_starts + num_kept :])
        phi_k, phi_q = (features_of_rows(x, settings.feature_map) for x in (k, q))
        inputs = inputs._replace(phi_k=phi_k, phi_q=phi_q)
        scan = ChunkScan(inputs, *settings.arguments)
        grads = ChunkInputs(*(None if shape is None else dy.new_zeros(shape) for shape in ctx.shapes))
        for group in reversed(range(len(groups))):
            state, chunks = saved[group * num_state : (group + 1) * num_state], []
            first, last = groups[group]
            for n in range(first, last):
                chunk = ChunkBackward(scan, n, state)
                first_kept = num_starts + _KEPT_OF_CHUNK * n
                chunk.restore(saved[first_kept : first_kept + _KEPT_OF_CHUNK])
                chunks.append(chunk)
                if settings.takes_end(n):
                    chunk.ending()
                if n + 1 < last:
                    state = chunk.end()
            while chunks:
                chunk = chunks.pop()
                n, b = chunk.n, scan.b
                taken = settings.takes_end(n)
                before = chunk.backward(dy[:, n * b : (n + 1) * b], d_state if taken else None, grads)
                d_state = before if taken else tuple(x + y for x, y in zip(before, d_state, strict=True))
        return None, None, *d_state, *grads._replace(complete=None)


class _Settings:
    """What of a call is no input of the scan: its options, and what the features are made of."""

    def __init__(self, grid: Grid, call: Call, expansion: int):
        self.num_chunks, self.feature_map = grid.num_chunks, call.feature_map
        # Asked here, for inside the node no gradients are ever on
        self.keeps = torch.is_grad_enabled()
        self.sources = (grid.tokens.k.detach(), grid.q.detach())
        self.arguments = (call.options, len(call.memory) - 1, grid.tokens.gamma.shape[-1], expansion)
        # A last chunk that no row completes leaves the state as it is, and without a next chunk or a state to give back
        # nobody asks what stands at the end.
        unfinished = grid.complete is None and grid.length < grid.num_chunks * call.options.chunk_size
        self.last_end = self.num_chunks - (1 if unfinished or not call.needs_state else 0)

    def take_sources(self):
        """Keys and queries `[B, *, H, K]`, whose features need not be kept; only once, for the graph is to hold them."""
        sources, self.sources = self.sources, None
        return sources

    def takes_end(self, n: int) -> bool:
        return n < self.last_end

    def groups(self, state, inputs: ChunkInputs) -> list[tuple[int, int]]:
        """As small as keeping a state for each allows in an eighth of the inputs' room; at most `sqrt(n)` chunks."""
        size = math.isqrt(self.num_chunks)
        if not torch.compiler.is_exporting():  # where the batch may be a symbol, which this would pin down
            room = sum(x.numel() for x in inputs if x is not None) / 8
            fits = max(1, room // sum(x.numel() for x in state))
            size = min(math.ceil(self.num_chunks / fits), size)
        return [(first, min(first + size, self.num_chunks)) for first in range(0, self.num_chunks, size)]


# A compiler would unroll the loop over chunks, once for every length: minutes for what is a few large products anyway.
@torch.compiler.disable(reason="the loop over the sequence's chunks stays outside compiled graphs")
@atlas_operator
@on_grid
def chunk_atlas(grid: Grid, fast: Fast, call: Call):
    """The Atlas recurrence in its dual form, chunk by chunk, without a matrix per token.

    Derived in docs/recurrence.md, sections 2, 5 and 6. With `M` the memory, `S` its momentum, `xi` the start of the chunk and
    `G_t = sum_j gamma_t[j] grad loss_{t-j}`:

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
        muon_interval: Muon writes at every `muon_interval`-th token of a chunk; what comes after the last of them, where
            it does not divide `chunk_size`, is written with a carried momentum only. 1 with gd.
        newton_schulz_steps, newton_schulz_coefficients: `k >= 0` and the quintic's `(a, b, c)`.
        inner_norm: divide each matrix's error by its input's squared length (normalised least mean squares).
        hidden_rate: rate of the hidden matrices against the output matrix, `>= 0`; under Muon times `sqrt(E)`.
        decay_to: what retention fades the memory to: `"init"`, its start, or `"zero"`, as in the paper.
        lengths: `[B]`, number of real tokens of each row, 0 to `T`; the rest is padding and does not exist. On a GPU the
            numbers are not checked, which would wait for it.
        initial_state: a state returned by this function or one of its twins, to go on from; never changed in place.
        output_final_state: whether to return the state.
        cu_seqlens: `[N + 1]`, ends of `N` documents packed in a batch of one row, as in flash-linear-attention; states
            then have `N` rows. Documents are computed side by side, all as long as the longest.
        kernels: `"torch"`, `"triton"`, or `"auto"`: Triton on a GPU where it has a kernel for these options. No matter of
            the numbers, but for rounding.

    Returns:
        `y [B, T, H, V]` in v's dtype (zero at padding), and the state, a dictionary of float32 (for float64 inputs
        float64) tensors with the batch first, or `None`.

    Raises:
        ValueError: a shape, option or state that does not fit; the message names it. Or `kernels="triton"` cannot run.
        TypeError: an argument that is no tensor where one is needed.

    Differs from `naive_atlas` and `step_atlas` in speed alone. Training keeps each token's hidden pre-activations and errors,
    and the fast weights at the start of every group of chunks; the backward pass computes the rest again.
    """
    settings = _Settings(grid, call, call.memory[0].shape[-1])
    # W2 and W3 read the same features: one stacked matrix inside the scan
    matrices = [m if len(m) < 3 else (m[0], stack_hidden(m[1:])) for m in fast if m]
    state = [x.flatten(0, 1).contiguous() for m in matrices for x in m]
    pairwise = call.options.errors_follow_writes and grid.tokens.gamma.shape[-1] > 1
    walk = select_walk(
        call.kernels,
        call.options,
        len(call.memory),
        grid.tokens.gamma.shape[-1],
        call.q,
        key_dim=call.q.shape[-1],
        value_dim=call.tokens.v.shape[-1],
        hidden_dim=call.memory[0].shape[-1] if len(call.memory) > 1 else 0,
        features=call.memory[-1].shape[-1],
    )
    y, *state = (walk or _Walk.apply)(settings, len(state), *state, *recomputed(gather_inputs, grid, call, pairwise))
    heads, batch = call.q.shape[2], call.q.shape[0]
    y = y.unflatten(0, (heads, batch)).permute(1, 2, 0, 3)
    if call.residual_scale is not None:
        y = y + call.residual_scale[:, None] * grid.q
    state = [x.unflatten(0, (heads, batch)) for x in state]
    count = len(matrices[0])
    fast = Fast(tuple(state[:count]), tuple(state[count:]))
    if len(call.memory) == 3:
        fast = Fast(*((m[0], *m[1].chunk(2, -2)) if m else () for m in fast))
    return y, fast
