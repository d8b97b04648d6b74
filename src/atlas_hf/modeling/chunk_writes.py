"""How one matrix of the memory is read and written inside a chunk, in the dual form, forwards and backwards.

Legend: N rows (head and batch), b tokens of the chunk, c window, R = b + c - 1 tokens in view, W written positions, P error
sources: the R tokens, or the b c pairs of a write and a token of its window, `p = (n, m)` with `i(p) = n + m`; `e_p [P, out]`
errors with the normalised step's weights in them, `x_i [R, in]` inputs, `z [b, in]` what is read.

    W_t z = M_0 z + a_t D z - m_t S z - offset_t(z)        D = W - M_0, S momentum, both at the chunk's start
    gd:    offset_t(z) = sum_p w_p[t] e_p (x_i(p) . z)      Muon:  offset_t(z) = sum_n s_n[t] E_n^T C_n (X z)

Each class holds what its forward half made, and turns the gradients by its results into those by its arguments: in the
order `read_backward`, `end_backward` (after `ending`), `finish`. Gradients by the chunk's inputs are added to `grads`.
"""

import torch

from .chunk_inputs import ChunkInputs
from .newton_schulz import newton_schulz, newton_schulz_factors_backward, newton_schulz_factors_forward, precise


class Sources:
    """The map from error sources to the tokens in view, `i(p)`."""

    def __init__(self, chunk_size: int, window: int, pairwise: bool, like: torch.Tensor):
        self.b, self.c, self.pairwise = chunk_size, window, pairwise
        self.view = chunk_size + window - 1
        tokens = torch.arange(self.view, device=like.device)
        of_source = (tokens[:chunk_size, None] + tokens[:window]).flatten() if pairwise else tokens
        self.selection = (tokens[:, None] == of_source).to(like.dtype)  # [R, P]

    def expand_rows(self, x):
        """`[N, R, D] -> [N, b, c, D]`, a view; tokens stay `[N, R, D]`."""
        return x.unfold(1, self.c, 1).transpose(-1, -2) if self.pairwise else x

    def collect_rows(self, x):
        """Add up each token's sources, the adjoint of `expand_rows`: `[N, b, c, D] -> [N, R, D]`."""
        if not self.pairwise:
            return x
        total = x.new_zeros(x.shape[0], self.view, x.shape[-1])
        for m in range(self.c):
            total[:, m : m + self.b] += x[:, :, m]
        return total

    def expand_columns(self, x):
        """`[..., R] -> [..., b, c]`, a view; tokens stay `[..., R]`."""
        return x.unfold(-1, self.c, 1) if self.pairwise else x

    def collect_columns(self, x):
        """The adjoint of `expand_columns`."""
        if not self.pairwise:
            return x
        total = x.new_zeros(*x.shape[:-2], self.view)
        for m in range(self.c):
            total[..., m : m + self.b] += x[..., m]
        return total

    def grouped(self, x):
        """`[..., P] -> [..., b, c]`, as `expand_columns` gives it."""
        return x.unflatten(-1, (self.b, self.c)) if self.pairwise else x

    def weighted(self, weights):
        """`[..., P] -> [..., R, P]`: the matrix that weighs the sources and adds them up token by token."""
        return self.selection * weights[..., None, :]

    def weighted_backward(self, grad):
        """`[..., R, P] -> [..., P]`."""
        return (self.selection * grad).sum(-2)


def decayed(base, moved, a):
    """`base + a * moved`, a new tensor; `base` may be None."""
    return moved * a if base is None else torch.addcmul(base, moved, a)


def inner_product(x, y):
    """`[N, out, in], [N, out, in] -> [N]`."""
    return (x * y).sum((-2, -1))


class _Writes:
    """The part that all have: `a_t D z`."""

    def _decayed_backward(self, grad, grads: ChunkInputs):
        """Gradient by `z`; sets `d_delta`."""
        a = self.inputs.a[:, self.n, :, None]
        by_z = grad @ self.delta
        # sum_out grad (D z) = sum_in z (D^T grad): the product with `D z` need not be kept
        grads.a[:, self.n] += (by_z * self.z).sum(-1)
        self.d_delta = (grad * a).mT @ self.z
        return by_z.mul_(a)


