"""Configuration of Atlas models: fields, presets, sizes, and the rules between fields."""

import difflib
import math

# First: an old transformers should be told by its version, not by a name that it lacks.
from .requirements_atlas import check_requirements  # noqa: F401  # isort: skip

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN
from transformers.configuration_utils import ALLOWED_ATTN_LAYER_TYPES, PreTrainedConfig

LAYER_TYPE = "atlas"

CHOICES = {
    "memory": ("linear", "mlp", "gated"),
    "rule": ("gd", "muon"),
    "inner_loss": ("l2", "dot"),
    "momentum": ("carry", "restart", "none"),
    "output_errors": ("exact", "anchored"),
    "decay_to": ("init", "zero"),
    "kernels": ("auto", "torch", "triton"),
}
# What is not saved: derived fields, which Trainer would check by transformers' own list, and what suits a machine.
NOT_SAVED = ("layer_types", "kernels")

# The members of the paper's family, by what they change in the fields' defaults, which are those of `atlas`. Muon's steps do
# not shrink with the error: gradient descent starts at a higher rate and anchors for more tokens.
_GD = {"rule": "gd", "chunk_size": 16, "learning_rate_init": 0.5}
PRESETS = {
    "atlas": {},
    "atlas_plus_plus": {"memory": "gated", "feature_rank": 6},
    "omeganet": {**_GD, "momentum": "none"},
    "titans": {**_GD, "momentum": "carry", "omega_window": 1, "feature_degree": 1},
}

# How alike two names are of which one is taken for the other misspelt
NEAR = 0.8

# Where it divides the chunk.
MUON_INTERVAL = 4

# Paper, table of model sizes: layers, width, heads.
SIZES = {
    "170M": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 16},
    "340M": {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16},
    "760M": {"num_hidden_layers": 24, "hidden_size": 1536, "num_attention_heads": 16},
    "1.3B": {"num_hidden_layers": 18, "hidden_size": 2048, "num_attention_heads": 8},
}

# Keys that transformers itself writes into config.json, sets on configurations or reads there, beside its declared fields.
_KEYS_OF_TRANSFORMERS = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_internal",
        "_commit_hash",
        "_from_auto",
        "_from_pipeline",
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "auto_map",
        "custom_pipelines",
        "dtype",
        "experts_implementation",
        "is_decoder",
        "model_type",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "quantization_config",
        "sep_token_id",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "transformers_weights",
        "trust_remote_code",
    }
)


def check_near_misses(names, known, what: str) -> None:
    """Refuse `names` that are all but one of the `known` ones: what somebody misspelt must not be ignored.

    Raises:
        ValueError: naming both.
    """
    for name in names:
        for meant in difflib.get_close_matches(name, known, 1, NEAR):
            raise ValueError(f"{name} is not {what}: did you mean {meant}?")


