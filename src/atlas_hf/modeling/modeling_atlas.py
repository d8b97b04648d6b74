"""Atlas as a Transformers model: blocks of a recurrent memory and a SwiGLU, a base model and its heads."""

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.modeling_utils import PreTrainedModel, slice_logits_to_keep
from transformers.models.auto import modeling_auto
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .cache_atlas import check_cache, positions_seen, recording_layers
from .checkpoint_fit import check_fit
from .configuration_atlas import LAYER_TYPE, AtlasConfig
from .dispatch import select_fused
from .forward_arguments import check_mask, check_names, packed_segments
from .linear_loss import linear_cross_entropy
from .memory_layer import AtlasMemory
from .recompute import recomputed
from .sequence_layout import SequenceLayout, next_labels

# Labels of this value are no labels.
IGNORED = -100


class AtlasRMSNorm(nn.Module):
    """Root-mean-square norm, taken in float32 (float64 for float64 models)."""

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor, kernels: str = "torch") -> torch.Tensor:
        if self.weight.dtype == hidden_states.dtype and (fused := select_fused(kernels, hidden_states)):
            return fused.rms_norm(hidden_states, self.weight, self.eps)
        return recomputed(self._normed, hidden_states, self.weight)

    def _normed(self, hidden_states, weight):
        x = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return weight * x.to(hidden_states.dtype)


class AtlasMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: AtlasConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]
        self.is_silu = config.hidden_act == "silu"

    def forward(self, hidden_states: torch.Tensor, kernels: str = "torch") -> torch.Tensor:
        gate, up = self.gate_proj(hidden_states), self.up_proj(hidden_states)
        if self.is_silu and gate.dtype == up.dtype and (fused := select_fused(kernels, gate)):
            return self.down_proj(fused.swiglu(gate, up))
        return self.down_proj(recomputed(self._gated, gate, up))

    def _gated(self, gate, up):
        return self.act_fn(gate) * up


