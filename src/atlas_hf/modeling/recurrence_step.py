"""The recurrence one token at a time, for decoding: factors of the chunk's tokens are kept, matrices stay anchored.

Legend: B batch, H heads, K key width, V value width, E hidden width, G hidden matrices, F features, c window, b chunk,
R = b + c - 1 slots: c - 1 tokens from before the chunk, then its own. Layout `[B, H, ...]`, rows at any phase.

Each matrix has three parts (recurrence, section 5), of which a token changes only the last, of the buffers' size:

    W_t z = W_0 z + a_t D z - m_t S z - sum_i O_t[i] (x_i . z)         D, S, x_i, errors at the chunk's start

`P_t[i]`, the momentum's part, is the running sum of the gradients' errors at slot `i`. Under gd `O_t = alpha_t O_{t-1} +
P_t`, `P_t = theta_t P_{t-1} + eta_t G_t`; under Muon `P_t = theta_t P_{t-1} + G_t` and `O_t = alpha_t O_{t-1} + eta_t C_t^T
P_t` with the token-space factors `C_t`. Only Muon with carried momentum has a dense third part.
"""

import torch
from torch.nn.functional import pad

from .dispatch import select_factors, select_step
from .memory_network import activate, activate_with_derivative, output_gain, stack_hidden
from .newton_schulz import newton_schulz, newton_schulz_factors, precise
from .recurrence_operator import Call, atlas_operator
from .recurrence_state import INNER_NORM_EPS, State, initial_fast


def _apply(matrix, x):
    """`[..., out, in] @ [..., in]`."""
    return (matrix @ x[..., None])[..., 0]


class _Matrix:
    """Names and rules of one memory matrix; its tensors live in the working state."""

    def __init__(self, index: int, by_muon: bool, carry: bool, rate: float):
        self.index = index
        self.delta, self.momentum = f"matrix_{index}", f"momentum_{index}"
        self.offset, self.gradient = f"step_offset_{index}", f"step_gradient_{index}"
        self.by_muon, self.carry, self.rate = by_muon, carry, rate
        self.dense = by_muon and carry


