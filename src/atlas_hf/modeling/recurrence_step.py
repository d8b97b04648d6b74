"""The recurrence one token at a time, for decoding: factors of the chunk's tokens are kept, matrices stay anchored.

Legend: N rows (head and sequence), H heads, B batch, K key width, V value width, E hidden width, F features, c window, b
chunk, R = b + c - 1 slots: c - 1 tokens from before the chunk, then its own. Layout `[N, ...]`, rows at any phase.

Each matrix has three parts (docs/recurrence.md, section 5), of which a token changes only the last, of the buffers' size:

    W_t z = W_0 z + a_t D z - m_t S z - sum_i O_t[i] (x_i . z)         D, S, x_i, errors at the chunk's start

`P_t[i]`, the momentum's part, is the running sum of the gradients' errors at slot `i`. Under gd `O_t = alpha_t O_{t-1} +
P_t`, `P_t = theta_t P_{t-1} + eta_t G_t`; under Muon `P_t = theta_t P_{t-1} + G_t` and `O_t = alpha_t O_{t-1} + eta_t C_t^T
P_t` with the token-space factors `C_t`. Only Muon with carried momentum has a dense third part.

A token's own mathematics is in `step_writes.py`; here is what stands between tokens: states, chunks and their ends.
"""

import torch
from torch.nn.functional import pad

from .dispatch import select_step
from .recurrence_operator import Call, atlas_operator
from .recurrence_state import FixedState, State, initial_fast
from .step_layout import GATES, TOKENS, OnePlace, OwnPlaces
from .step_writes import SEEN, StepWrites

# The kernel's own: hidden units of the last c - 1 tokens
WINDOW = "step_window"
# Whether a branch of a graph may write into what it is given
_BRANCHES_WRITE = torch.__version__ >= (2, 13)