class GradientWrites(_Writes):
    """gd: the writes' sum is a linear attention over the sources (docs/recurrence.md, section 5)."""

    def __init__(self, inputs: ChunkInputs, n: int, sources: Sources, delta, momentum, x, errors):
        self.inputs, self.n, self.sources = inputs, n, sources
        self.delta, self.momentum, self.x, self.errors = delta, momentum, x, errors

    def reading(self, z, gram):
        """What is read: `z [N, b, in]`, one vector a token, and `gram = z x^T [N, b, R]`."""
        self.z, self.gram = z, gram
        weights = self.sources.grouped(self.inputs.weights[:, self.n]) * self.sources.expand_columns(gram)
        self.read_weights = weights.flatten(2)

    def read(self, base):
        """`W_t z_t` for each token; `base = M_0 z` or None -> `[N, b, out]`."""
        i, n = self.inputs, self.n
        value = decayed(base, self.z @ self.delta.mT, i.a[:, n, :, None])
        if self.momentum is not None:
            value.addcmul_(self.z @ self.momentum.mT, i.m[:, n, :, None], value=-1)
        return value.baddbmm_(self.read_weights, self.errors, alpha=-1)

    def read_backward(self, grad, grads: ChunkInputs):
        """Gradients by `z` and `gram`; `base` has the output's own."""
        i, n = self.inputs, self.n
        dz = self._decayed_backward(grad, grads)
        self.d_momentum = None
        if self.momentum is not None:
            by_z = grad @ self.momentum
            m = i.m[:, n, :, None]
            grads.m[:, n] -= (by_z * self.z).sum(-1)
            self.d_momentum = -((grad * m).mT @ self.z)
            dz.addcmul_(by_z, m, value=-1)
        self.d_errors = -(self.read_weights.mT @ grad)
        d_weights = self.sources.grouped(grad @ self.errors.mT).neg_()
        grads.weights[:, n] += (d_weights * self.sources.expand_columns(self.gram)).flatten(2)
        return dz, self.sources.collect_columns(d_weights.mul_(self.sources.grouped(i.weights[:, n])))

    def ending(self):
        """What the chunk leaves behind, token by token."""
        self.end_map = self.sources.weighted(self.inputs.end_weights[:, self.n])
        self.end_errors = self.end_map @ self.errors
        if self.momentum is not None:
            self.momentum_map = self.sources.weighted(self.inputs.end_momentum[:, self.n])
            self.momentum_errors = self.momentum_map @ self.errors

    def end(self):
        """`D` and `S` after the chunk's last token; after `ending`."""
        i, n = self.inputs, self.n
        delta = self.delta * i.a_end[:, n, None, None]
        delta.baddbmm_(self.end_errors.mT, self.x, alpha=-1)
        if self.momentum is None:
            return delta, None
        delta.addcmul_(self.momentum, i.m_end[:, n, None, None], value=-1)
        momentum = self.momentum * i.beta_end[:, n, None, None]
        return delta, momentum.baddbmm_(self.momentum_errors.mT, self.x)

    def end_backward(self, d_delta, d_momentum, grads: ChunkInputs):
        """Gradient by `x`; those by `D`, `S` and the errors are added to what `read_backward` left."""
        i, n = self.inputs, self.n
        grads.a_end[:, n] += inner_product(self.delta, d_delta)
        self.d_delta.addcmul_(d_delta, i.a_end[:, n, None, None])
        d_errors = -(self.x @ d_delta.mT)
        dx = -(self.end_errors @ d_delta)
        grads.end_weights[:, n] += self.sources.weighted_backward(d_errors @ self.errors.mT)
        self.d_errors.baddbmm_(self.end_map.mT, d_errors)
        if self.momentum is None:
            return dx
        grads.m_end[:, n] -= inner_product(self.momentum, d_delta)
        grads.beta_end[:, n] += inner_product(self.momentum, d_momentum)
        self.d_momentum.addcmul_(d_delta, i.m_end[:, n, None, None], value=-1)
        self.d_momentum.addcmul_(d_momentum, i.beta_end[:, n, None, None])
        d_errors = self.x @ d_momentum.mT
        dx.baddbmm_(self.momentum_errors, d_momentum)
        grads.end_momentum[:, n] += self.sources.weighted_backward(d_errors @ self.errors.mT)
        self.d_errors.baddbmm_(self.momentum_map.mT, d_errors)
        return dx

    def finish(self, grads: ChunkInputs):
        """Gradients by `D`, `S`, the errors, and by `gram_x` and `x` where the writes themselves used them."""
        return self.d_delta, self.d_momentum, self.d_errors, None, None


