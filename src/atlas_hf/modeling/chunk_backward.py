"""One chunk of the recurrence, backwards, written out (docs/recurrence.md, section 8).

Legend: N rows (head and batch), b chunk, c window, R = b + c - 1 tokens in view, V value width, E hidden width, G hidden
matrices, P error sources. Gradients by a chunk's inputs are added to `grads`, whose fields are those of `ChunkInputs`.
"""

import torch

from .chunk_inputs import ChunkInputs
from .chunk_scan import Chunk
from .memory_network import activate_backward, derivative_backward


class ChunkBackward(Chunk):
    """`restore` once, `ending` and `end` as in the forward pass, then `backward` once."""

    def restore(self, kept):
        """The intermediates of `forward` once more, but for its outputs."""
        hidden_k, hidden_q, errors = kept
        self._keys(hidden_k)
        if self.options.errors_follow_writes:
            self._pair_system()
            self.errors, self.moved = errors, self.x @ self.deltas[0].mT
            if self.momenta[0] is not None:
                self.carried = self.x @ self.momenta[0].mT
        self._write(errors)
        for write in self.writes[1:]:
            write.reading(self.phi_q, self.inputs.gram_qk[:, self.n])
        self._queries(hidden_q)

    def backward(self, dy, d_state, grads: ChunkInputs):
        """Gradients by the state at the chunk's start; `d_state` is None where the end was not taken."""
        scan, i, n = self.scan, self.inputs, self.n
        deep = self.deep
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
            if grads.base_q is not None:
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
                if grads.base_k is not None:
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
        if grads.base_q is not None:
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
                rows = d_gram.new_zeros(grad.shape[0], scan.view, scan.view)
                for m in range(sources.c):
                    rows[:, m + 1 : m + scan.b] += d_gram[:, :, m]
            else:
                rows = torch.nn.functional.pad(d_gram, (0, 0, 1, 0))
            if self.deep:
                self.dx.baddbmm_(rows, self.x_stepped)
                self.dx_stepped.baddbmm_(rows.mT, self.x)
            else:
                grads.gram_kk[:, n] += rows
            pairs = grad.view(grad.shape[0], scan.b, *((sources.c,) if scan.pairwise else ()), -1)
            a = self._before(i.a_before)
            d_start = sources.collect_rows(pairs)
            d_moved = sources.collect_rows(pairs * a)
            axes = tuple(range(2, pairs.ndim))
            grads.a_before[:, n] += (pairs * sources.expand_rows(self.moved)).sum(axes)
            if self.momenta[0] is not None:
                grads.m_before[:, n] -= (pairs * sources.expand_rows(self.carried)).sum(axes)
                d_carried = -sources.collect_rows(pairs * self._before(i.m_before))
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
        if self.deep:
            self.dx.addcmul_(self.x, (d_step * self.step.square())[..., None], value=-2)
        else:
            self.scan.in_view(grads.step_k, self.n).add_(d_step)

    def _hidden_of_keys_backward(self, d_deltas, d_phi, grads):
        scan, n = self.scan, self.n
        d_deltas[0] += self.d_current
        if self.inputs.output_start is not None:
            grads.output_start.add_(self.d_current.unflatten(0, (len(grads.output_start), -1)).sum(1))
        grad = derivative_backward(self.hidden_k, self.dx, self.d_slope, scan.num_hidden)
        if grads.base_k is not None:
            scan.in_view(grads.base_k, n).add_(grad)
        d_phi += grad @ self.deltas[1]
        d_deltas[1].baddbmm_(grad.mT, self.phi_k)
