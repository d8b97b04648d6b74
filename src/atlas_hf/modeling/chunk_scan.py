"""One chunk of the recurrence, forwards (docs/recurrence.md, sections 5 and 6); `chunk_backward` goes on from here.

Legend: N rows (head and batch), H heads, b chunk, c window, R = b + c - 1 tokens in view, V value width, E hidden width, G
hidden matrices, F features, P error sources. `D_1 [N, V, E]` (linear: `[N, V, F]`) is the output matrix's delta, `D_2
[N, G E, F]` the stacked hidden matrices'; `S` their momentum, if carried.
"""

import torch

from .chunk_inputs import ChunkInputs, shared_product
from .chunk_writes import DenseMuonWrites, GradientWrites, MuonWrites, Sources
from .memory_network import activate, activate_with_derivative
from .newton_schulz import precise
from .recurrence_state import INNER_NORM_EPS


class ChunkScan:
    """The chunks of one call: its inputs, its options, and the forward half of a chunk."""

    def __init__(self, inputs: ChunkInputs, options, num_hidden: int, window: int, expansion: int):
        self.inputs, self.options, self.num_hidden = inputs, options, num_hidden
        self.b, self.view = options.chunk_size, options.chunk_size + window - 1
        self.pairwise = options.errors_follow_writes and window > 1
        self.sources = Sources(self.b, window, self.pairwise, inputs.phi_k)
        self.output_rate, self.hidden_rate = options.rates(expansion)

    def in_view(self, x, n):
        return x[:, n * self.b : n * self.b + self.view]

    def own(self, x, n):
        return x[:, n * self.b : (n + 1) * self.b]

    def shared(self, x):
        """`x [N, T, E]` by a deep memory's shared `W1`."""
        start = self.inputs.output_start
        return shared_product(x.unflatten(0, (len(start), -1)), start).flatten(0, 1)

    def shared_backward(self, grad, x, grads):
        """Gradient by `x [N, T, E]`; that by `W1` is added up over rows and tokens."""
        start = self.inputs.output_start
        by_head = grad.reshape(len(start), -1, grad.shape[-1])
        grads.output_start.baddbmm_(by_head.mT, x.reshape(len(start), -1, x.shape[-1]))
        return (by_head @ start).view_as(x)