class MuonWrites(_Writes):
    """Muon without carried momentum, in token space (docs/recurrence.md, section 6).

    A write's momentum is `S_n = E_n^T X`, `E_n [R, out]` the errors of the tokens in view as decayed and summed by `n`;
    `NS(S_n) = E_n^T C_n X` needs the Gram matrices of `E_n` and `X` alone; `gram_x [N, R, R]` comes in double precision.
    """

    def __init__(self, inputs: ChunkInputs, n: int, sources: Sources, delta, x, errors, gram_x, rate: float, options):
        self.inputs, self.n, self.sources, self.delta, self.x = inputs, n, sources, delta, x
        self.errors, self.rate = errors, rate
        # One tall product for all writes: W R rows
        self.spread = sources.weighted(inputs.accumulated[:, n]).flatten(1, 2)
        self.summed = (self.spread @ errors).unflatten(1, (-1, x.shape[1]))  # E_n [N, W, R, out]
        self.summed_precise = precise(self.summed)
        factors, self.tape = newton_schulz_factors_forward(
            self.summed_precise @ self.summed_precise.mT,
            gram_x[:, None],
            options.newton_schulz_steps,
            options.newton_schulz_coefficients,
        )
        self.factors = factors.to(self.summed.dtype)
        self.steps = self.factors.mT @ self.summed  # C_n^T E_n [N, W, R, out]

    def reading(self, z, gram):
        self.z, self.gram = z, gram
        sizes = self.inputs.sizes[:, self.n, :, :, None]
        self.read_weights = (sizes * gram[:, :, None, :]).flatten(2)  # [N, b, W R]

    def read(self, base):
        value = decayed(base, self.z @ self.delta.mT, self.inputs.a[:, self.n, :, None])
        return value.baddbmm_(self.read_weights, self.steps.flatten(1, 2), alpha=-self.rate)

    def read_backward(self, grad, grads: ChunkInputs):
        i, n = self.inputs, self.n
        dz = self._decayed_backward(grad, grads)
        self.d_steps = (self.read_weights.mT @ grad).mul_(-self.rate).view_as(self.steps)
        d_weights = (grad @ self.steps.flatten(1, 2).mT).mul_(-self.rate)
        d_weights = d_weights.unflatten(2, (-1, self.gram.shape[-1]))
        grads.sizes[:, n] += (d_weights * self.gram[:, :, None, :]).sum(-1)
        return dz, (d_weights * i.sizes[:, n, :, :, None]).sum(2)

    def ending(self):
        sizes = self.inputs.end_sizes[:, self.n, None]
        self.combined = (sizes @ self.steps.flatten(2)).mul_(self.rate).view(-1, *self.steps.shape[2:])

    def end(self):
        delta = self.delta * self.inputs.a_end[:, self.n, None, None]
        return delta.baddbmm_(self.combined.mT, self.x, alpha=-1), None

    def end_backward(self, d_delta, d_momentum, grads: ChunkInputs):
        i, n = self.inputs, self.n
        grads.a_end[:, n] += inner_product(self.delta, d_delta)
        self.d_delta.addcmul_(d_delta, i.a_end[:, n, None, None])
        d_combined = (self.x @ d_delta.mT).mul_(-self.rate)
        self.d_steps.addcmul_(i.end_sizes[:, n, :, None, None], d_combined[:, None])
        grads.end_sizes[:, n] += (self.steps.flatten(2) @ d_combined.flatten(1)[..., None])[..., 0]
        return -(self.combined @ d_delta)

    def finish(self, grads: ChunkInputs):
        n = self.n
        d_factors = self.summed_precise @ self.d_steps.to(self.summed_precise.dtype).mT
        d_gram, d_gram_x = newton_schulz_factors_backward(self.tape, d_factors)
        d_summed = self.factors @ self.d_steps
        d_summed = d_summed.add_((d_gram + d_gram.mT) @ self.summed_precise).flatten(1, 2)
        d_spread = (d_summed @ self.errors.mT).unflatten(1, (-1, self.x.shape[1]))
        grads.accumulated[:, n] += self.sources.weighted_backward(d_spread)
        return self.d_delta, None, self.spread.mT @ d_summed, d_gram_x[:, 0], None


