"""One chunk of the recurrence, forwards and backwards, written out (recurrence, sections 5, 6 and 8).

Legend: N rows (head and batch), H heads, b chunk, c window, R = b + c - 1 tokens in view, V value width, E hidden width, G
hidden matrices, F features, P error sources. `D_1 [N, V, E]` (linear: `[N, V, F]`) is the output matrix's delta, `D_2
[N, G E, F]` the stacked hidden matrices'; `S` their momentum, if carried.

A chunk's forward half takes what stands at its start and returns its outputs and what stands at its end. With `keep` it
holds its intermediates, and the backward half turns gradients by results into gradients by arguments, in the reverse order.
"""

import torch

from .chunk_inputs import ChunkInputs, shared_product
from .chunk_writes import DenseMuonWrites, GradientWrites, MuonWrites, Sources
from .memory_network import activate, activate_backward, activate_with_derivative, derivative_backward
from .newton_schulz import precise
from .recurrence_state import INNER_NORM_EPS


class ChunkScan:
    """The chunks of one call: its inputs, its options, and the forward half of a chunk."""

    def __init__(self, inputs: ChunkInputs, options, num_hidden: int, window: int, expansion: int):
        self.inputs, self.options, self.num_hidden = inputs, options, num_hidden
        self.b, self.view = options.chunk_size, options.chunk_size + window - 1
        self.pairwise = options.errors_follow_writes and window > 1
        self.sources = Sources(self.b, window, self.pairwise, inputs.target)
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
    """One chunk: `forward` once, then `backward` once."""

    def __init__(self, scan: ChunkScan, n: int):
        self.scan, self.inputs, self.options, self.n = scan, scan.inputs, scan.options, n

    # Forwards

    def forward(self, state, with_end: bool):
        """`state`: `D` of every matrix, then `S` of every one. Outputs `[N, b, V]` and the state at the chunk's end."""
        scan, i, n = self.scan, self.inputs, self.n
        self.matrices = len(state) // 2 if self.options.momentum == "carry" else len(state)
        self.deltas = state[: self.matrices]
        self.momenta = state[self.matrices :] or (None,) * self.matrices
        self.phi_k = scan.in_view(i.phi_k, n)
        self.phi_q = scan.own(i.phi_q, n)
        base_k = None if i.base_k is None else scan.in_view(i.base_k, n)
        base_q = None if i.base_q is None else scan.own(i.base_q, n)
        deep = self.matrices > 1
        if deep:
            self._hidden_of_keys(base_k)
            start = None if i.output_start is None else scan.shared(self.x)
        else:
            self.x, start = self.phi_k, base_k
        self._output_step()
        errors = self._errors(start)
        self.writes = [self._write_output(errors)]
        if deep:
            self._write_hidden(errors)
            self.hidden_q = self._read_hidden(base_q)
            z = self.z = activate(self.hidden_q, scan.num_hidden)
            gram = z @ (self.x if self.options.output_by_muon else self.x_stepped).mT
            base = None if i.output_start is None else scan.shared(z)
        else:
            z, gram, base = self.phi_q, i.gram_qk[:, n], base_q
        y = self.writes[0].read(z, gram, base)
        return y, (self._end() if with_end else None)

    def _hidden_of_keys(self, base):
        hidden_delta = self.deltas[1].mT
        self.hidden_k = self.phi_k @ hidden_delta if base is None else torch.baddbmm(base, self.phi_k, hidden_delta)
        self.x, self.slope = activate_with_derivative(self.hidden_k, self.scan.num_hidden)
        self.current = self.deltas[0]
        start = self.inputs.output_start
        if start is not None:
            self.current = (self.current.unflatten(0, (len(start), -1)) + start[:, None]).flatten(0, 1)

    def _output_step(self):
        """The normalised step of the output matrix: with gd in its inputs, with Muon in the errors."""
        self.step = None
        if self.options.inner_norm:
            if self.matrices > 1:
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
        self.moved = self.x @ self.deltas[0].mT
        begin = -target if start is None else start - target
        if not self.options.errors_follow_writes:
            return begin.add_(self.moved)
        self.gram = self.x @ self.x_stepped.mT if self.matrices > 1 else i.gram_kk[:, n]
        b, c = scan.b, sources.c
        # Rows and columns by pairs: [N, n, m, n', m'], and without a window [N, n, n']
        self.gram_pairs = sources.expand_columns(self.gram)
        if scan.pairwise:
            self.gram_pairs = self.gram_pairs.unfold(1, c, 1).movedim(-1, 2)
        before = sources.grouped(i.weights[:, n, : b - 1])
        if scan.pairwise:
            before = before[:, :, None]
        system = self.gram_pairs.new_zeros(self.gram_pairs.shape)
        torch.mul(self.gram_pairs[:, 1:], before, out=system[:, 1:])
        self.system = system.view(len(system), b * c, b * c)
        a = i.a_before[:, n].view(len(system), b, *(1,) * (2 if scan.pairwise else 1))
        errors = torch.addcmul(sources.expand_rows(begin), sources.expand_rows(self.moved), a)
        if self.momenta[0] is not None:
            self.carried = self.x @ self.momenta[0].mT
            m = i.m_before[:, n].view_as(a)
            errors.addcmul_(sources.expand_rows(self.carried), m, value=-1)
        errors = errors.reshape(len(system), b * c, -1)
        self.errors = torch.linalg.solve_triangular(self.system, errors, upper=False, unitriangular=True)
        return self.errors

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
        self.gram_x = x @ x.mT if self.matrices > 1 else self.inputs.gram_kk[:, n]
        return MuonWrites(
            self.inputs, n, scan.sources, self.deltas[0], self.x, stepped, self.gram_x, scan.output_rate, self.options
        )

    def _write_hidden(self, errors):
        """Back-propagated errors at the chunk's start: `e W1`, times the slopes and the normalised step of the tokens."""
        scan, i, n = self.scan, self.inputs, self.n
        groups, rows = scan.num_hidden, len(errors)
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
        """`|W1 diag(dh/du)|_F^2` of each token, see `output_gain`."""
        self.columns = (self.current * self.current).sum(1)  # [N, E]
        columns = self.columns.repeat(1, self.scan.num_hidden)
        return (self.slope.square() @ columns[..., None])[..., 0]

    def _read_hidden(self, base):
        groups = len(self.writes) - 1
        bases = [None] * groups if base is None else base.chunk(groups, -1)
        gram = self.inputs.gram_qk[:, self.n]
        parts = [w.read(self.phi_q, gram, x) for w, x in zip(self.writes[1:], bases, strict=True)]
        return parts[0] if groups == 1 else torch.cat(parts, -1)

    def _end(self):
        ends = [w.end() for w in self.writes]
        if len(ends) > 2:
            ends = [ends[0], tuple(None if x[0] is None else torch.cat(x, 1) for x in zip(*ends[1:], strict=True))]
        deltas, momenta = zip(*ends, strict=True)
        return deltas if self.momenta[0] is None else deltas + momenta

    # Backwards

    def backward(self, dy, d_state, grads: ChunkInputs):
        """Gradients by the state at the chunk's start; `d_state` is None where the end was not taken."""
        scan, i, n = self.scan, self.inputs, self.n
        deep = self.matrices > 1
        parts = [None] * len(self.writes)
        if d_state is not None:
            d_deltas, d_momenta = d_state[: self.matrices], d_state[self.matrices :] or (None,) * self.matrices
            groups = len(self.writes) - 1
            parts[0] = d_deltas[0], d_momenta[0]
            for g in range(groups):
                momentum = None if d_momenta[1] is None else d_momenta[1].chunk(groups, 1)[g]
                parts[g + 1] = d_deltas[1].chunk(groups, 1)[g], momentum

        # Reads
        output = self.writes[0]
        if deep:
            dz, d_gram = output.read_backward(dy, grads)
            by_x = torch.zeros_like(self.x) if d_gram is None else d_gram.mT @ self.z
            other = torch.zeros_like(self.x)
            self.dx, self.dx_stepped = (by_x, other) if self.options.output_by_muon else (other, by_x)
            if d_gram is not None:
                dz.baddbmm_(d_gram, self.x if self.options.output_by_muon else self.x_stepped)
            if i.output_start is not None:
                dz += scan.shared_backward(dy, self.z, grads)
            self._read_hidden_backward(activate_backward(self.hidden_q, dz, scan.num_hidden), grads)
        else:
            dz, d_gram = output.read_backward(dy, grads)
            if i.base_q is not None:
                scan.own(grads.base_q, n).copy_(dy)
            scan.own(grads.phi_q, n).copy_(dz)
            if d_gram is not None:
                grads.gram_qk[:, n] += d_gram
            self.dx, self.dx_stepped = torch.zeros_like(self.x), torch.zeros_like(self.x)

        # Ends and writes
        d_phi = scan.in_view(grads.phi_k, n)
        d_hidden = []
        for index, write in enumerate(self.writes):
            to_features = deep and index > 0
            if parts[index] is not None:
                dx = write.end_backward(*parts[index], grads)
                if to_features:
                    d_phi += dx
                elif self.options.output_by_muon:
                    self.dx += dx
                else:
                    self.dx_stepped += dx
            d_delta, d_momentum, d_errors, d_gram_x, dx = write.finish(grads)
            if dx is not None:
                if to_features:
                    d_phi += dx
                else:
                    self.dx += dx
            if d_gram_x is not None:
                if to_features or not deep:
                    grads.gram_kk[:, n] += d_gram_x
                else:
                    self.dx.baddbmm_((d_gram_x + d_gram_x.mT).to(self.x.dtype), self.x)
            d_hidden.append((d_delta, d_momentum, d_errors))
        d_deltas, d_momenta = [d_hidden[0][0]], [d_hidden[0][1]]
        d_errors = d_hidden[0][2]
        self.d_step = None
        if self.options.output_by_muon and self.step is not None:
            self.d_step = (d_errors * self.raw_errors).sum(-1)
            d_errors = d_errors * self.step[..., None]
        if deep:
            d_delta, d_momentum, back = zip(*d_hidden[1:], strict=True)
            d_deltas.append(torch.cat(d_delta, 1) if len(d_delta) > 1 else d_delta[0])
            momentum = None if d_momentum[0] is None else torch.cat(d_momentum, 1)
            d_momenta.append(momentum)
            d_errors = d_errors + self._write_hidden_backward(torch.cat(back, 2) if len(back) > 1 else back[0], grads)
        d_start = self._errors_backward(d_errors, d_deltas, d_momenta, grads)
        if d_start is not None:
            if not deep:
                if i.base_k is not None:
                    scan.in_view(grads.base_k, n).add_(d_start)
            elif i.output_start is not None:
                self.dx += scan.shared_backward(d_start, self.x, grads)
        self._output_step_backward(grads)
        if deep:
            self._hidden_of_keys_backward(d_deltas, d_phi, grads)
        else:
            d_phi += self.dx
        return (*d_deltas, *(() if self.momenta[0] is None else d_momenta))

    def _read_hidden_backward(self, grad, grads):
        scan, n = self.scan, self.n
        groups = len(self.writes) - 1
        if self.inputs.base_q is not None:
            scan.own(grads.base_q, n).copy_(grad)
        d_phi = scan.own(grads.phi_q, n)
        for write, part in zip(self.writes[1:], grad.chunk(groups, -1), strict=True):
            dz, d_gram = write.read_backward(part, grads)
            d_phi += dz
            if d_gram is not None:
                grads.gram_qk[:, n] += d_gram

    def _write_hidden_backward(self, d_back, grads):
        """Gradient by the errors from that by the back-propagated errors `[N, P, G E]`."""
        scan, sources, n = self.scan, self.scan.sources, self.n
        slopes = sources.expand_rows(self.slope_scaled)
        d_scaled = (d_back * self._stacked(self.back)).view(slopes.shape)
        d_scaled = sources.collect_rows(d_scaled)  # [N, R, G E]
        d_error_back = (d_back.view(slopes.shape) * slopes).view(d_back.shape)
        if scan.num_hidden > 1:
            d_error_back = d_error_back.unflatten(-1, (scan.num_hidden, -1)).sum(2)
        d_errors = d_error_back @ self.current.mT
        self.d_current = self.raw_errors.mT @ d_error_back
        if not self.options.inner_norm:
            self.d_slope = d_scaled if self.scale is None else d_scaled * self.scale
            return d_errors
        self.d_slope = d_scaled * self.scale[..., None]
        d_scale = (d_scaled * self.slope).sum(-1)
        gain = self.gain.clamp_min(1)
        scan.in_view(grads.step_k, n).add_(d_scale * self.scale / scan.in_view(self.inputs.step_k, n))
        d_gain = torch.where(self.gain >= 1, -d_scale * self.scale / gain, 0.0)
        # gain_i = sum_e columns_e sum_g slope_ige^2
        weighted = self.slope * d_gain[..., None]
        self.d_slope.addcmul_(weighted, self.columns.repeat(1, scan.num_hidden)[:, None], value=2)
        d_columns = weighted.mul_(self.slope).sum(1).unflatten(-1, (scan.num_hidden, -1)).sum(1)
        self.d_current.addcmul_(self.current, d_columns[:, None], value=2)
        return d_errors

    def _errors_backward(self, grad, d_deltas, d_momenta, grads):
        """Gradient by the start's predictions `[N, R, V]`; those by `D_1`, `S_1` and `x` are added up."""
        scan, sources, i, n = self.scan, self.scan.sources, self.inputs, self.n
        if self.options.inner_loss == "dot":
            scan.in_view(grads.target, n).sub_(grad)
            return None
        if not self.options.errors_follow_writes:
            d_moved = d_start = grad
        else:
            grad = torch.linalg.solve_triangular(self.system.mT, grad, upper=True, unitriangular=True)
            d_system = -(grad @ self.errors.mT).view(self.gram_pairs.shape)[:, 1:]
            before = sources.grouped(i.weights[:, n, : scan.b - 1])
            d_before = d_system * self.gram_pairs[:, 1:]
            if scan.pairwise:
                before, d_before = before[:, :, None], d_before.sum(2)
            grads.weights[:, n, : scan.b - 1] += d_before.flatten(2)
            d_gram = sources.collect_columns(d_system * before)  # [N, n, (m,) R]
            if scan.pairwise:
                rows = d_gram.new_zeros(len(grad), scan.view, scan.view)
                for m in range(sources.c):
                    rows[:, m + 1 : m + scan.b] += d_gram[:, :, m]
            else:
                rows = torch.nn.functional.pad(d_gram, (0, 0, 1, 0))
            if self.matrices > 1:
                self.dx.baddbmm_(rows, self.x_stepped)
                self.dx_stepped.baddbmm_(rows.mT, self.x)
            else:
                grads.gram_kk[:, n] += rows
            pairs = grad.view(len(grad), scan.b, *((sources.c,) if scan.pairwise else ()), -1)
            a = i.a_before[:, n].view(len(grad), scan.b, *(1,) * (pairs.ndim - 2))
            d_start = sources.collect_rows(pairs)
            d_moved = sources.collect_rows(pairs * a)
            axes = tuple(range(2, pairs.ndim))
            grads.a_before[:, n] += (pairs * sources.expand_rows(self.moved)).sum(axes)
            if self.momenta[0] is not None:
                grads.m_before[:, n] -= (pairs * sources.expand_rows(self.carried)).sum(axes)
                d_carried = -sources.collect_rows(pairs * i.m_before[:, n].view_as(a))
                self.dx.baddbmm_(d_carried, self.momenta[0])
                d_momenta[0] = d_momenta[0] + d_carried.mT @ self.x
        scan.in_view(grads.target, n).sub_(d_start)
        self.dx.baddbmm_(d_moved, self.deltas[0])
        d_deltas[0].baddbmm_(d_moved.mT, self.x)
        return d_start

    def _output_step_backward(self, grads):
        """Fold the gradient by the stepped inputs into that by the inputs."""
        if self.step is None:
            self.dx += self.dx_stepped
            return
        d_step = (self.dx_stepped * self.x).sum(-1)
        if self.d_step is not None:
            d_step += self.d_step
        self.dx.addcmul_(self.dx_stepped, self.step[..., None])
        if self.matrices > 1:
            self.dx.addcmul_(self.x, (d_step * self.step.square())[..., None], value=-2)
        else:
            self.scan.in_view(grads.step_k, self.n).add_(d_step)

    def _hidden_of_keys_backward(self, d_deltas, d_phi, grads):
        scan, n = self.scan, self.n
        d_deltas[0] += self.d_current
        if self.inputs.output_start is not None:
            grads.output_start.add_(self.d_current.unflatten(0, (len(grads.output_start), -1)).sum(1))
        grad = derivative_backward(self.hidden_k, self.dx, self.d_slope, scan.num_hidden)
        if self.inputs.base_k is not None:
            scan.in_view(grads.base_k, n).add_(grad)
        d_phi += grad @ self.deltas[1]
        d_deltas[1].baddbmm_(grad.mT, self.phi_k)