class _Step:
    def __init__(self, call: Call):
        self.call, self.options = call, call.options
        self.memory, self.feature_map = call.memory, call.feature_map
        self.deep, self.num_hidden = len(call.memory) > 1, len(call.memory) - 1
        self.window, self.earlier = call.tokens.gamma.shape[-1], call.tokens.gamma.shape[-1] - 1
        self.slots = self.earlier + call.options.chunk_size
        output_rate, hidden_rate = call.options.rates(call.memory[0].shape[-1])
        muon, carry = call.options.rule == "muon", call.options.momentum == "carry"
        self.matrices = [_Matrix(0, call.options.output_by_muon, carry, output_rate)]
        self.matrices += [_Matrix(i, muon, carry, hidden_rate) for i in range(1, len(call.memory))]
        self.base = call.memory if call.options.decay_to == "init" else None
        self.rho = None if call.residual_scale is None else call.residual_scale[:, None]
        self.factors = select_factors(call.kernels, self.slots, call.q) or newton_schulz_factors
        self.kernel = self._one_launch()

    def _one_launch(self):
        """Triton's way to take a token, where there is one and nobody asks for gradients."""
        call = self.call
        module = select_step(
            call.kernels,
            self.options,
            len(self.memory),
            self.window,
            call.q,
            key_dim=call.q.shape[-1],
            value_dim=self.memory[0].shape[1],
            hidden_dim=self.memory[0].shape[-1] if self.deep else 0,
            features=self.memory[-1].shape[-1],
        )
        if module is None or torch.is_grad_enabled() or self.rho is not None:
            return None
        return module.Step(self.options, self.memory, self.feature_map, self.window)

    # Working state: the public state plus everything that begins with `step_`

    def begin(self, state: State | None) -> State:
        """The working state: as kept by an earlier step, or built from the public state by taking its tokens in again."""
        call, dtype = self.call, self.call.q.dtype
        batch = call.q.shape[0]
        if state is not None and "step_log_a" in state:
            return dict(state)
        fast = initial_fast(call.memory, self.options, batch, state, dtype)
        work = {m.delta: d.transpose(0, 1) for m, d in zip(self.matrices, fast.delta, strict=True)}
        work |= {m.momentum: s.transpose(0, 1) for m, s in zip(self.matrices, fast.momentum, strict=False)}
        if state is None:
            work["position"] = torch.zeros(batch, dtype=torch.long, device=call.q.device)
            buffers = {n: x.new_zeros(batch, self.slots - 1, *x.shape[2:]) for n, x in call.tokens._asdict().items()}
        else:
            work["position"] = state["position"]
            buffers = {n: state[n].to(dtype) for n in call.tokens._fields}
        work |= buffers
        work |= self._empty_chunk()
        self._anchor(work)
        if state is not None:
            phase = work["position"] % self.options.chunk_size
            start = work["position"] - phase
            work["position"] = start
            # Rows stand at different phases: a row takes part as long as it has tokens left.
            for t in range(self.options.chunk_size - 1):
                token = {n: x[:, self.earlier + t] for n, x in buffers.items()}
                self.take(work, token, t < phase)
        return work

    def _empty_chunk(self) -> State:
        batch, heads, dtype, device = (
            *self.call.q.shape[:1],
            self.call.q.shape[2],
            self.call.q.dtype,
            self.call.q.device,
        )

        def zeros(*shape):
            return torch.zeros(batch, heads, *shape, dtype=dtype, device=device)

        new = {"step_log_a": zeros()}
        if self.options.momentum == "carry":
            new |= {"step_log_beta": zeros(), "step_m": zeros()}
        for m, matrix in zip(self.matrices, self.memory, strict=True):
            new[m.offset] = zeros(*matrix.shape[1:]) if m.dense else zeros(self.slots, matrix.shape[1])
            if self.options.momentum != "none":
                new[m.gradient] = zeros(self.slots, matrix.shape[1])
        if self.deep:
            hidden = self.memory[1].shape[1]
            new["step_x"] = zeros(self.slots, hidden)
            new["step_window"] = zeros(self.earlier, self.num_hidden * hidden)
            new["step_columns"] = zeros(hidden)
        return new

    def _anchor(self, work: State) -> None:
        """Take at the matrices that stand now: hidden units of the tokens before the chunk, lengths of `W1`'s columns."""
        if not self.deep:
            return
        if self.earlier:
            k = work["k"][:, : self.earlier].transpose(1, 2)
            hidden = self._at_start(self._features(k), stack_hidden(self.memory[1:]), self._stacked(work, "matrix"))
            work["step_window"] = hidden
            x = activate(hidden, self.num_hidden)
            work["step_x"] = torch.cat([x, work["step_x"][:, :, self.earlier :]], 2)
        if self.options.inner_norm:
            output = work["matrix_0"] if self.base is None else work["matrix_0"] + self.memory[0]
            work["step_columns"] = output.square().sum(-2)

    def _features(self, x):
        return x if self.feature_map is None else self.feature_map(x, head_axis=1)

    def _squared_norm(self, x):
        return x.square().sum(-1) if self.feature_map is None else self.feature_map.squared_norm(x, head_axis=1)

    def _kernel(self, x, y):
        return x @ y.transpose(-1, -2) if self.feature_map is None else self.feature_map.kernel(x, y, head_axis=1)

    def _stacked(self, work, name):
        return stack_hidden([work[f"{name}_{i}"] for i in range(1, len(self.memory))])

    def _at_start(self, x, base, delta):
        """`(M_0 + D) x` of several tokens: `[B, H, N, in] -> [B, H, N, out]`."""
        y = x @ delta.transpose(-1, -2)
        return y if self.base is None else y + self._shared(x, base)

    @staticmethod
    def _shared(x, base):
        """One product a head with the shared `M_0`, for all rows and tokens."""
        by_head = x.transpose(0, 1)
        y = by_head.reshape(x.shape[1], -1, x.shape[-1]) @ base.transpose(-1, -2)
        return y.view(*by_head.shape[:-1], -1).transpose(0, 1)

    # One token

    def _write(self, work: State, token: State, hidden) -> State:
        """The state after this token's writes; here `k` and `v` have a slot more, for a chunk's last token.

        `hidden [B, H, 1, G E]`: the key's pre-activations at the chunk's start, of a deep memory.
        """
        options, new = self.options, dict(work)
        phase = work["position"] % options.chunk_size
        slot = torch.arange(self.slots, device=phase.device)
        here = slot == self.earlier + phase[:, None]  # [B, R]
        for name in ("k", "v"):
            held = pad(work[name], (0, 0, 0, 0, 0, 1))
            new[name] = torch.where(here[..., None, None], token[name][:, None], held)
        # Tokens before the sequence's first do not exist: their places in a window weigh nothing.
        ago = torch.arange(self.window, device=phase.device)
        gamma = torch.where((ago <= work["position"][:, None])[:, None], token["gamma"], 0.0)
        token = {**token, "gamma": gamma}
        for name in ("log_alpha", "eta", "log_theta", "gamma"):
            own = here[:, :-1].view(len(phase), -1, *[1] * (token[name].ndim - 1))
            new[name] = torch.where(own, token[name][:, None], work[name])
        k = new["k"].transpose(1, 2)

        # The window, newest first: its tokens' slots
        spread = (slot[:, None] == self.earlier + phase[:, None, None] - ago)[:, None].to(k.dtype)  # [B, 1, R, c]
        gather = spread.transpose(-1, -2)
        k_window, v_window = gather @ k, gather @ new["v"].transpose(1, 2)
        if self.deep:
            in_window = torch.cat([work["step_window"], hidden], 2)
            new["step_window"] = in_window[:, :, 1:]
            x_window, slope = activate_with_derivative(in_window.flip(2), self.num_hidden)  # newest first
            x = torch.where(here[:, None, :, None], x_window[:, :, :1], work["step_x"])
            new["step_x"] = x
        else:
            x, x_window = self._features(k), self._features(k_window)

        # Errors by the output matrix: at its latest value, or at the chunk's start
        errors = -v_window
        if options.inner_loss == "l2":
            if self.rho is not None:
                errors = errors + self.rho[..., None] * k_window
            if options.errors_follow_writes:
                errors = errors + self._read(work, self.matrices[0], x_window, x_window @ x.transpose(-1, -2))
            else:
                errors = errors + self._at_start(x_window, self.memory[0], work["matrix_0"])
        gradients = [errors]
        if self.deep:
            back = errors @ work["matrix_0"]
            if self.base is not None:
                back = back + self._shared(errors, self.memory[0].transpose(-1, -2))
            gradients += [back * part for part in slope.chunk(self.num_hidden, -1)]
        if options.inner_norm:
            sizes = [x_window.square().sum(-1) + INNER_NORM_EPS]
            if self.deep:
                gain = output_gain(slope, work["step_columns"][:, :, None]).clamp_min(1)
                sizes += [(self._squared_norm(k_window) + INNER_NORM_EPS) * gain] * self.num_hidden
            gradients = [g / n[..., None] for g, n in zip(gradients, sizes, strict=True)]
        weights = spread * gamma[:, :, None]
        gram_phi = self._kernel(precise(k), precise(k)) if options.rule == "muon" else None
        for m, gradient in zip(self.matrices, gradients, strict=True):
            inputs, gram = (k, gram_phi) if m.index or not self.deep else (x, None)
            self._move(work, new, m, weights @ gradient, token, inputs, gram, phase)

        new["step_log_a"] = work["step_log_a"] + token["log_alpha"]
        if options.momentum == "carry":
            new["step_log_beta"] = work["step_log_beta"] + token["log_theta"]
            new["step_m"] = token["log_alpha"].exp() * work["step_m"] + new["step_log_beta"].exp()
        new["position"] = work["position"] + 1
        return new

    def _move(self, work, new, m: _Matrix, gradient, token, inputs, gram, phase):
        """Add one token's gradient `[B, H, R, out]` to the momentum's and the matrix's running parts."""
        options = self.options
        alpha, eta = token["log_alpha"].exp()[..., None, None], token["eta"][..., None, None]
        if not m.by_muon:
            gradient = eta * m.rate * gradient
        if options.momentum != "none":
            gradient = token["log_theta"].exp()[..., None, None] * work[m.gradient] + gradient
            new[m.gradient] = gradient
        new[m.offset] = alpha * work[m.offset]
        if not m.by_muon:
            new[m.offset] = new[m.offset] + gradient
            return
        if m.dense:
            x = inputs if gram is None else self._features(inputs)
            beta = (work["step_log_beta"] + token["log_theta"]).exp()[..., None, None]
            state = beta * work[m.momentum] + gradient.transpose(-1, -2) @ x
            step = newton_schulz(state, options.newton_schulz_steps, options.newton_schulz_coefficients)
        else:
            x, e = precise(inputs), precise(gradient)
            gram = x @ x.transpose(-1, -2) if gram is None else gram
            factors = self.factors(
                e @ e.transpose(-1, -2), gram, options.newton_schulz_steps, options.newton_schulz_coefficients
            )
            step = factors.to(gradient.dtype).transpose(-1, -2) @ gradient
        writes = ((phase + 1) % options.muon_interval == 0)[:, None, None, None]
        new[m.offset] = new[m.offset] + torch.where(writes, eta * m.rate * step, 0.0)

    def _read(self, work, m: _Matrix, z, gram):
        """`W_t z` for `z [B, H, N, in]`, `gram = z x^T [B, H, N, R]`."""
        base = None if self.base is None else self._shared(z, self.memory[m.index])
        return self._reading(work, m, z, gram, z @ work[m.delta].transpose(-1, -2), base)

    def _reading(self, work, m: _Matrix, z, gram, moved, base):
        y = work["step_log_a"].exp()[..., None, None] * moved
        if m.carry and not m.by_muon:
            y = y - work["step_m"][..., None, None] * (z @ work[m.momentum].transpose(-1, -2))
        y = y - (z @ work[m.offset].transpose(-1, -2) if m.dense else gram @ work[m.offset])
        return y if base is None else y + base

    def _hidden_at_start(self, work, phi):
        """Pre-activations at the chunk's start of a few tokens, `M_0 phi` and `D phi`: `[B, H, N, G E]`; None if linear."""
        if not self.deep:
            return None, None
        moved = phi @ self._stacked(work, "matrix").transpose(-1, -2)
        return None if self.base is None else self._shared(phi, stack_hidden(self.memory[1:])), moved

    def _output(self, work, q, features, base, moved):
        """`M_t(q)`: `[B, H, K] -> [B, H, V]`, from `phi(q)` and its `_hidden_at_start`; `work` holds the token's writes."""
        gram = self._kernel(q[:, :, None], work["k"].transpose(1, 2))
        if self.deep:
            parts = [None] * self.num_hidden if base is None else base.chunk(self.num_hidden, -1)
            parts = zip(self.matrices[1:], moved.chunk(self.num_hidden, -1), parts, strict=True)
            hidden = [self._reading(work, m, features, gram, *part) for m, *part in parts]
            features = activate(hidden[0] if len(hidden) == 1 else torch.cat(hidden, -1), self.num_hidden)
            gram = features @ work["step_x"].transpose(-1, -2)
        y = self._read(work, self.matrices[0], features, gram)[:, :, 0]
        return y if self.rho is None else y + self.rho * q

    def _end_chunk(self, work: State) -> State:
        """The state with the chunk folded into `D` and `S`, its last tokens kept as the next one's earlier ones."""
        new = dict(work)
        a = work["step_log_a"].exp()[..., None, None]
        k = work["k"].transpose(1, 2)
        for m in self.matrices:
            of_hidden = m.index == 0 and self.deep
            x = work["step_x"] if of_hidden else self._features(k)
            offset = work[m.offset] if m.dense else work[m.offset].transpose(-1, -2) @ x
            new[m.delta] = a * work[m.delta] - offset
            if m.carry:
                if not m.by_muon:
                    new[m.delta] = new[m.delta] - work["step_m"][..., None, None] * work[m.momentum]
                beta = work["step_log_beta"].exp()[..., None, None]
                new[m.momentum] = beta * work[m.momentum] + work[m.gradient].transpose(-1, -2) @ x
        for name in ("k", "v"):
            last = work[name][:, self.options.chunk_size :]
            new[name] = pad(last, (0, 0, 0, 0, 0, self.options.chunk_size - 1))
        for name in ("log_alpha", "eta", "log_theta", "gamma"):
            new[name] = torch.zeros_like(work[name])
        new |= self._empty_chunk()
        self._anchor(new)
        return new

    def _write_and_read(self, work: State, token: State, q):
        """PyTorch's way to take a token in: the state after its writes, and the output at `q` or None."""
        phi = self._features(token["k"][:, :, None] if q is None else torch.stack([token["k"], q], 2))
        base, moved = self._hidden_at_start(work, phi)
        hidden = None
        if self.deep:
            hidden = moved[:, :, :1] if base is None else moved[:, :, :1] + base[:, :, :1]
        new = self._write(work, token, hidden)
        y = None
        if q is not None:
            start = (None if x is None else x[:, :, 1:] for x in (base, moved))
            y = self._output(new, q, phi[:, :, 1:], *start)
        return new, y

    def take(self, work: State, token: State, rows=None, q=None) -> torch.Tensor | None:
        """Take one token in, in place of `work`; `rows [B]` that have none stay as they are. Returns the output at `q`."""
        by_kernel = self.kernel is not None and q is not None
        new, y = self.kernel.take(work, token, q) if by_kernel else self._write_and_read(work, token, q)
        ended = new["position"] % self.options.chunk_size == 0
        folded = self._end_chunk(new) if torch.compiler.is_compiling() or bool(ended.any()) else None
        for name in ("k", "v"):
            new[name] = new[name][:, :-1]
        if folded is not None:
            _keep(new, folded, ended)
        _keep(work, new, rows)
        return y