class DenseMuonWrites(_Writes):
    """Muon with carried momentum: `S_n = beta_n S + E_n^T X` has full rank and is orthogonalised as it is.

    The slow member of the family: its orthogonalisation is left to autograd.
    """

    def __init__(self, inputs: ChunkInputs, n: int, sources: Sources, delta, momentum, x, errors, rate: float, options):
        self.inputs, self.n, self.delta, self.x, self.rate = inputs, n, delta, x, rate
        leaves = (inputs.accumulated[:, n], inputs.beta[:, n], momentum, x, errors)
        with torch.enable_grad():
            self.leaves = tuple(leaf.detach().requires_grad_() for leaf in leaves)
            accumulated, beta, momentum, x, errors = self.leaves
            fresh = (sources.weighted(accumulated) @ errors[:, None]).mT @ x[:, None]
            states = beta[..., None, None] * momentum[:, None] + fresh
            self.last = states[:, -1]
            written = slice(options.muon_interval - 1, None, options.muon_interval)
            self.steps = newton_schulz(
                states[:, written], options.newton_schulz_steps, options.newton_schulz_coefficients
            )
        self.matrices = self.steps.detach()  # [N, W, out, in]

    def reading(self, z, gram):
        self.z = z
        self.each = z[:, None] @ self.matrices.mT  # [N, W, b, out]

    def read(self, base):
        i, n = self.inputs, self.n
        value = decayed(base, self.z @ self.delta.mT, i.a[:, n, :, None])
        return value.sub_((i.sizes[:, n].mT[..., None] * self.each).sum(1), alpha=self.rate)

    def read_backward(self, grad, grads: ChunkInputs):
        i, n = self.inputs, self.n
        dz = self._decayed_backward(grad, grads)
        grads.sizes[:, n] -= self.rate * (grad[:, None] * self.each).sum(-1).mT
        each = i.sizes[:, n].mT[..., None] * grad[:, None] * -self.rate
        self.d_steps = each.mT @ self.z[:, None]
        return dz + (each @ self.matrices).sum(1), None

    def ending(self):
        """Nothing: the matrices written are there."""

    def end(self):
        i, n = self.inputs, self.n
        delta = self.delta * i.a_end[:, n, None, None]
        delta -= self.rate * (i.end_sizes[:, n, :, None, None] * self.matrices).sum(1)
        return delta, torch.where(self._complete(), self.last.detach(), self.leaves[2].detach())

    def _complete(self):
        return self.inputs.complete[:, self.n, None, None]

    def end_backward(self, d_delta, d_momentum, grads: ChunkInputs):
        i, n = self.inputs, self.n
        grads.a_end[:, n] += inner_product(self.delta, d_delta)
        self.d_delta.addcmul_(d_delta, i.a_end[:, n, None, None])
        grads.end_sizes[:, n] -= self.rate * (self.matrices * d_delta[:, None]).sum((-2, -1))
        self.d_steps -= self.rate * i.end_sizes[:, n, :, None, None] * d_delta[:, None]
        self.d_last, self.d_kept = d_momentum * self._complete(), d_momentum * ~self._complete()
        return torch.zeros_like(self.x)

    def finish(self, grads: ChunkInputs):
        n = self.n
        d_last = getattr(self, "d_last", None)
        outputs, given = (self.steps,), (self.d_steps,)
        if d_last is not None:
            outputs, given = (self.steps, self.last), (self.d_steps, d_last)
        d_accumulated, d_beta, d_momentum, dx, d_errors = torch.autograd.grad(outputs, self.leaves, given)
        grads.accumulated[:, n] += d_accumulated
        grads.beta[:, n] += d_beta
        if d_last is not None:
            d_momentum = d_momentum + self.d_kept
        return self.d_delta, d_momentum, d_errors, None, dx
