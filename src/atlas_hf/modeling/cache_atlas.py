"""The one file that talks to transformers' cache: a layer that holds a memory of fixed size instead of keys and values."""

import copy

import torch
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, Cache, CacheLayerMixin
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING, create_recurrent_attention_mask
from transformers.utils import is_torchdynamo_compiling

from .configuration_atlas import LAYER_TYPE, AtlasConfig
from .memory_origin import check_origin, origin_of
from .recurrence_state import FixedState


class AtlasCacheLayer(CacheLayerMixin):
    """Named states of one Atlas block, the batch first in each, and the number of positions seen.

    `DynamicCache(config=config)` builds these layers by their registered type. States are replaced, never written in
    place, so that a backward pass may go through several cached segments.
    """

    _layer_type = LAYER_TYPE
    is_compileable = False
    is_sliding = False
    is_croppable = True
    # The learned initial memory is not known before the first forward pass.
    supports_early_init = False

    def __init__(self, **kwargs):
        super().__init__()
        self.states: dict[str, torch.Tensor] = {}
        self.cumulative_length = 0
        self.device = None
        self.record_past = False
        # (states before the first recorded forward, [(replay, its inputs, number of tokens), ...])
        self._recorded = None
        # What `origin_of` says of the model that writes here; `None` until the first forward pass.
        self.origin: dict | None = None

    def get_states(self) -> dict[str, torch.Tensor] | None:
        """The states to go on from; `None` at a sequence's start."""
        return self.states if self.is_initialized else None

    def update_states(self, states: dict[str, torch.Tensor], num_tokens: int, replay=None) -> None:
        """Take the states after `num_tokens` more positions (padding included).

        `replay`: `(function, inputs)`, with `function(states, *inputs)` giving `(output, states)` again from inputs cut to
        their first tokens; what `crop` needs.
        """
        before = self.states
        if not self.is_initialized:
            self.lazy_initialization(next(iter(states.values())))
        if self.record_past and replay is not None:
            first, pending = (before, []) if self._recorded is None else self._recorded
            self._recorded = (first, [*pending, (*replay, num_tokens)])
        self.states = states
        self.cumulative_length += num_tokens

    def lazy_initialization(self, key_states, value_states=None) -> None:
        self.device = key_states.device
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        # Rebuilding a DynamicCache from its parts, as DDP does, passes what iterating it gave: nothing.
        if key_states is None and value_states is None:
            return None, None
        raise TypeError("an Atlas layer holds a memory, not keys and values: use `update_states`")

    def get_seq_length(self) -> int:
        """Positions seen, padding included: the attention mask's length less the new tokens."""
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cumulative_length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def _map(self, function) -> None:
        if self._recorded is not None:
            raise RuntimeError(
                "the batch of a recorded cache cannot change between a forward pass and its `crop`: call `crop(0)` first"
            )
        self.states = {name: function(state) for name, state in self.states.items()}

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._map(lambda state: state.index_select(0, beam_idx.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._map(lambda state: state[indices.to(state.device)])

    def offload(self) -> None:
        self._map(lambda state: state.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized:
            self._map(lambda state: state.to(self.device, non_blocking=True))

    def reset(self) -> None:
        """Forget the sequence: the next one starts from the learned memory, not from zeros."""
        self.states, self._recorded, self.is_initialized, self.cumulative_length = {}, None, False, 0

    def detach(self) -> None:
        """Cut the states off from the passes that made them: back-propagation ends here, the memory stays."""
        self.states = {name: state.detach() for name, state in self.states.items()}
        if self._recorded is not None:
            before, pending = self._recorded
            before = {name: state.detach() for name, state in before.items()}
            pending = [(f, tuple(x if x is None else x.detach() for x in xs), n) for f, xs, n in pending]
            self._recorded = (before, pending)

    def snapshot(self) -> "AtlasCacheLayer":
        """A layer in the same state, from then on independent; no tensor is copied, since none is written in place."""
        other = copy.copy(self)
        other.states = dict(self.states)
        return other

    def __deepcopy__(self, memo) -> "AtlasCacheLayer":
        # States may be part of a graph, and what is recorded refers to the model: neither can be copied as it stands.
        other = self.snapshot()
        other._copy_tensors()
        return other

    def _copy_tensors(self) -> None:
        self.states = {name: state.clone() for name, state in self.states.items()}

    def activate_past_recording(self) -> None:
        self.record_past = True

    def deactivate_past_recording(self) -> None:
        """Forget what was recorded, and record no more: what is recorded grows with the tokens."""
        self.record_past, self._recorded = False, None

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last `-tokens_to_remove` tokens back: restore the recorded states and replay the tokens that stay."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove={tokens_to_remove}: pass minus the number of tokens to remove, or 0")
        if self._recorded is None:
            if tokens_to_remove != 0:
                raise RuntimeError(
                    "a memory of fixed size cannot be cut after the fact: call `cache.activate_past_recording()` before the "
                    "forward pass whose tokens are to be removed"
                )
            return
        before, pending = self._recorded
        kept = sum(num_tokens for *_, num_tokens in pending) + tokens_to_remove
        if kept < 0:
            raise RuntimeError(
                f"cannot remove {-tokens_to_remove} tokens: only {kept - tokens_to_remove} were recorded"
            )
        self._recorded = None
        if tokens_to_remove == 0:
            return
        self.cumulative_length += tokens_to_remove
        states = before or None
        for function, inputs, num_tokens in pending:
            take = min(num_tokens, kept)
            kept -= take
            if take:
                _, states = function(states, *(x if x is None else x[:, :take] for x in inputs))
        self.states = states if states is not None else {}
        self.is_initialized = states is not None


class AtlasStaticCacheLayer(AtlasCacheLayer):
    """The same states at fixed addresses, for `cache_implementation="static"` and compiled forward passes."""

    # An own registered type would replace the dynamic layer's.
    _layer_type = None
    is_compileable = True
    is_croppable = False

    def __init__(self, **kwargs):
        super().__init__()
        # A tensor: a Python integer would become a constant of the compiled graph.
        self.cumulative_length = torch.tensor(0, dtype=torch.long)
        self.buffers = FixedState()

    def update_states(self, states, num_tokens, replay=None) -> None:
        other_shapes = not self.is_initialized and any(
            s.shape != self.buffers[n].shape for n, s in states.items() if n in self.buffers
        )
        if self.buffers.keys() != states.keys() or other_shapes:
            self.device = next(iter(states.values())).device
            self.cumulative_length = self.cumulative_length.to(self.device)
            # Laid out as the states are, so that a step need not lay them out anew
            self.buffers = FixedState({n: torch.zeros_like(s) for n, s in states.items()})
            if not is_torchdynamo_compiling():
                for buffer in (*self.buffers.values(), self.cumulative_length):
                    torch._dynamo.mark_static_address(buffer)
        for name, state in states.items():
            if state is not self.buffers[name]:
                self.buffers[name].copy_(state)
        self.states, self.is_initialized = self.buffers, True
        self.cumulative_length.add_(num_tokens)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            raise RuntimeError(
                f"a static cache takes no tokens back (tokens_to_remove={tokens_to_remove}): use "
                "`DynamicCache(config=model.config)` with `activate_past_recording()`"
            )

    def _map(self, function) -> None:
        self.buffers = FixedState({name: function(state) for name, state in self.states.items()})
        self.states = self.buffers

    def detach(self) -> None:
        for buffer in self.buffers.values():
            buffer.detach_()

    def snapshot(self) -> "AtlasStaticCacheLayer":
        other = copy.copy(self)
        other._copy_tensors()
        return other

    def _copy_tensors(self) -> None:
        self.cumulative_length = self.cumulative_length.clone()
        self.buffers = FixedState({name: buffer.clone() for name, buffer in self.buffers.items()})
        self.states = self.buffers if self.is_initialized else {}

    def reset(self) -> None:
        self.states, self.is_initialized = {}, False  # the buffers keep their addresses
        self.cumulative_length.zero_()


# Only transformers' own static layers register themselves there.
STATIC_LAYER_TYPE_MAPPING[LAYER_TYPE] = AtlasStaticCacheLayer
LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING[LAYER_TYPE] = create_recurrent_attention_mask


def detach_cache(cache: Cache) -> Cache:
    """End back-propagation at what `cache` holds, and return it: for documents longer than a training pass.

    Gradients of later segments then stop at the memory that this cache hands on, and the activations of earlier ones can be
    freed. What the model computes stays the same.

    Raises:
        TypeError: the cache is none of an Atlas model.
    """
    layers = getattr(cache, "layers", None)
    if not layers or not all(hasattr(layer, "update_states") for layer in layers):
        raise TypeError(
            f"{type(cache).__name__} holds no memory to detach: pass what an Atlas model returned as `cache`"
        )
    for layer in layers:
        layer.detach()
    return cache


def recording_layers(cache: Cache | None) -> list[AtlasCacheLayer]:
    """Layers that keep what `crop` needs; none without a cache."""
    layers = getattr(cache, "layers", ())  # what is no cache at all is refused by the forward pass
    return [layer for layer in layers if getattr(layer, "record_past", False)]


def positions_seen(cache: Cache | None) -> int | torch.Tensor:
    """Positions that a cache has seen, padding included; 0 without one."""
    return 0 if cache is None else cache.get_seq_length()


def _adopt(cache: Cache) -> None:
    """Replace fresh layers of another copy of this file by own ones.

    The table of layer types is one for the process, and another revision, loaded as remote code, enters a class of its own
    there: whichever is imported last makes the layers of every new cache.
    """
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, AtlasCacheLayer) or layer.is_initialized:
            continue
        if any(base.__name__ == AtlasCacheLayer.__name__ for base in type(layer).__mro__):
            cache.layers[i] = AtlasStaticCacheLayer() if layer.is_compileable else AtlasCacheLayer()
            cache.layers[i].record_past = layer.record_past


def check_cache(cache: Cache | None, config: AtlasConfig, batch: int, dtype: torch.dtype) -> None:
    """Refuse a cache whose layers cannot hold a memory, or hold that of another model or number of rows.

    Layers that have seen tokens are known by their methods, not by class: another copy of this file may have made them.
    """
    if cache is None or torch.compiler.is_compiling():
        return
    if not hasattr(cache, "layers"):
        raise TypeError(
            f"cache must be a `Cache` of transformers, got {type(cache).__name__}: pass `DynamicCache(config=model.config)` "
            "or what the model returned as `cache`"
        )
    _adopt(cache)
    num_layers = config.num_hidden_layers
    if len(cache.layers) < num_layers or not all(hasattr(layer, "update_states") for layer in cache.layers):
        kinds = sorted({type(layer).__name__ for layer in cache.layers})
        raise ValueError(
            f"cache has {len(cache.layers)} layers of type {', '.join(kinds) or 'none'}; an Atlas model with {num_layers} "
            "blocks needs `DynamicCache(config=model.config)`"
        )
    first, origin = cache.layers[0], origin_of(config, dtype)
    if first.is_initialized and getattr(first, "origin", None) is not None:
        check_origin(first.origin, origin, "the cache")
    first.origin = origin
    for state in (first.get_states() or {}).values():
        if state.shape[0] != batch:
            raise ValueError(
                f"cache holds {state.shape[0]} rows, but the batch has {batch}: go on with the rows it has seen"
            )
