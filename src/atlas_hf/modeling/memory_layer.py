"""The token mixer of an Atlas block: projections, gates and the recurrence over one layer's memory.

Legend: B batch, T tokens, D model width, H heads, K = V head width, E hidden width of the memory, F features, c window.
"""

import copy
import functools
import math

import torch
import torch.nn.functional as F
from torch import nn

from .configuration_atlas import AtlasConfig
from .dispatch import select_fused
from .feature_map import PolynomialFeatureMap
from .recompute import recomputed
from .recurrence_chunk import chunk_atlas
from .recurrence_step import step_atlas
from .sequence_layout import SequenceLayout
from .short_convolution import ShortConvolution

# The newest token's window gate starts open; the older ones at `window_gate_init`.
NEWEST_GATE_INIT = 0.982
# A gate of either sign and size one makes products with heavy tails, from which little is learned for long; so it starts
# at 1, give or take this.
GATE_SPREAD = 0.3
# Tokens of all rows that a CPU takes through the memory at one time, where no gradients are asked for.
TOKENS_AT_ONCE = 1024
FEWEST_CHUNKS = 8
# The configuration's fields that are arguments of the recurrence
RECURRENCE_FIELDS = (
    "chunk_size",
    "rule",
    "momentum",
    "inner_loss",
    "output_errors",
    "muon_interval",
    "newton_schulz_steps",
    "inner_norm",
    "hidden_rate",
    "decay_to",
    "kernels",
)


def _gated(y, gate):
    return y * F.silu(gate)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """At least float32, whatever the model's dtype; float64 models stay in float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _logit(p: float) -> float:
    return math.log(p / (1 - p))


def fetches_weights_of(*names):
    """Let a method use the weights of these children, of which accelerate's offloading knows nothing.

    Its hooks fetch a module's weights for the time of that module's `forward`. A child that has no forward, or whose other
    methods are used too, must have its weights for the time of the whole method.
    """

    def decorator(method):
        @functools.wraps(method)
        def wrapped(self, *args, **kwargs):
            hooked = [child for child in (getattr(self, name) for name in names) if hasattr(child, "_hf_hook")]
            if not hooked:
                return method(self, *args, **kwargs)
            forwards = [child.forward for child in hooked]
            try:
                for child in hooked:
                    child._hf_hook.pre_forward(child)
                    child.forward = child._old_forward  # the hook would send the weights away again after it
                return method(self, *args, **kwargs)
            finally:
                for child, forward in zip(hooked, forwards, strict=True):
                    child.forward = forward
                    child._hf_hook.post_forward(child, ())

        return wrapped

    return decorator


class HeadRMSNorm(nn.Module):
    """Root-mean-square norm over each head's width, in float32 (float64 for float64 models)."""

    def __init__(self, head_dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(head_dim))
        self.eps = eps

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None, dtype=None, kernels: str = "torch"):
        """`x [..., V]` normed, in `dtype` (`None`: x's); with a `gate [..., V]`, times its SiLU."""
        dtype = x.dtype if dtype is None else dtype
        if gate is not None and (fused := select_fused(kernels, x)):
            return fused.gated_norm(x, self.weight, gate, self.eps).to(torch.promote_types(dtype, gate.dtype))
        return recomputed(self._normed, x, self.weight, gate, dtype)

    def _normed(self, x, weight, gate, dtype):
        y = _wide(x)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        y = (y * weight.to(y.dtype)).to(dtype)
        return y if gate is None else _gated(y, gate)