class _Step(StepWrites):
    def __init__(self, call: Call):
        super().__init__(call)
        self.kernel = self._one_launch()
        self.in_place = isinstance(call.state, FixedState)
        # On a GPU a branch would wait for the device; under gradients nothing may be written in place.
        compiling = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
        self.branches = compiling and call.q.device.type == "cpu" and not torch.is_grad_enabled() and _BRANCHES_WRITE

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
            residual=self.rho is not None,
        )
        if module is None or torch.is_grad_enabled():
            return None
        return module.Step(self.options, self.memory, self.feature_map, self.window)

    # Working state

    def begin(self, state: State | None) -> State:
        """The working state: as kept by an earlier step, or built from the public state by taking its tokens in again."""
        call, dtype = self.call, self.call.q.dtype
        if state is not None and (SEEN if self.kernel is None else WINDOW) in state:
            return self.layout.to_rows(state, self.feature_map, dtype)
        if state is None:
            fast = initial_fast(call.memory, self.options, self.batch, None, dtype)
            state = {m.delta: d.transpose(0, 1) for m, d in zip(self.matrices, fast.delta, strict=True)}
            state |= {m.momentum: s.transpose(0, 1) for m, s in zip(self.matrices, fast.momentum, strict=False)}
            state["position"] = torch.zeros(self.batch, dtype=torch.long, device=call.q.device)
            tokens = call.tokens
            state |= {n: x.new_zeros(self.batch, self.slots - 1, *x.shape[2:]) for n, x in tokens._asdict().items()}
            return self._anchored(self.layout.to_rows(state, self.feature_map, dtype))
        # What another way of stepping kept is left out
        state = {n: x for n, x in state.items() if not n.startswith("step_")}
        work = self._anchored(self.layout.to_rows(state, self.feature_map, dtype))
        phase = work["position"] % self.options.chunk_size
        phases = self.known(phase)
        work["position"] = work["position"] - phase
        # Where rows stand at different phases, a row takes part as long as it has tokens left.
        held, alike = work[TOKENS], len(set(phases)) == 1
        for t in range(max(phases, default=self.options.chunk_size - 1)):
            place = self.place(t) if alike else None
            self.take(work, held[:, self.earlier + t, None], None if alike else t < phase, place)
        if self.kernel is not None:
            # The places of the next token's window, which is not there yet
            places = self.places(work["position"])
            before = places.in_window(pad(work[TOKENS], (0, 0, 0, 1)))[:, :-1]
            work[WINDOW] = self.at_start(*self.products(work, self.entry, before[..., self.layout.phi]))
        return work

    def known(self, numbers: torch.Tensor) -> list[int]:
        """The rows' `numbers [B]`; none of them where looking would mean to wait for a GPU, or to make a graph for them."""
        return [] if numbers.device.type != "cpu" or torch.compiler.is_compiling() else numbers.tolist()

    def place(self, position: int) -> OnePlace:
        return OnePlace(position % self.options.chunk_size, self.options, self.window)

    def places(self, position: torch.Tensor) -> OwnPlaces:
        phase = position % self.options.chunk_size
        return OwnPlaces(phase, self.options, self.window, self.slots, self.heads, self.call.q.dtype)

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
        shapes |= dict.fromkeys(("step_x", "step_columns") if self.deep else ())
        if WINDOW not in state:
            shapes[SEEN] = (self.earlier, sum(self.seen))
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
        if self.deep:
            work["step_columns"] = zeros(self.memory[0].shape[-1])
            if self.options.inner_norm:  # lengths of `W1`'s columns
                output = work["matrix_0"]
                if self.shared:
                    output = (output.unflatten(0, (self.heads, -1)) + self.memory[0][:, None]).flatten(0, 1)
                work["step_columns"] = output.square().sum(-2)
        earlier = self.layout.split(first[:, : self.earlier])
        phi = first[:, : self.earlier, self.layout.phi]
        moved, base = self.products(work, self.entry, phi)
        seen, x = self.look(work, phi, earlier["k"], earlier["v"], moved, base)
        if self.deep:
            work["step_x"] = torch.cat([x, zeros(self.options.chunk_size, x.shape[-1])], 1)
        work[SEEN] = seen
        if self.kernel is not None:
            work[WINDOW] = self.at_start(moved, base)
        return work

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

    def take(self, work: State, token, rows=None, place=None, phi=None, q=None) -> torch.Tensor | None:
        """Take one token `[N, 1, W]` in, in place of `work`; `rows [B]` that have none stay as they are.

        `place`: where it stands in all rows, if that is known.

        Returns the output `[N, 1, V]` at `q [N, 1, K]`, or None without a query. `phi [N, 2, F]`: features of key and query.
        """
        # One pass over the matrices for both
        phi = token[..., self.layout.phi] if q is None else phi
        moved, base = self.products(work, self.entry, phi)

        def at(row, products):
            return [None if x is None else x[:, row : row + 1] for x in products]

        place = self.places(work["position"]) if place is None else place
        new, tokens = self.write(work, token, phi[:, :1], at(0, moved), at(0, base), place)
        y = None if q is None else self.read(new, tokens, q, phi[:, 1:], at(1, moved), at(1, base), place)
        # A token that is taken in again, without a query, ends no chunk
        if q is not None and place.ends_chunk:
            if self.branches:
                self._fold_in_branch(work, new, tokens, place.ended, rows)
            else:
                self._keep(new, self._end_chunk(new, tokens), place.ended)
        self._keep(work, new, rows)
        return y

    def _fold_in_branch(self, work: State, new: State, tokens, ended, rows) -> None:
        """End the chunks of `ended [B]` rows in a branch of the graph, which tokens that end none do not enter.

        Both branches giving tensors would have the idle one copy all matrices; so this one writes into those of `new`.
        """
        ended = ended if rows is None else ended & rows
        if not self.in_place:
            new |= {name: x.clone() for name, x in new.items() if x is work[name]}
        # A branch takes no slices of others' tensors
        new |= {name: x.contiguous() for name, x in new.items()}

        def stay():
            return ended.any()

        def fold():
            before = {**new, TOKENS: tokens[:, :-1]}
            after = dict(before)
            self._keep(after, self._end_chunk(before, tokens), ended)
            for name, x in after.items():
                if x is not before[name]:
                    before[name].copy_(x)
            return ended.any()

        torch.cond(ended.any(), fold, stay, ())
        new[TOKENS] = tokens[:, :-1]

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
        if state is None or WINDOW not in state:
            state = self.layout.to_public(self.begin(state))
        return {n: x for n, x in state.items() if n not in (TOKENS, SEEN)}

    def take_by_kernel(self, work: State, token: State, rows, q) -> torch.Tensor:
        """Take one token `[B, H, *]` in, in place of `work`; the output at `q [B, H, K]`."""
        new, y = self.kernel.take(work, token, q)
        ended = new["position"] % self.options.chunk_size == 0
        folded = None
        if torch.compiler.is_compiling() or bool(ended.any()):
            held = {**new, **{n: pad(new[n], (0, 0) * (new[n].ndim - 2) + (0, 1)) for n in (*GATES, "gamma")}}
            by_rows = self.layout.to_rows(held, self.feature_map, q.dtype)
            folded = self.layout.to_public(self._end_chunk(by_rows, by_rows[TOKENS]))
            del folded[TOKENS], folded[SEEN]
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
    lengths = None if call.lengths is None else call.lengths.to(call.q.device)
    taking = [None if lengths is None else t < lengths for t in range(length)]
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
    positions = step.known(work["position"])
    if min(positions, default=0) < step.earlier:
        # Tokens before the sequence's first do not exist: their places in a window weigh nothing.
        ago = torch.arange(step.window, device=both.device)
        position = work["position"][:, None] + torch.arange(length, device=both.device)
        tokens = tokens._replace(gamma=torch.where((ago <= position[..., None])[:, :, None], tokens.gamma, 0.0))
    packed, q = step.layout.pack(tokens, phi[:, :, :length]), both[:, :, length:].flatten(0, 1)
    phi = phi.flatten(0, 1).unflatten(1, (2, length))
    alike = call.lengths is None and len({p % step.options.chunk_size for p in positions}) == 1
    for t, rows in enumerate(taking):
        here, place = slice(t, t + 1), step.place(positions[0] + t) if alike else None
        outputs.append(step.take(work, packed[:, here], rows, place, phi[:, :, t], q[:, here]))
    y = outputs[0] if length == 1 else torch.cat(outputs, 1)
    y = y.unflatten(0, (step.heads, -1)).permute(1, 2, 0, 3)
    return _cut(y, taking), step.layout.to_public(work, call.state, given)


def _cut(y, taking):
    """`y [B, T, H, V]` with zeros where a row has no token."""
    if taking[0] is None:
        return y
    return torch.where(torch.stack(taking, 1)[..., None, None], y, 0.0)