def _keep(work: State, new: State, rows) -> None:
    """Move `rows` of `work` on to `new` (all of them: `None`)."""
    for name, value in new.items():
        if rows is None:
            work[name] = value
        elif value is not work[name]:
            work[name] = torch.where(rows.view(-1, *[1] * (value.ndim - 1)), value, work[name])


@atlas_operator
def step_atlas(call: Call):
    """The Atlas recurrence for decoding: one new token, or a few, on a state that stands anywhere in its chunk.

    Same signature, outputs and state as `chunk_atlas`, and equal to it to rounding; rows of a batch may stand at
    different places. The cost of a token depends neither on the tokens before it nor on the chunk's place, but every
    `b`-th one also folds the chunk. The returned state also holds the chunk's factors (names that begin with `step_`),
    so that the next step need not take them again; `chunk_atlas` ignores them. Where Triton has a kernel for the options
    and no gradients are asked for, a token takes one launch; else its Newton-Schulz alone runs on Triton.
    """
    step = _Step(call)
    work = step.begin(call.state)
    outputs = []
    for t in range(call.q.shape[1]):
        rows = None if call.lengths is None else t < call.lengths
        token = {n: x[:, t] for n, x in call.tokens._asdict().items()}
        y = step.take(work, token, rows, call.q[:, t])
        outputs.append(y if rows is None else torch.where(rows[:, None, None], y, 0.0))
    return torch.stack(outputs, 1), work
