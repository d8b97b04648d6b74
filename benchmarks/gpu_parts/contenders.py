"""The models compared on a GPU, of the paper's 340M size, in bfloat16: 24 layers, 1,024 wide, vocabulary 32,000.

Every contender has the same skeleton (width, layers, SwiGLU, vocabulary). Gated DeltaNet has fla's own proportions, 6 heads
of 128 with values twice as wide, so that its mixer has about the parameters of four square matrices. It and Atlas make the
loss without the logits of all tokens, fla's fused one; Llama has the loss that transformers gives it.
"""

from dataclasses import dataclass, field

import torch
from torch import nn

from atlas_hf import AtlasConfig, AtlasForCausalLM
from atlas_hf.modeling.configuration_atlas import SIZES
from atlas_hf.modeling.model_statistics import flops_per_token

# Name: the preset and what is changed in it
ATLAS = {
    "omeganet": ("omeganet", {}),
    "atlas": ("atlas", {}),
    "atlas_every_token": ("atlas", {"muon_interval": 1}),
    "omeganet_torch": ("omeganet", {"kernels": "torch"}),
}
# In the order in which they are measured: what the time does not suffice for is at the end
NAMES = ("omeganet", "atlas", "gated_deltanet", "llama", "atlas_every_token", "omeganet_torch")


class SkippedError(Exception):
    """A contender or a measure that this machine cannot run, and why."""


@dataclass(frozen=True)
class Scale:
    """How large everything is: the real thing, or what a CPU runs in seconds."""

    skeleton: dict
    deltanet: dict
    parity: dict  # of the recurrence's problems
    train: tuple[tuple[int, int], ...]  # batch and length
    prefill: tuple[tuple[int, int], ...]
    decode: tuple[tuple[int, int], ...]  # batch and context
    rounds: int
    seconds: float  # at most, for the rounds of one measure
    peak_size: int
    atlas: dict = field(default_factory=dict)
    offsets: int = 2**31


FULL = Scale(
    skeleton={**SIZES["340M"], "intermediate_size": 2752, "vocab_size": 32000, "tie_word_embeddings": False},
    deltanet={"num_heads": 6, "head_dim": 128, "expand_v": 2},
    parity={"batch": 2, "heads": 4, "head_dim": 64, "expansion": 2, "rank": 8, "chunks": 4, "layers": 2},
    train=((8, 2048), (2, 8192)),
    prefill=((1, 8192), (1, 32768)),
    decode=((8, 8192),),
    rounds=5,
    seconds=6,
    peak_size=8192,
)
DRY = Scale(
    skeleton={
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 64,
        "tie_word_embeddings": False,
    },
    deltanet={"num_heads": 2, "head_dim": 16, "expand_v": 2},
    parity={"batch": 2, "heads": 2, "head_dim": 8, "expansion": 2, "rank": 3, "chunks": 2, "layers": 1},
    train=((1, 40),),
    prefill=((1, 40),),
    decode=((2, 12),),
    rounds=2,
    seconds=5,
    peak_size=128,
    atlas={"chunk_size": 4, "feature_rank": 3},
    offsets=2**12,
)


def build(name: str, scale: Scale, device: torch.device) -> nn.Module:
    """The contender on the device in bfloat16, randomly initialised.

    Raises:
        SkippedError: it cannot run here.
    """
    torch.manual_seed(0)
    with device:  # drawing the weights of such a model on a CPU takes seconds
        return _made(name, scale, device).to(device, torch.bfloat16)


def _made(name: str, scale: Scale, device: torch.device) -> nn.Module:
    if name in ATLAS:
        preset, fields = ATLAS[name]
        return AtlasForCausalLM(getattr(AtlasConfig, preset)(**scale.skeleton, **{**scale.atlas, **fields}))
    elif name == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        heads = scale.skeleton["num_attention_heads"]
        config = LlamaConfig(**scale.skeleton, num_key_value_heads=heads, max_position_embeddings=65536)
        config._attn_implementation = "sdpa"
        return LlamaForCausalLM(config)
    elif name == "gated_deltanet":
        return _gated_deltanet(scale, device)
    raise ValueError(f"contender {name!r} is none of {', '.join(NAMES)}")


def _gated_deltanet(scale: Scale, device: torch.device) -> nn.Module:
    if device.type != "cuda":
        raise SkippedError(f"fla's models run on Triton, which needs CUDA, and the device is {device.type}")
    try:
        from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM
    except ImportError as error:
        raise SkippedError(
            f"flash-linear-attention cannot be imported ({error}): pip install -e '.[gpu]' in atlas-hf's folder"
        ) from error
    skeleton = {key: value for key, value in scale.skeleton.items() if key != "num_attention_heads"}
    losses = {"fuse_cross_entropy": False, "fuse_linear_cross_entropy": True}
    return GatedDeltaNetForCausalLM(GatedDeltaNetConfig(**skeleton, **scale.deltanet, **losses))


def forward_flops(name: str, model: nn.Module, tokens: int) -> float:
    """Floating point operations of the forward pass per token: two for each multiply-add of the matrix products.

    Attention counts the keys before a token (half of all), the gated delta rule three products of a head's state with a
    vector: what the rule needs, not what a chunked kernel spends.
    """
    config = model.config
    if name in ATLAS:
        return flops_per_token(config)
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    if name == "llama":
        return 2 * (matrices + config.num_hidden_layers * config.hidden_size * tokens)
    state = config.num_heads * config.head_dim * config.head_dim * config.expand_v
    return 2 * (matrices + config.num_hidden_layers * 3 * state)
