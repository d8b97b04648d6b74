"""The recurrence one token at a time, for decoding: factors of the chunk's tokens are kept, matrices stay anchored.

Legend: N rows (head and sequence), H heads, B batch, K key width, V value width, E hidden width, G hidden matrices, F
features, c window, b chunk, R = b + c - 1 slots: c - 1 tokens from before the chunk, then its own. Layout `[N, ...]`, rows
at any phase.

Each matrix has three parts (docs/recurrence.md, section 5), of which a token changes only the last, of the buffers' size:

    W_t z = W_0 z + a_t D z - m_t S z - sum_i O_t[i] (x_i . z)         D, S, x_i, errors at the chunk's start

`P_t[i]`, the momentum's part, is the running sum of the gradients' errors at slot `i`. Under gd `O_t = alpha_t O_{t-1} +
P_t`, `P_t = theta_t P_{t-1} + eta_t G_t`; under Muon `P_t = theta_t P_{t-1} + G_t` and `O_t = alpha_t O_{t-1} + eta_t C_t^T
P_t` with the token-space factors `C_t`. Only Muon with carried momentum has a dense third part.
"""

import torch
from torch.nn.functional import pad

from .dispatch import select_factors, select_step
from .memory_network import activate, activate_with_derivative
from .newton_schulz import newton_schulz, newton_schulz_factors, precise
from .recurrence_operator import Call, atlas_operator
from .recurrence_state import INNER_NORM_EPS, State, initial_fast
from .step_layout import GATES, TOKENS, TokenLayout


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
        self.batch, self.heads = call.q.shape[0], call.q.shape[2]
        self.window, self.earlier = call.tokens.gamma.shape[-1], call.tokens.gamma.shape[-1] - 1
        self.slots = self.earlier + call.options.chunk_size
        self.layout = TokenLayout(
            call.q.shape[-1],
            call.memory[0].shape[1],
            call.feature_map,
            self.window,
            call.options.chunk_size,
            self.heads,
        )
        output_rate, hidden_rate = call.options.rates(call.memory[0].shape[-1])
        muon, carry = call.options.rule == "muon", call.options.momentum == "carry"
        self.matrices = [_Matrix(0, call.options.output_by_muon, carry, output_rate)]
        self.matrices += [_Matrix(i, muon, carry, hidden_rate) for i in range(1, len(call.memory))]
        self.output, self.hidden = self.matrices[0], self.matrices[1:]
        self.shared = call.options.decay_to == "init"
        self.rho = None
        if call.residual_scale is not None:
            self.rho = call.residual_scale.repeat_interleave(self.batch)[:, None, None]
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

    # Working state

    def begin(self, state: State | None) -> State:
        """The working state: as kept by an earlier step, or built from the public state by taking its tokens in again."""
        call, dtype = self.call, self.call.q.dtype
        if state is not None and "step_log_a" in state:
            return self.layout.to_rows(state, self.feature_map, dtype)
        if state is None:
            fast = initial_fast(call.memory, self.options, self.batch, None, dtype)
            state = {m.delta: d.transpose(0, 1) for m, d in zip(self.matrices, fast.delta, strict=True)}
            state |= {m.momentum: s.transpose(0, 1) for m, s in zip(self.matrices, fast.momentum, strict=False)}
            state["position"] = torch.zeros(self.batch, dtype=torch.long, device=call.q.device)
            tokens = call.tokens
            state |= {n: x.new_zeros(self.batch, self.slots - 1, *x.shape[2:]) for n, x in tokens._asdict().items()}
            return self._anchored(self.layout.to_rows(state, self.feature_map, dtype))
        work = self._anchored(self.layout.to_rows(state, self.feature_map, dtype))
        phase = work["position"] % self.options.chunk_size
        work["position"] = work["position"] - phase
        # Rows stand at different phases: a row takes part as long as it has tokens left.
        held = work[TOKENS]
        for t in range(self.options.chunk_size - 1):
            self.take(work, held[:, self.earlier + t, None], t < phase)
        return work

    def _running(self) -> dict[str, tuple[int, ...]]:
        """Shapes, after the rows, of what begins at zero in every chunk and grows with its tokens."""
        shapes: dict[str, tuple[int, ...]] = {"step_log_a": ()}
        if self.options.momentum == "carry":
            shapes |= {"step_log_beta": (), "step_m": ()}
        for m, matrix in zip(self.matrices, self.memory, strict=True):
            in_token_space = (self.slots, matrix.shape[1])
            shapes[m.offset] = tuple(matrix.shape[1:]) if m.dense else in_token_space
            if self.options.momentum != "none":
                shapes[m.gradient] = in_token_space
        return shapes

    def check(self, state: State | None) -> None:
        """Refuse a state that steps with other options left, as far as the shapes of what they kept tell."""
        if state is None or "step_log_a" not in state:
            return
        shapes = self._running()
        shapes |= dict.fromkeys(("step_window", "step_x", "step_columns") if self.deep else ())
        for name, shape in shapes.items():
            found = tuple(state[name].shape) if name in state else "nothing"
            if name not in state or (shape is not None and found[2:] != shape):
                raise ValueError(
                    f"initial_state[{name!r}] is {found}, which does not fit this rule and momentum: go on with the options "
                    "of the steps before, or drop the names that begin with step_"
                )

    def _anchored(self, work: State) -> State:
        """An empty chunk: what is taken at the matrices that stand now, and room for what its tokens leave."""
        first = work[TOKENS]

        def zeros(*shape):
            return first.new_zeros(first.shape[0], *shape)

        work = {**work, **{name: zeros(*shape) for name, shape in self._running().items()}}
        if not self.deep:
            return work
        # Hidden units of the tokens before the chunk, lengths of `W1`'s columns
        features = first[:, : self.earlier, self.layout.phi]
        hidden = [self._plus_shared(features @ work[m.delta].mT, features, self._start(m)) for m in self.hidden]
        work["step_window"] = torch.cat(hidden, -1) if len(hidden) > 1 else hidden[0]
        room = zeros(self.options.chunk_size, self.memory[0].shape[-1])
        work["step_x"] = torch.cat([activate(work["step_window"], self.num_hidden), room], 1)
        work["step_columns"] = zeros(self.memory[0].shape[-1])
        if self.options.inner_norm:
            output = work["matrix_0"]
            if self.shared:
                output = (output.unflatten(0, (self.heads, -1)) + self.memory[0][:, None]).flatten(0, 1)
            work["step_columns"] = output.square().sum(-2)
        return work

    # Products with the memory's start, one a head for all its rows

    def _start(self, m: _Matrix):
        """`M_0^T [H, in, out]`, where there is a start to fade to."""
        return self.memory[m.index].mT if self.shared else None

    def _plus_shared(self, y, x, matrix):
        """`y [N, n, out] + x [N, n, in] matrix`, `matrix [H, in, out]` or None for zero; `y` may be None."""
        if matrix is None:
            return y
        by_head = x.reshape(self.heads, -1, x.shape[-1])
        if y is None:
            return torch.bmm(by_head, matrix).view(*x.shape[:-1], -1)
        return torch.baddbmm(y.reshape(self.heads, -1, y.shape[-1]), by_head, matrix).view(y.shape)

    # One token

    def _write(self, work: State, token: torch.Tensor, moved, base) -> tuple[State, torch.Tensor]:
        """The state after this token's writes, and the tokens of all slots `[N, R, W]`.

        `token [N, 1, W]`; `moved`, `base`: `D phi(k)` and `M_0 phi(k)` of each hidden matrix, `[N, 1, E]`.
        """
        options, new = self.options, dict(work)
        own = self.layout.split(token)
        # Slots of the window's tokens, oldest first: `m` stands at `phase + m`, the new one at `phase + c - 1`
        phase = work["position"] % options.chunk_size
        slot = torch.arange(self.slots, device=phase.device)
        window = slot[: self.window]
        places = ((slot - phase[:, None])[:, None] == window[:, None]).repeat(self.heads, 1, 1)  # [N, c, R]
        here = places[:, -1, :, None]
        new[TOKENS] = torch.where(here[:, :-1], token, work[TOKENS])
        # The last slot is the new token's, or nothing has been written there and what stands in it has no effect.
        tokens = torch.cat([new[TOKENS], token], 1)
        places = places.to(tokens.dtype)
        gamma = own["gamma"][:, 0].flip(-1)
        k_window, v_window, size = self.layout.window_of(places, tokens)
        if self.deep:
            hidden = [m if b is None else m + b for m, b in zip(moved, base, strict=True)]
            hidden = hidden[0] if len(hidden) == 1 else torch.cat(hidden, -1)
            in_window = torch.cat([work["step_window"], hidden], 1)
            new["step_window"] = in_window[:, 1:]
            x_window, slope = activate_with_derivative(in_window, self.num_hidden)
            new["step_x"] = x = torch.where(here, x_window[:, -1:], work["step_x"])
        else:
            x = tokens[..., self.layout.phi]
            x_window = torch.bmm(places, x)

        errors = self._errors(work, k_window, v_window, x_window, x)
        gradients = [errors]
        if self.deep:
            back = torch.bmm(errors, work["matrix_0"])
            back = self._plus_shared(back, errors, self.memory[0] if self.shared else None)
            if options.inner_norm:
                columns = work["step_columns"].repeat(1, self.num_hidden)[..., None]
                slope = slope / (torch.bmm(slope.square(), columns).clamp_min(1) * size)
            gradients += [back * part for part in slope.chunk(self.num_hidden, -1)]
        if options.inner_norm:
            length = x_window.square().sum(-1, keepdim=True) + INNER_NORM_EPS if self.deep else size
            gradients[0] = errors / length
        weights = (places * gamma[..., None]).mT  # [N, R, c]
        writes, gram_phi = self._muon_writes(phase), None
        if writes is not None and options.momentum != "carry":
            k = precise(self.layout.split(tokens)["k"].unflatten(0, (self.heads, -1)))
            gram_phi = (k @ k.mT if self.feature_map is None else self.feature_map.kernel(k, k)).flatten(0, 1)
        for m, gradient in zip(self.matrices, gradients, strict=True):
            of_hidden = self.deep and m.index == 0
            inputs = x if of_hidden else tokens[..., self.layout.phi]
            self._move(work, new, m, weights, gradient, own, inputs, None if of_hidden else gram_phi, writes)

        new["step_log_a"] = work["step_log_a"] + own["log_alpha"][:, 0, 0]
        if options.momentum == "carry":
            new["step_log_beta"] = work["step_log_beta"] + own["log_theta"][:, 0, 0]
            new["step_m"] = own["log_alpha"][:, 0, 0].exp() * work["step_m"] + new["step_log_beta"].exp()
        new["position"] = work["position"] + 1
        return new, tokens

    def _muon_writes(self, phase):
        """Rows in which Muon writes at this token, `[N, 1, 1]`; None if nobody needs to look: there are none."""
        options = self.options
        if options.rule != "muon":
            return None
        writes = (phase + 1) % options.muon_interval == 0
        if not torch.compiler.is_compiling() and not bool(writes.any()):
            return None
        return writes.repeat(self.heads)[:, None, None]

    def _errors(self, work, k, v, x, x_all):
        """Errors of the window's tokens `[N, c, V]` by the output matrix: at its latest value, or at the chunk's start."""
        if self.options.inner_loss == "dot":
            return -v
        if self.options.errors_follow_writes:
            errors = self._read(work, self.output, x, torch.bmm(x, x_all.mT)) - v
        else:
            errors = self._plus_shared(torch.bmm(x, work["matrix_0"].mT) - v, x, self._start(self.output))
        return errors if self.rho is None else errors + self.rho * k

    def _move(self, work, new, m: _Matrix, weights, gradient, own, x, gram, writes):
        """Add the window's gradients `[N, c, out]` to the momentum's and the matrix's running parts.

        `x [N, R, in]`: the matrix's inputs; `gram`: their inner products where they are known; `writes`: `_muon_writes`.
        """
        options, eta = self.options, own["eta"]
        if not m.by_muon:
            weights = weights * (eta * m.rate)
        alpha = own["log_alpha"].exp()
        offset = work[m.offset] * alpha
        if options.momentum != "none":
            gradient = torch.baddbmm(work[m.gradient] * own["log_theta"].exp(), weights, gradient)
            new[m.gradient] = gradient
            if not m.by_muon:
                new[m.offset] = offset + gradient
                return
        elif not m.by_muon:
            new[m.offset] = torch.baddbmm(offset, weights, gradient)
            return
        else:
            gradient = torch.bmm(weights, gradient)
        new[m.offset] = offset
        if writes is not None:
            step = self._orthogonal(work, m, gradient, own, x, gram) * (eta * m.rate)
            new[m.offset] = offset + torch.where(writes, step, 0.0)

    def _orthogonal(self, work, m: _Matrix, gradient, own, x, gram):
        """The momentum with its singular values near one: in token space `[N, R, out]`, or dense `[N, out, in]`."""
        options = self.options
        if m.dense:
            beta = (work["step_log_beta"] + own["log_theta"][:, 0, 0]).exp()[:, None, None]
            state = torch.baddbmm(beta * work[m.momentum], gradient.mT, x)
            return newton_schulz(state, options.newton_schulz_steps, options.newton_schulz_coefficients)
        e = precise(gradient)
        gram = precise(x) @ precise(x).mT if gram is None else gram
        factors = self.factors(e @ e.mT, gram, options.newton_schulz_steps, options.newton_schulz_coefficients)
        return torch.bmm(factors.to(gradient.dtype).mT, gradient)

    def _read(self, work, m: _Matrix, z, gram):
        """`W_t z` for `z [N, n, in]`, `gram = z x^T [N, n, R]`."""
        return self._plus_shared(self._moved(work, m, z, gram, torch.bmm(z, work[m.delta].mT)), z, self._start(m))

    def _moved(self, work, m: _Matrix, z, gram, moved):
        """`(W_t - M_0) z`, `moved = D z`."""
        y = moved * work["step_log_a"].exp()[:, None, None]
        if m.carry and not m.by_muon:
            y = y - work["step_m"][:, None, None] * torch.bmm(z, work[m.momentum].mT)
        if m.dense:
            return torch.baddbmm(y, z, work[m.offset].mT, alpha=-1)
        return torch.baddbmm(y, gram, work[m.offset], alpha=-1)

    def _output(self, work: State, tokens, q, phi, moved, base):
        """`M_t(q) [N, 1, V]` from `phi(q)` and its products with each hidden matrix; `work` holds the token's writes."""
        z, gram = phi, torch.bmm(phi, tokens[..., self.layout.phi].mT)
        if self.deep:
            hidden = [self._moved(work, m, phi, gram, d) for m, d in zip(self.hidden, moved, strict=True)]
            hidden = [h if b is None else h + b for h, b in zip(hidden, base, strict=True)]
            z = activate(hidden[0] if len(hidden) == 1 else torch.cat(hidden, -1), self.num_hidden)
            gram = torch.bmm(z, work["step_x"].mT)
        y = self._read(work, self.output, z, gram)
        return y if self.rho is None else y + self.rho * q

    def _end_chunk(self, work: State, tokens: torch.Tensor) -> State:
        """The state with the chunk's `tokens [N, R, W]` folded into `D` and `S`, the last as the next one's earlier ones."""
        new = dict(work)
        a = work["step_log_a"].exp()[:, None, None]
        features = tokens[..., self.layout.phi]
        for m in self.matrices:
            x = work["step_x"] if m.index == 0 and self.deep else features
            delta = work[m.delta] * a
            if m.carry:
                if not m.by_muon:
                    delta = delta - work["step_m"][:, None, None] * work[m.momentum]
                beta = work["step_log_beta"].exp()[:, None, None]
                new[m.momentum] = torch.baddbmm(beta * work[m.momentum], work[m.gradient].mT, x)
            new[m.delta] = delta - work[m.offset] if m.dense else delta.baddbmm(work[m.offset].mT, x, alpha=-1)
        new[TOKENS] = self.layout.next_chunk(tokens)
        return self._anchored(new)

    def take(self, work: State, token, rows=None, phi_q=None, q=None) -> torch.Tensor | None:
        """Take one token `[N, 1, W]` in, in place of `work`; `rows [B]` that have none stay as they are.

        Returns the output `[N, 1, V]` at `q [N, 1, K]`, of which `phi_q` are the features, or None without a query.
        """
        phi = token[..., self.layout.phi]
        # One pass over the hidden matrices for key and query
        both = phi if q is None else torch.cat([phi, phi_q], 1)
        moved = [torch.bmm(both, work[m.delta].mT) for m in self.hidden]
        base = [self._plus_shared(None, both, self._start(m)) for m in self.hidden]

        def at(place, products):
            return [None if x is None else x[:, place : place + 1] for x in products]

        new, tokens = self._write(work, token, at(0, moved), at(0, base))
        y = None if q is None else self._output(new, tokens, q, phi_q, at(1, moved), at(1, base))
        ended = new["position"] % self.options.chunk_size == 0
        if torch.compiler.is_compiling() or bool(ended.any()):
            self._keep(new, self._end_chunk(new, tokens), ended)
        self._keep(work, new, rows)
        return y

    def _keep(self, work: State, new: State, rows) -> None:
        """Move `rows [B]` of `work` on to `new` (all of them: `None`)."""
        for name, value in new.items():
            if rows is None:
                work[name] = value
            elif value is not work[name]:
                # In the working state a row's mask comes once for every head
                mask = rows if len(value) == len(rows) else rows.repeat(self.heads)
                work[name] = torch.where(mask.view(-1, *[1] * (value.ndim - 1)), value, work[name])

    # Triton's way, on the public state

    def begin_by_kernel(self, state: State | None) -> State:
        """The public state with all that a step keeps."""
        if state is None or "step_log_a" not in state:
            state = self.layout.to_public(self.begin(state))
        return {n: x for n, x in state.items() if n != TOKENS}

    def take_by_kernel(self, work: State, token: State, rows, q) -> torch.Tensor:
        """Take one token `[B, H, *]` in, in place of `work`; the output at `q [B, H, K]`."""
        new, y = self.kernel.take(work, token, q)
        ended = new["position"] % self.options.chunk_size == 0
        folded = None
        if torch.compiler.is_compiling() or bool(ended.any()):
            held = {**new, **{n: pad(new[n], (0, 0) * (new[n].ndim - 2) + (0, 1)) for n in (*GATES, "gamma")}}
            by_rows = self.layout.to_rows(held, self.feature_map, q.dtype)
            folded = self.layout.to_public(self._end_chunk(by_rows, by_rows[TOKENS]))
            del folded[TOKENS]
        for name in ("k", "v"):
            new[name] = new[name][:, :-1]
        if folded is not None:
            self._keep(new, folded, ended)
        self._keep(work, new, rows)
        return y


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
    step.check(call.state)
    outputs, length = [], call.q.shape[1]
    taking = [None if call.lengths is None else t < call.lengths for t in range(length)]
    if step.kernel is not None:
        state = step.begin_by_kernel(call.state)
        for t, rows in enumerate(taking):
            token = {n: x[:, t] for n, x in call.tokens._asdict().items()}
            outputs.append(step.take_by_kernel(state, token, rows, call.q[:, t])[:, None])
        return _cut(torch.cat(outputs, 1), taking), state
    given = step.begin(call.state)
    work = dict(given)
    both = torch.cat([call.tokens.k, call.q], 1).permute(2, 0, 1, 3)
    phi = both if call.feature_map is None else call.feature_map(both)
    tokens = call.tokens
    if step.earlier:
        # Tokens before the sequence's first do not exist: their places in a window weigh nothing.
        ago = torch.arange(step.window, device=both.device)
        position = work["position"][:, None] + torch.arange(length, device=both.device)
        tokens = tokens._replace(gamma=torch.where((ago <= position[..., None])[:, :, None], tokens.gamma, 0.0))
    packed, q = step.layout.pack(tokens, phi[:, :, :length]), both[:, :, length:].flatten(0, 1)
    phi_q = phi[:, :, length:].flatten(0, 1)
    for t, rows in enumerate(taking):
        here = slice(t, t + 1)
        outputs.append(step.take(work, packed[:, here], rows, phi_q[:, here], q[:, here]))
    y = outputs[0] if length == 1 else torch.cat(outputs, 1)
    y = y.unflatten(0, (step.heads, -1)).permute(1, 2, 0, 3)
    return _cut(y, taking), step.layout.to_public(work, call.state, given)


def _cut(y, taking):
    """`y [B, T, H, V]` with zeros where a row has no token."""
    if taking[0] is None:
        return y
    return torch.where(torch.stack(taking, 1)[..., None, None], y, 0.0)