class Chunk:
    """One chunk: `forward`, then `ending` and `end` where the state after it is asked for. Keeps its intermediates."""

    def __init__(self, scan: ChunkScan, n: int, state):
        """`state`: `D` of every matrix, then `S` of every one, at the chunk's start."""
        self.scan, self.inputs, self.options, self.n = scan, scan.inputs, scan.options, n
        self.matrices = len(state) // 2 if self.options.momentum == "carry" else len(state)
        self.deltas = state[: self.matrices]
        self.momenta = state[self.matrices :] or (None,) * self.matrices
        self.deep = self.matrices > 1
        self.phi_k = scan.in_view(self.inputs.phi_k, n)
        self.phi_q = scan.own(self.inputs.phi_q, n)

    def forward(self):
        """Outputs `[N, b, V]`; leaves in `kept` what `ChunkBackward.restore` makes the rest of."""
        scan, i, n = self.scan, self.inputs, self.n
        base_k = None if i.base_k is None else scan.in_view(i.base_k, n)
        base_q = None if i.base_q is None else scan.own(i.base_q, n)
        self._keys(self._hidden_of_keys(base_k) if self.deep else None)
        start = base_k
        if self.deep:
            start = None if i.output_start is None else scan.shared(self.x)
        errors = self._errors(start)
        self._write(errors)
        self._queries(self._read_hidden(base_q) if self.deep else None)
        base = base_q
        if self.deep:
            base = None if i.output_start is None else scan.shared(self.z)
        y = self.writes[0].read(base)
        self.kept = (self.hidden_k, self.hidden_q, errors)
        return y

    def _hidden_of_keys(self, base):
        hidden_delta = self.deltas[1].mT
        return self.phi_k @ hidden_delta if base is None else torch.baddbmm(base, self.phi_k, hidden_delta)

    def _keys(self, hidden):
        """What the output matrix reads at the keys: activations of the hidden pre-activations, or the features."""
        self.hidden_k = hidden
        if hidden is None:
            self.x = self.phi_k
        else:
            self.x, self.slope = activate_with_derivative(hidden, self.scan.num_hidden)
            self.current = self.deltas[0]
            start = self.inputs.output_start
            if start is not None:
                self.current = (self.current.unflatten(0, (len(start), -1)) + start[:, None]).flatten(0, 1)
        self._output_step()

    def _queries(self, hidden):
        """What the output matrix reads at the queries, and its inner products with the keys'."""
        self.hidden_q = hidden
        if hidden is None:
            self.z, gram = self.phi_q, self.inputs.gram_qk[:, self.n]
        else:
            self.z = activate(hidden, self.scan.num_hidden)
            gram = self.z @ (self.x if self.options.output_by_muon else self.x_stepped).mT
        self.writes[0].reading(self.z, gram)

    def _output_step(self):
        """The normalised step of the output matrix: with gd in its inputs, with Muon in the errors."""
        self.step = None
        if self.options.inner_norm:
            if self.deep:
                self.step = 1 / (self.x.square().sum(-1) + INNER_NORM_EPS)
            else:
                self.step = self.scan.in_view(self.inputs.step_k, self.n)
        self.x_stepped = self.x if self.step is None else self.x * self.step[..., None]

    def _errors(self, start):
        """Errors of the sources: of tokens at the chunk's start, or of pairs at the latest write (paper, Eq. 10, 11).

        For pairs one unit lower-triangular solve: a pair at write `n` sees the writes before `n`.
        """
        scan, sources, i, n = self.scan, self.scan.sources, self.inputs, self.n
        target = scan.in_view(i.target, n)
        if self.options.inner_loss == "dot":
            return -target
        moved = self.x @ self.deltas[0].mT
        begin = -target if start is None else start - target
        if not self.options.errors_follow_writes:
            return begin.add_(moved)
        self._pair_system()
        errors = torch.addcmul(sources.expand_rows(begin), sources.expand_rows(moved), self._before(i.a_before))
        if self.momenta[0] is not None:
            self.carried = self.x @ self.momenta[0].mT
            errors.addcmul_(sources.expand_rows(self.carried), self._before(i.m_before), value=-1)
        errors = errors.reshape(errors.shape[0], scan.b * sources.c, -1)
        self.errors = torch.linalg.solve_triangular(self.system, errors, upper=False, unitriangular=True)
        return self.errors

    def _before(self, decay):
        """`a` or `m` before each write, `[N, n, b]`, in the shape of a factor of the sources' rows."""
        return decay[:, self.n].view(-1, self.scan.b, *(1,) * (2 if self.scan.pairwise else 1))

    def _pair_system(self):
        """What a source's error sees of the errors before it, `[N, P, P]` below the diagonal."""
        scan, sources, i, n = self.scan, self.scan.sources, self.inputs, self.n
        gram = self.x @ self.x_stepped.mT if self.deep else i.gram_kk[:, n]
        b, c = scan.b, sources.c
        # Rows and columns by pairs: [N, n, m, n', m'], and without a window [N, n, n']
        self.gram_pairs = sources.expand_columns(gram)
        if scan.pairwise:
            self.gram_pairs = self.gram_pairs.unfold(1, c, 1).movedim(-1, 2)
        before = sources.grouped(i.weights[:, n, : b - 1])
        if scan.pairwise:
            before = before[:, :, None]
        system = self.gram_pairs.new_zeros(self.gram_pairs.shape)
        system[:, 1:] = self.gram_pairs[:, 1:] * before
        self.system = system.view(system.shape[0], b * c, b * c)

    def _write(self, errors):
        self.writes = [self._write_output(errors)]
        if self.deep:
            self._write_hidden(errors)

    def _write_output(self, errors):
        scan, n = self.scan, self.n
        self.raw_errors = errors
        if not self.options.output_by_muon:
            # A linear memory's step is in `gram_kk` and `gram_qk` too
            return GradientWrites(self.inputs, n, scan.sources, self.deltas[0], self.momenta[0], self.x_stepped, errors)
        stepped = errors if self.step is None else errors * self.step[..., None]
        if self.momenta[0] is not None:
            return DenseMuonWrites(
                self.inputs,
                n,
                scan.sources,
                self.deltas[0],
                self.momenta[0],
                self.x,
                stepped,
                scan.output_rate,
                self.options,
            )
        x = precise(self.x)
        self.gram_x = x @ x.mT if self.deep else self.inputs.gram_kk[:, n]
        return MuonWrites(
            self.inputs, n, scan.sources, self.deltas[0], self.x, stepped, self.gram_x, scan.output_rate, self.options
        )

    def _write_hidden(self, errors):
        """Back-propagated errors at the chunk's start: `e W1`, times the slopes and the normalised step of the tokens."""
        scan, i, n = self.scan, self.inputs, self.n
        groups, rows = scan.num_hidden, errors.shape[0]
        by_muon = self.options.rule == "muon"
        self.scale = None if by_muon else scan.hidden_rate
        if self.options.inner_norm:
            self.gain = self._gain()
            size = scan.in_view(i.step_k, n) / self.gain.clamp_min(1)
            self.scale = size if by_muon else size * scan.hidden_rate
            self.slope_scaled = self.slope * self.scale[..., None]
        else:
            self.slope_scaled = self.slope if by_muon else self.slope * scan.hidden_rate
        self.back = errors @ self.current  # [N, P, E]
        slopes = scan.sources.expand_rows(self.slope_scaled)
        back = self._stacked(self.back).view(slopes.shape) * slopes
        hidden_errors = back.view(rows, -1, self.slope.shape[-1])  # [N, P, G E]
        if not by_muon:
            self.writes.append(
                GradientWrites(i, n, scan.sources, self.deltas[1], self.momenta[1], self.phi_k, hidden_errors)
            )
            return
        # Each matrix is orthogonalised by itself
        for part in range(groups):
            delta, e = self.deltas[1].chunk(groups, 1)[part], hidden_errors.chunk(groups, 2)[part]
            if self.momenta[1] is None:
                gram = i.gram_kk[:, n]
                write = MuonWrites(i, n, scan.sources, delta, self.phi_k, e, gram, scan.hidden_rate, self.options)
            else:
                momentum = self.momenta[1].chunk(groups, 1)[part]
                write = DenseMuonWrites(
                    i, n, scan.sources, delta, momentum, self.phi_k, e, scan.hidden_rate, self.options
                )
            self.writes.append(write)

    def _stacked(self, back):
        """`[..., E] -> [..., G E]`: the same for every hidden matrix."""
        return back if self.scan.num_hidden == 1 else back.repeat(1, 1, self.scan.num_hidden)

    def _gain(self):
        """How strongly a token's hidden pre-activations move its output: `|W1 diag(dh/du)|_F^2 [N, R]`, all hidden matrices.

        A step of the hidden matrices changes the output by up to this times the error, so the normalised step divides by it
        where it exceeds 1. Without that, an output matrix that has grown makes the hidden matrices overshoot, and a gated
        memory, whose activations are products, diverges.
        """
        self.columns = (self.current * self.current).sum(1)  # [N, E]
        lengths = self.columns.sqrt().repeat(1, self.scan.num_hidden)
        return torch.linalg.vector_norm(self.slope * lengths[:, None], dim=-1).square()

    def _read_hidden(self, base):
        groups = len(self.writes) - 1
        bases = [None] * groups if base is None else base.chunk(groups, -1)
        for write in self.writes[1:]:
            write.reading(self.phi_q, self.inputs.gram_qk[:, self.n])
        parts = [w.read(x) for w, x in zip(self.writes[1:], bases, strict=True)]
        return parts[0] if groups == 1 else torch.cat(parts, -1)

    def ending(self):
        """What the chunk's writes leave behind, which `end` and `backward` both need."""
        for write in self.writes:
            write.ending()

    def end(self):
        """The state after the chunk's last token; after `ending`."""
        ends = [w.end() for w in self.writes]
        if len(ends) > 2:
            ends = [ends[0], tuple(None if x[0] is None else torch.cat(x, 1) for x in zip(*ends[1:], strict=True))]
        deltas, momenta = zip(*ends, strict=True)
        return deltas if self.momenta[0] is None else deltas + momenta