class AtlasDecoderLayer(GradientCheckpointingLayer):
    """Norm, memory, norm, SwiGLU, each pair around a residual stream."""

    def __init__(self, config: AtlasConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.input_layernorm = AtlasRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.memory = AtlasMemory(config, layer_idx)
        self.post_memory_layernorm = AtlasRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = AtlasMLP(config)

    # `cache` must stay a keyword of this name: gradient checkpointing finds it by it.
    def forward(self, hidden_states, layout: SequenceLayout | None = None, cache: Cache | None = None, **kwargs):
        kernels = self.config.kernels
        x = self.input_layernorm(hidden_states, kernels)
        hidden_states = hidden_states + self.memory(x, layout=layout, cache=cache)
        return hidden_states + self.mlp(self.post_memory_layernorm(hidden_states, kernels), kernels)


class AtlasPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation shared by all Atlas models."""

    config: AtlasConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["AtlasDecoderLayer"]
    _can_record_outputs = {"hidden_states": AtlasDecoderLayer}
    # A recorded cache can be cropped, so assisted decoding is allowed.
    _is_stateful = False
    _can_compile_fullgraph = False
    # Narrow, of a width that is no multiple of a quantiser's blocks, and what decides how long a memory lasts.
    _keep_in_fp32_modules = ["memory.gate_proj"]
    _keep_in_fp32_modules_strict = ["memory_weights", "feature_map", "gate_bias", "residual_scale"]

    def __init__(self, config: AtlasConfig, *inputs, **kwargs):
        # A configuration may have been changed since it was checked.
        config.validate()
        super().__init__(config, *inputs, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        """As `PreTrainedModel.from_pretrained`, but a checkpoint that contradicts its configuration is refused by field.

        Raises:
            RuntimeError: names the field, its value and the one that the weights have.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        ignore = kwargs.pop("ignore_mismatched_sizes", False)
        model, info = super().from_pretrained(
            pretrained_model_name_or_path, *model_args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
        )
        if not ignore:
            check_fit(model, info)
        return (model, info) if wants_info else model

    @torch.no_grad()
    def initialize_weights(self):
        """Start all weights that no checkpoint gave."""
        mixers = [module for module in self.modules() if isinstance(module, AtlasMemory)]
        mixers = [mixer for mixer in mixers if not getattr(mixer, "_is_hf_initialized", False)]
        super().initialize_weights()
        # Not by `_init_weights`: it is not called for a module whose own weights were all loaded, though its parts lack some.
        for mixer in mixers:
            mixer.reset_parameters(init)


class AtlasModel(AtlasPreTrainedModel):
    """Token embeddings, Atlas blocks and a final norm."""

    def __init__(self, config: AtlasConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([AtlasDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = AtlasRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """Hidden states of `[B, T]` tokens, and the cache to go on from.

        Args:
            attention_mask: `[B, T]` or, with a cache, `[B, past + T]`, any dtype: tokens with zero do not exist, wherever
                they stand.
            position_ids: `[B, T]`; only their restarts matter, which begin a new document (packing). Ignored with a cache
                that has seen tokens. Where a document may begin with a masked token give `seq_idx` instead.
            cache: `DynamicCache(config=config)` or what an earlier call returned.
            kwargs: `seq_idx [B, T]` or `cu_seq_lens_q [N + 1]` (or `cu_seqlens`, as in flash-linear-attention) give packed
                documents explicitly.

        Raises:
            ValueError: arguments that do not fit each other, document boundaries that contradict each other among them; a
                batch without rows or tokens.
        """
        check_names(kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        if cache is not None and self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            raise ValueError(
                "a cache cannot be given while gradient checkpointing is on in training, where blocks run twice: call "
                "`model.activation_checkpointing_disable()`, or train on the document in one pass"
            )
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if inputs_embeds.ndim != 3:
            raise ValueError(
                f"input_ids must be [batch, tokens] and inputs_embeds [batch, tokens, width], got embeddings of shape "
                f"{tuple(inputs_embeds.shape)}: a single text is a batch of one row"
            )
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        batch, num_tokens = inputs_embeds.shape[:2]
        if batch == 0:
            raise ValueError(f"a batch of shape {tuple(inputs_embeds.shape[:2])} has no rows: leave empty batches out")
        if torch.compiler.is_exporting() and not isinstance(num_tokens, int):
            raise ValueError(
                "torch.export of Atlas needs a fixed number of tokens (chunks are laid out by it): leave their dimension "
                "out of dynamic_shapes and export once for each length; the batch may be torch.export.Dim.AUTO"
            )
        check_cache(cache, self.config, batch, self.norm.weight.dtype)
        past = positions_seen(cache)
        if num_tokens == 0:
            raise ValueError(
                f"there is no new token: {'input_ids' if input_ids is not None else 'inputs_embeds'} is empty. To generate "
                f"behind a cache ({int(past)} tokens seen), give the whole text, or only the new tokens and an "
                "attention_mask that covers the seen ones too"
            )
        mask = check_mask(attention_mask, batch, num_tokens, past)
        segments = packed_segments(kwargs, position_ids, mask, batch, num_tokens, inputs_embeds.device, past)
        layout = None
        if segments is not None:
            layout = SequenceLayout.from_segments(segments, mask)
        elif mask is not None:
            layout = SequenceLayout.from_mask(mask)

        hidden_states = inputs_embeds
        for decoder_layer in self.layers[: self.config.num_hidden_layers]:
            hidden_states = decoder_layer(hidden_states, layout=layout, cache=cache, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states, self.config.kernels), cache=cache)


class AtlasForCausalLM(AtlasPreTrainedModel, GenerationMixin):
    """Atlas with a language modelling head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: AtlasConfig):
        super().__init__(config)
        self.model = AtlasModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        skip_logits: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """Logits `[B, T, vocab]` (the last `logits_to_keep` of them, if given) and, with `labels [B, T]`, the loss.

        Arguments as for `AtlasModel.forward`; labels of -100 are ignored, and shifted inside: each real token predicts the
        next real one, and padding nothing. Without any other label the loss is zero, and so are the gradients.
        `skip_logits` gives the loss alone, `logits=None`, without the memory that all logits take (`linear_cross_entropy`).

        Raises:
            ValueError: labels with `logits_to_keep`; `skip_logits` without labels or with a loss function of one's own.
        """
        whole = isinstance(logits_to_keep, int) and logits_to_keep == 0
        if skip_logits and (labels is None or not whole or self.loss_function is not ForCausalLMLoss):
            raise ValueError(
                "skip_logits=True gives transformers' language modelling loss and no logits: pass labels, no logits_to_keep, "
                "and set no loss_function"
            )
        if labels is not None and not whole:
            raise ValueError(
                f"logits_to_keep={logits_to_keep!r} leaves logits out that labels need: pass one of the two, or take the "
                "loss from the logits kept"
            )
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        logits = loss = None
        if not skip_logits:
            logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        if labels is not None:
            if labels.shape != outputs.last_hidden_state.shape[:2]:
                raise ValueError(
                    f"labels must be {tuple(outputs.last_hidden_state.shape[:2])}, one for each token, got "
                    f"{tuple(labels.shape)}; they are shifted inside"
                )
            mask = attention_mask[LAYER_TYPE] if isinstance(attention_mask, dict) else attention_mask
            if mask is not None and kwargs.get("shift_labels") is None:
                ignored = kwargs.get("ignore_index", -100)
                kwargs["shift_labels"] = next_labels(labels, mask[:, -labels.shape[1] :], ignored)
            if skip_logits:
                loss = self._loss_alone(outputs.last_hidden_state, labels, **kwargs)
            else:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            targets = labels[..., 1:] if kwargs.get("shift_labels") is None else kwargs["shift_labels"]
            loss = _zero_without_labels(loss, targets, kwargs.get("ignore_index", IGNORED))
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, cache=outputs.cache, hidden_states=outputs.hidden_states
        )

    def _loss_alone(self, hidden_states, labels, shift_labels=None, **kwargs):
        if shift_labels is None:
            ignored = kwargs.get("ignore_index", IGNORED)
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignored)[..., 1:]
        return linear_cross_entropy(self.lm_head, hidden_states, shift_labels, kernels=self.config.kernels, **kwargs)

    def generate(self, *args, **kwargs):
        """As `GenerationMixin.generate`; assisted decoding leaves no recording on: it would grow with every token."""
        if getattr(kwargs.get("generation_config"), "is_assistant", False):
            return super().generate(*args, **kwargs)  # its caller takes tokens back from the cache later
        given = kwargs.get("cache", kwargs.get("past_key_values"))
        kept, output = {id(layer) for layer in recording_layers(given)}, None
        try:
            output = super().generate(*args, **kwargs)
        finally:
            for cache in (given, getattr(output, "cache", None)):
                for layer in recording_layers(cache):
                    if id(layer) not in kept:
                        layer.deactivate_past_recording()
        return output


def _zero_without_labels(loss, labels, ignored=IGNORED):
    """The mean over no label is not a number; a batch without any is one to learn nothing from."""
    return torch.where((labels != ignored).any().to(loss.device), loss, 0)


class AtlasForSequenceClassification(GenericForSequenceClassification, AtlasPreTrainedModel):
    """Atlas with a classifier on each sequence's last token: the last that `attention_mask` has, or that is no padding."""

    # Its loss is a mean whatever it is told of the number of labels: Trainer divides by the passes it accumulates.
    accepts_loss_kwargs = False

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutputWithPast:
        """Logits `[B, num_labels]` and, with `labels [B]`, the loss; arguments as for `AtlasModel.forward`.

        Raises:
            ValueError: several rows, and neither a mask nor a `pad_token_id` to tell where each ends.
        """
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        mask = attention_mask[LAYER_TYPE] if isinstance(attention_mask, dict) else attention_mask
        batch, num_tokens = hidden_states.shape[:2]
        if mask is None and input_ids is not None and self.config.pad_token_id is not None:
            mask = input_ids != self.config.pad_token_id
        if mask is None and batch > 1:
            raise ValueError(
                f"{batch} rows, and nothing says where each ends: pass attention_mask, or set pad_token_id in the config"
            )
        last = -1
        if mask is not None:
            places = torch.arange(num_tokens, device=hidden_states.device)
            last = (places * mask[:, -num_tokens:].to(places)).argmax(-1)
        logits = self.score(hidden_states[torch.arange(batch, device=hidden_states.device), last])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
            if not labels.is_floating_point():  # of a regression any number is a label
                loss = _zero_without_labels(loss, labels)
        return SequenceClassifierOutputWithPast(
            loss=loss, logits=logits, cache=outputs.cache, hidden_states=outputs.hidden_states
        )


class AtlasForTokenClassification(GenericForTokenClassification, AtlasPreTrainedModel):
    """Atlas with a classifier on every token. Labels of -100 are ignored; without any other, the loss is zero."""

    accepts_loss_kwargs = False  # as above

    @property
    def loss_function(self):
        given = super().loss_function
        return lambda logits, labels, *args, **kwargs: _zero_without_labels(
            given(logits, labels, *args, **kwargs), labels
        )

    @loss_function.setter
    def loss_function(self, value):
        self._loss_function = value


# Trainer's label smoothing knows causal models by the names in this table only, in remote code too.
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[AtlasConfig.model_type] = AtlasForCausalLM.__name__