@strict
class AtlasConfig(PreTrainedConfig):
    """Configuration of an Atlas model; `AtlasConfig.atlas()` and its siblings give the paper's variants.

    Source: Behrouz et al., "ATLAS: Learning to Optimally Memorize the Context at Test Time" (arXiv 2505.23735).

    Args:
        vocab_size: number of token embeddings.
        hidden_size: model width.
        intermediate_size: width of the SwiGLU block; `None`: 8/3 of `hidden_size`, rounded up to a multiple of 64.
        num_hidden_layers: number of blocks.
        num_attention_heads: heads of the memory mixer, each with a memory of its own.
        head_dim: width of keys, queries and values; `None`: `hidden_size // num_attention_heads`.
        hidden_act: activation of the SwiGLU block.
        conv_kernel_size: tokens seen by the short causal convolutions of queries, keys and values.
        memory: `"linear"`, `"mlp"` (Atlas, Eq. 42) or `"gated"` (Atlas++, Eq. 43).
        memory_expansion: hidden width of a deep memory, as a multiple of `head_dim`.
        rule: inner optimiser, `"gd"` (Eq. 10) or `"muon"` (Eq. 32).
        inner_loss: `"l2"` (Eq. 9) or `"dot"` (Eq. 19).
        momentum: `"carry"`, `"restart"` at each chunk, or `"none"`.
        omega_window: tokens of the Omega rule's window, `c >= 1`.
        chunk_size: tokens for which anchored gradients stay anchored, `b >= 1`. Part of the model: it cannot be changed for
            speed after training.
        muon_interval: Muon writes at every `muon_interval`-th token; divides `chunk_size`. `None`: at every fourth where
            that divides it, else at every second or every one.
        newton_schulz_steps: `k` of Muon; may be changed at inference.
        output_errors: `"exact"` (the output matrix is written by gd on its latest error) or `"anchored"` (Eq. 15).
        feature_degree: degree of the polynomial features, 1 (none) to 4 (Eq. 4, 5).
        feature_rank: width that degrees above one act on, at most `head_dim`; `None`: `min(8, head_dim)`. Without meaning
            at degree 1.
        inner_norm: normalised inner step (NLMS).
        hidden_rate: inner rate of the hidden matrices against the output matrix.
        decay_to: retention fades the memory to its learned start (`"init"`) or to `"zero"` (the paper).
        residual_scale: start of `rho` in Eq. 42; 0 leaves the residual out.
        retention_init, learning_rate_init, momentum_init, window_gate_init: what the gates `alpha`, `eta`, `theta` and
            `gamma[1:]` start at, each in (0, 1).
        initializer_range: standard deviation of projections, embeddings and of a deep memory's output matrix.
        kernels: implementation of the memory, `"torch"`, `"triton"`, or `"auto"`: Triton on a GPU where it has a kernel. No
            part of the model and never saved: a checkpoint loads with any, as in `from_pretrained(..., kernels="torch")`.
        max_position_embeddings: length the model was trained at. Atlas has no positional limit; evaluation tools read it.

    Raises:
        ValueError: an unknown field, or one given under two names.
        huggingface_hub.errors.StrictDataclassError: a wrong type, a value that is not allowed, contradictory fields.
            Every message names field, value, allowed values and remedy.
    """

    model_type = "atlas"
    keys_to_ignore_at_inference = ["cache"]
    attribute_map = {"num_heads": "num_attention_heads"}
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "layout"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int | None = None
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    head_dim: int | None = None
    hidden_act: str = "silu"
    conv_kernel_size: int = 4
    memory: str = "mlp"
    memory_expansion: int = 2
    rule: str = "muon"
    inner_loss: str = "l2"
    momentum: str = "restart"
    omega_window: int = 4
    chunk_size: int = 8
    muon_interval: int | None = None
    newton_schulz_steps: int = 5
    output_errors: str = "exact"
    feature_degree: int = 2
    feature_rank: int | None = None
    inner_norm: bool = True
    hidden_rate: int | float = 0.1
    decay_to: str = "init"
    residual_scale: int | float = 0.0
    retention_init: float = 0.999
    learning_rate_init: float = 0.1
    momentum_init: float = 0.5
    window_gate_init: float = 0.02
    initializer_range: int | float = 0.02
    rms_norm_eps: int | float = 1e-6
    use_cache: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    layer_types: list[str] | None = None
    max_position_embeddings: int = 2048
    kernels: str = "auto"

    def __new__(cls, *args, **kwargs):
        cls.by_own_names(kwargs)  # only here can a field that was given be told from its default
        return super().__new__(cls)

    @classmethod
    def by_own_names(cls, fields: dict) -> dict:
        """`fields` without aliases; one given under both names, with two values, is refused."""
        own = {name: value for name, value in fields.items() if name not in cls.attribute_map}
        for alias, name in cls.attribute_map.items():
            if alias in fields and own.setdefault(name, fields[alias]) != fields[alias]:
                raise ValueError(
                    f"{alias}={fields[alias]!r} and {name}={own[name]!r} are the same field: pass one of them"
                )
        return own

    def __post_init__(self, **kwargs):
        self._check_names(kwargs)
        self._resolve_aliases(kwargs)
        if self.head_dim is None and self.num_attention_heads > 0:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}: "
                    "change one of them, or set head_dim"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.intermediate_size is None:
            self.intermediate_size = -(-8 * self.hidden_size // (3 * 64)) * 64
        if self.feature_rank is None and self.feature_degree > 1 and self.head_dim:
            self.feature_rank = min(8, self.head_dim)
        if self.muon_interval is None and isinstance(self.chunk_size, int):
            self.muon_interval = math.gcd(MUON_INTERVAL, self.chunk_size) if self.rule == "muon" else 1
        if self.layer_types is None:
            self.layer_types = [LAYER_TYPE] * self.num_hidden_layers
        super().__post_init__(**kwargs)

    def _check_names(self, fields: dict) -> None:
        known = set(type(self).__dataclass_fields__) | set(self.attribute_map) | _KEYS_OF_TRANSFORMERS
        unknown = sorted(name for name in fields if name not in known)
        if unknown:
            raise ValueError(
                f"unknown configuration field(s) {', '.join(f'{name}={fields[name]!r}' for name in unknown)}: "
                f"remove or correct them; Atlas' own fields are {', '.join(sorted(AtlasConfig.__annotations__))}"
            )

    def _resolve_aliases(self, kwargs: dict) -> None:
        # Before anything is derived from the real field; transformers itself sets aliases last.
        for alias, name in self.attribute_map.items():
            if alias in kwargs:
                setattr(self, name, kwargs.pop(alias))

    def to_dict(self) -> dict:
        """As saved: without `NOT_SAVED`."""
        return {name: value for name, value in super().to_dict().items() if name not in NOT_SAVED}

    def save_pretrained(self, save_directory, push_to_hub: bool = False, **kwargs):
        """As `PreTrainedConfig.save_pretrained`.

        Raises:
            ValueError: an attribute that is no field, which loading would refuse; nothing is written then.
        """
        self._check_names(self.to_dict())
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        """As `PreTrainedConfig.from_dict`, but fields given as keywords are checked together with those they override."""
        names = [name for name in kwargs if name in AtlasConfig.__annotations__ or name in cls.attribute_map]
        overrides = cls.by_own_names({name: kwargs.pop(name) for name in names})
        known = [*AtlasConfig.__annotations__, *cls.attribute_map]
        check_near_misses([name for name in kwargs if name not in known], known, "a field of AtlasConfig")
        if "num_hidden_layers" in overrides:
            config_dict = {name: value for name, value in config_dict.items() if name != "layer_types"}
        return super().from_dict({**config_dict, **overrides}, **kwargs)

    @classmethod
    def _preset(cls, name: str, size: str | None, overrides: dict) -> "AtlasConfig":
        if size is not None and size not in SIZES:
            raise ValueError(f"size={size!r} is none of {', '.join(SIZES)}; or leave it out and give the widths")
        return cls(**{**PRESETS[name], **(SIZES[size] if size else {}), **cls.by_own_names(overrides)})

    @classmethod
    def atlas(cls, size: str | None = None, **overrides) -> "AtlasConfig":
        """Atlas: deep memory, Omega rule, polynomial features, Muon. `size` is one of `SIZES`; fields override it."""
        return cls._preset("atlas", size, overrides)

    @classmethod
    def atlas_plus_plus(cls, size: str | None = None, **overrides) -> "AtlasConfig":
        """Atlas++: Atlas with a gated memory (Eq. 43)."""
        return cls._preset("atlas_plus_plus", size, overrides)

    @classmethod
    def omeganet(cls, size: str | None = None, **overrides) -> "AtlasConfig":
        """OmegaNet: the Omega rule by gradient descent, without momentum."""
        return cls._preset("omeganet", size, overrides)

    @classmethod
    def titans(cls, size: str | None = None, **overrides) -> "AtlasConfig":
        """Titans' long-term memory: gradient descent on the last token alone, momentum carried."""
        return cls._preset("titans", size, overrides)

    def validate_layer_type(self):
        """Every block is an Atlas block; transformers' own check knows its own layer types only."""
        if any(t != LAYER_TYPE for t in self.layer_types):
            wrong = [t for t in self.layer_types if t != LAYER_TYPE]
            hint = " (Atlas has no attention layers)" if any(t in ALLOWED_ATTN_LAYER_TYPES for t in wrong) else ""
            raise ValueError(f"layer_types may only hold {LAYER_TYPE!r}, got {wrong}{hint}: leave the field out")
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries for num_hidden_layers={self.num_hidden_layers}: "
                "leave layer_types out, or set both"
            )

    def validate_architecture(self):
        """Allowed values, ranges and the rules between fields."""
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name}={value!r} is not allowed: choose one of {', '.join(allowed)}")
        positive = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        positive += ("head_dim", "conv_kernel_size", "memory_expansion", "omega_window", "chunk_size", "muon_interval")
        for name in (*positive, "max_position_embeddings"):
            if getattr(self, name) is None or getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not allowed: it must be at least 1")
        if self.newton_schulz_steps < 0:
            raise ValueError(f"newton_schulz_steps={self.newton_schulz_steps} is not allowed: it must be 0 or more")
        for name in ("hidden_rate", "initializer_range", "rms_norm_eps"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} is not allowed: it must be a number, 0 or more")
        if not math.isfinite(self.residual_scale):
            raise ValueError(
                f"residual_scale={self.residual_scale} is not allowed: it must be a number; 0 leaves it out"
            )
        if self.hidden_act not in ACT2FN:
            raise ValueError(
                f"hidden_act={self.hidden_act!r} is not allowed: choose one of {', '.join(sorted(ACT2FN))}"
            )
        for name in ("retention_init", "learning_rate_init", "momentum_init", "window_gate_init"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(
                    f"{name}={getattr(self, name)} is not allowed: it must lie between 0 and 1, both excluded"
                )
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(
                f"pad_token_id={self.pad_token_id} is not allowed: it must lie between 0 and vocab_size={self.vocab_size}, "
                "excluded; leave it out if there is no padding token"
            )
        self._validate_memory()

    def _validate_memory(self):
        if not 1 <= self.feature_degree <= 4:
            raise ValueError(f"feature_degree={self.feature_degree} is not allowed: choose 1 (no features), 2, 3 or 4")
        if self.feature_degree == 1 and self.feature_rank is not None:
            raise ValueError(
                f"feature_rank={self.feature_rank} has no meaning with feature_degree=1: leave it out, or raise the degree"
            )
        if self.feature_degree > 1 and not 1 <= self.feature_rank <= self.head_dim:
            raise ValueError(
                f"feature_rank={self.feature_rank} is not allowed: it must lie between 1 and head_dim={self.head_dim}"
            )
        if self.rule == "muon" and self.output_errors == "exact" and self.memory == "linear":
            raise ValueError(
                "rule='muon' with output_errors='exact' leaves Muon to the hidden matrices, and memory='linear' has none: "
                "set output_errors='anchored', rule='gd' or a deep memory"
            )
        if self.chunk_size % self.muon_interval:
            raise ValueError(
                f"muon_interval={self.muon_interval} does not divide chunk_size={self.chunk_size}: the last tokens of each "
                "chunk would never be written; choose a divisor"
            )
        if self.rule == "gd" and self.muon_interval != 1:
            raise ValueError(
                f"muon_interval={self.muon_interval} has no meaning with rule='gd', which writes at every token: "
                "set it to 1, or rule='muon'"
            )
        if self.memory == "linear" and self.residual_scale != 0:
            raise ValueError(
                f"residual_scale={self.residual_scale} belongs to deep memories (Eq. 42): set it to 0 with memory='linear'"
            )