class AtlasMemory(nn.Module):
    """Reads and rewrites a memory of fast weights as the tokens go by (paper, sections 3 to 5).

    Queries, keys and values are projected, convolved over `conv_kernel_size` tokens, passed through SiLU; queries and keys
    are L2-normalised. Four kinds of gates per head come from the same input: retention `alpha`, inner learning rate
    `eta <= 1`, momentum decay `theta` and the window's `gamma`. The output passes a norm per head and a SiLU gate.
    """

    def __init__(self, config: AtlasConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.num_heads, self.head_dim = config.num_attention_heads, config.head_dim
        width = self.num_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.g_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.conv = ShortConvolution(3 * width, config.conv_kernel_size)
        self.num_gates = 3 + config.omega_window
        self.gate_proj = nn.Linear(config.hidden_size, self.num_heads * self.num_gates, bias=False)
        # Memory, features and gates stay in float32 whatever the model's dtype.
        self.gate_bias = nn.Parameter(torch.empty(self.num_heads, self.num_gates, dtype=torch.float32))
        self.feature_map = PolynomialFeatureMap(
            self.num_heads, self.head_dim, config.feature_degree, config.feature_rank
        )
        self.memory_weights = nn.ParameterList(
            torch.empty(self.num_heads, *shape, dtype=torch.float32) for shape in self._matrix_shapes()
        )
        self.residual_scale = None
        if config.memory != "linear" and config.residual_scale != 0:
            self.residual_scale = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32))
        self.norm = HeadRMSNorm(self.head_dim, config.rms_norm_eps)

    def __deepcopy__(self, memo):
        if not memo:
            # Copied by itself (PEFT's `modules_to_save`), it goes on to follow what may be changed of a live model's settings
            memo[id(self.config)] = self.config
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def _matrix_shapes(self) -> list[tuple[int, int]]:
        features, hidden = self.feature_map.num_features, self.config.memory_expansion * self.head_dim
        if self.config.memory == "linear":
            return [(self.head_dim, features)]
        num_hidden = 2 if self.config.memory == "gated" else 1
        return [(self.head_dim, hidden)] + [(hidden, features)] * num_hidden

    def reset_parameters(self, init) -> None:
        """Starts of everything but the projections; `init` is `transformers.initialization`."""
        config = self.config
        self.conv.reset_parameters(init)
        # A gated memory's second hidden matrix starts as an open gate, and needs the constant feature for it.
        opens = config.memory == "gated" and config.feature_degree > 1
        self.feature_map.reset_parameters(init, constant=1.0 if opens else 0.0)
        starts = [config.retention_init, config.learning_rate_init, config.momentum_init, NEWEST_GATE_INIT]
        starts += [config.window_gate_init] * (config.omega_window - 1)
        init.copy_(self.gate_bias, torch.tensor([_logit(p) for p in starts]).expand(self.num_heads, -1))
        init.ones_(self.norm.weight)
        if config.memory == "linear":
            init.zeros_(self.memory_weights[0])
        else:
            # Hidden units are O(1); the output is near zero, so that an unwritten memory says next to nothing.
            init.normal_(self.memory_weights[0], mean=0.0, std=config.initializer_range)
            std = self.feature_map.squared_norm_at_start() ** -0.5
            for matrix in self.memory_weights[1:]:
                init.normal_(matrix, mean=0.0, std=std)
            if opens:
                w2, w3 = (matrix.detach().clone() for matrix in self.memory_weights[1:])
                w2[..., 0], w3 = 0.0, GATE_SPREAD * w3
                w3[..., 0] = 1.0
                init.copy_(self.memory_weights[1], w2)
                init.copy_(self.memory_weights[2], w3)
        if self.residual_scale is not None:
            init.constant_(self.residual_scale, config.residual_scale)

    def forward(self, hidden_states, layout: SequenceLayout | None = None, cache=None) -> torch.Tensor:
        """`[B, T, D] -> [B, T, D]`; masked tokens (of `layout`) come out as zero and leave no trace in `cache`."""
        if cache is None:
            return self._mix(hidden_states, layout, None, False)[0]
        layer = cache.layers[self.layer_idx]
        before = layer.get_states()
        output, states = self._mix(hidden_states, layout, before, True)
        if layer.is_compileable and (before is None or hidden_states.shape[1] != 1):
            # States of one form from the first step on: a token that does not exist adds what steps keep beside the memory.
            absent = torch.zeros(hidden_states.shape[0], 1, dtype=torch.bool, device=hidden_states.device)
            _, states = self._mix(hidden_states[:, :1], SequenceLayout.from_mask(absent), states, True)
        mask, segments = (None, None) if layout is None else (layout.mask, layout.segments)
        layer.update_states(states, hidden_states.shape[1], replay=(self._replay, (hidden_states, mask, segments)))
        return output

    def _replay(self, states, hidden_states, mask, segments):
        layout = None if mask is None else SequenceLayout.from_mask(mask)
        if segments is not None:
            layout = SequenceLayout.from_segments(segments, mask)
        hook = getattr(self, "_hf_hook", None)
        if hook is None:
            return self._mix(hidden_states, layout, states, True)
        # Not called through `forward`: offloaded weights have to be fetched here
        hook.pre_forward(self)
        try:
            return self._mix(hidden_states, layout, states, True)
        finally:
            hook.post_forward(self, ())

    def _gates(self, hidden_states):
        """`log_alpha, eta, log_theta [B, T, H]` and `gamma [B, T, H, c]`, float32."""
        # In float16 and quantised models the gates' projection stays in float32 (`_keep_in_fp32_modules`).
        logits = self.gate_proj(hidden_states.to(self.gate_proj.weight.dtype))
        logits = _wide(logits).unflatten(-1, (self.num_heads, self.num_gates))
        logits = logits + self.gate_bias
        gamma = logits[..., 3:].sigmoid()
        if self.config.rule == "gd" or self.config.output_errors == "exact":
            # One normalised write must not overshoot, however many tokens of the window it serves.
            gamma = gamma / gamma.sum(-1, keepdim=True).clamp_min(1)
        return F.logsigmoid(logits[..., 0]), logits[..., 1].sigmoid(), F.logsigmoid(logits[..., 2]), gamma

    def _heads(self, qkv, tail, lengths, weight):
        """Convolved and normalised `q, k, v [B, T, H, K]`, and the convolution's new tail."""
        qkv, tail = self.conv(qkv, tail, lengths, self.config.kernels, weight)
        qkv = _wide(qkv).unflatten(-1, (3, self.num_heads, self.head_dim))
        q, k = F.normalize(qkv[..., :2, :, :], dim=-1, eps=1e-6).unbind(-3)
        return q, k, qkv[..., 2, :, :], tail

    def _recall_sequences(self, qkv, gates, layout, states, keep_states: bool, dtype):
        """Outputs of all sequences, normed, each token at its place `[B, T, H V]`, and the state of each row's last one."""
        batch, num_tokens, _ = qkv.shape
        outputs, held, order = [], [], []
        for numbers, part in layout.parts():
            before = states
            if states is not None and numbers is not None:
                before = {n: s.index_select(0, numbers) for n, s in states.items()}
            of_part = part.gather(qkv), [part.gather(g) for g in gates], part.lengths
            y, new_states = self._recall(*of_part, before, keep_states)
            outputs.append(self.norm(y, dtype=dtype).flatten(2))
            held.append(new_states)
            order.append(numbers)
        y = layout.scatter(outputs, batch, num_tokens)
        if not keep_states:
            return y, None
        new_states = held[0] if len(held) == 1 else {n: torch.cat([part[n] for part in held]) for n in held[0]}
        last = layout.last_sequence_of_row
        if len(held) > 1:
            last = torch.cat(order).argsort()[last]
        elif len(layout.lengths) == batch:
            return y, new_states
        # Packed documents: each row goes on from its last one.
        return y, {n: s.index_select(0, last) for n, s in new_states.items()}

    def _recall_in_parts(self, qkv, gates, states, keep_states: bool):
        """As `_recall`. On a CPU a long text goes through in parts, whose intermediates stay in the processor's cache."""
        batch, length, _ = qkv.shape
        # A part begins with a chunk more than it has: of wide batches, whose parts are short, that would be much.
        chunks = TOKENS_AT_ONCE // (batch * self.config.chunk_size)
        part = chunks * self.config.chunk_size
        whole = torch.is_grad_enabled() or torch.compiler.is_compiling()
        if whole or chunks < FEWEST_CHUNKS or length <= part or qkv.device.type != "cpu":
            return self._recall(qkv, gates, None, states, keep_states)
        outputs = []
        for first in range(0, length, part):
            here, last = slice(first, first + part), first + part >= length
            y, states = self._recall(qkv[:, here], [g[:, here] for g in gates], None, states, keep_states or not last)
            outputs.append(y)
        return torch.cat(outputs, 1), states

    def _recall(self, qkv, gates, lengths, states, keep_states: bool):
        """The memory's outputs `y [B, T, H, V]`, and the states to go on from if they are wanted."""
        # Not by attribute, which transformers makes slow: 3 microseconds each, at every decoded token
        settings = vars(self.config)
        tail = None if states is None else states["conv"]
        q, k, v, tail = recomputed(self._heads, qkv, tail, lengths, self.conv.weight)
        log_alpha, eta, log_theta, gamma = gates
        # The two agree to rounding: the chunk form lays out at least one whole chunk, which is much for a single token.
        recurrence = step_atlas if states is not None and q.shape[1] == 1 else chunk_atlas
        y, new_states = recurrence(
            q,
            k,
            v,
            tuple(self.memory_weights),
            log_alpha=log_alpha,
            eta=eta,
            log_theta=log_theta,
            gamma=gamma,
            feature_map=self.feature_map,
            residual_scale=self.residual_scale,
            lengths=lengths,
            initial_state=states,
            output_final_state=keep_states,
            **{name: settings[name] for name in RECURRENCE_FIELDS},
        )
        return y, {**new_states, "conv": _wide(tail)} if keep_states else None

    @fetches_weights_of("memory_weights", "feature_map", "conv")
    def _mix(self, hidden_states, layout, states, keep_states: bool):
        """Output `[B, T, D]` and, if wanted, the states to go on from; `states=None` begins every sequence anew."""
        qkv = torch.cat([self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)], -1)
        gates = self._gates(hidden_states)
        gate, dtype = self.g_proj(hidden_states), hidden_states.dtype
        if layout is None:
            y, new_states = self._recall_in_parts(qkv, gates, states, keep_states)
            heads = gate.unflatten(-1, (self.num_heads, self.head_dim))
            return self.o_proj(self.norm(y, heads, dtype, self.config.kernels).flatten(2)), new_states
        # Norms belong to the sequences' tokens, gates to the batch's
        y, new_states = self._recall_sequences(qkv, gates, layout, states, keep_states, dtype)
        return self.o_proj(recomputed(_gated, y, gate)), new_states
