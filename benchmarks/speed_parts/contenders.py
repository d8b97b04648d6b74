"""The models compared: one skeleton, 256 wide, four layers, four heads of 64, SwiGLU of 688, vocabulary 4,096, float32.

Contenders of transformers run on their PyTorch paths; what each is made of is in the row's `config`.
"""

import importlib
import sys
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from atlas_hf import AtlasConfig, AtlasForCausalLM
from atlas_hf.modeling.configuration_atlas import PRESETS
from atlas_hf.modeling.model_statistics import flops_per_token
from atlas_hf.modeling.modeling_atlas import AtlasMLP, AtlasRMSNorm

SKELETON = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 688,
    "vocab_size": 4096,
    "tie_word_embeddings": False,
}
EXPANSION = 4
# Beside the presets: the paper's Atlas, which writes at every token
ATLAS = {**{name: (name, {}) for name in PRESETS}, "atlas_every_token": ("atlas", {"muon_interval": 1})}
TRANSFORMERS = ("llama", "mamba2", "qwen3_next")
NAMES = (*ATLAS, *TRANSFORMERS)


def build(name: str, peer: Path | None = None) -> nn.Module:
    """The contender in evaluation mode, randomly initialised."""
    torch.manual_seed(0)
    if name in ATLAS:
        preset, fields = ATLAS[name]
        config = getattr(AtlasConfig, preset)(**SKELETON, memory_expansion=EXPANSION, **fields)
        return AtlasForCausalLM(config).eval()
    if name == "llama":
        config = LlamaConfig(**SKELETON, num_key_value_heads=4, max_position_embeddings=65536)
        return LlamaForCausalLM(config).eval()
    if name == "mamba2":
        from transformers import Mamba2Config, Mamba2ForCausalLM

        config = Mamba2Config(
            hidden_size=256, num_hidden_layers=4, vocab_size=4096, num_heads=8, head_dim=64, state_size=64, n_groups=1
        )
        return Mamba2ForCausalLM(config).eval()
    if name == "qwen3_next":
        return _qwen3_next()
    if name == "titans_pytorch":
        return TitansPeer(peer).eval()
    raise ValueError(f"contender {name!r} is none of {', '.join((*NAMES, 'titans_pytorch'))}")


def _qwen3_next():
    """The gated delta rule in three layers and softmax attention in the fourth, as it ships; SwiGLU in place of experts."""
    # Where it can import fla, transformers takes fla's kernels, and without a GPU those cannot run.
    known = sys.modules.get("fla")
    sys.modules["fla"] = None
    try:
        from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
    finally:
        del sys.modules["fla"]
        if known is not None:
            sys.modules["fla"] = known

    config = Qwen3NextConfig(
        **SKELETON,
        num_key_value_heads=4,
        head_dim=64,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        mlp_only_layers=[0, 1, 2, 3],
        num_experts=0,
    )
    return Qwen3NextForCausalLM(config).eval()


class TitansPeer(nn.Module):
    """titans-pytorch's neural memory (two-layer MLP, chunks of 16) in the skeleton; it has no cache of its own here."""

    def __init__(self, path: Path):
        super().__init__()
        sys.path.insert(0, str(path))
        titans = importlib.import_module("titans_pytorch")
        width, shape = SKELETON["hidden_size"], AtlasConfig.titans(**SKELETON)
        self.embed_tokens = nn.Embedding(SKELETON["vocab_size"], width)
        self.mixers = nn.ModuleList(
            titans.NeuralMemory(
                dim=width,
                chunk_size=16,
                heads=4,
                dim_head=64,
                model=titans.MemoryMLP(dim=64, depth=2, expansion_factor=EXPANSION),
            )
            for _ in range(SKELETON["num_hidden_layers"])
        )
        self.mlps = nn.ModuleList(AtlasMLP(shape) for _ in self.mixers)
        self.norms = nn.ModuleList(AtlasRMSNorm(width, 1e-6) for _ in self.mixers)
        self.lm_head = nn.Linear(width, SKELETON["vocab_size"], bias=False)

    def forward(self, input_ids, labels=None, use_cache=False, logits_to_keep=0):
        x = self.embed_tokens(input_ids)
        for mixer, norm, mlp in zip(self.mixers, self.norms, self.mlps, strict=True):
            x = x + mixer(x)[0]
            x = x + mlp(norm(x))
        logits = self.lm_head(x[:, -logits_to_keep:])
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def forward_flops(name: str, model: nn.Module, tokens: int) -> float | None:
    """Floating point operations of the forward pass per token, from the shapes; None where nobody counted."""
    if name in ATLAS:
        return flops_per_token(model.config)
    if name == "llama":
        width, inner, vocab = 256, 688, 4096
        per_layer = 4 * width * width + 3 * width * inner + width * tokens  # causal: half of 2 T d
        return 2 * (4 * per_layer + width * vocab)
    return None


def config_of(name: str, model: nn.Module) -> dict:
    """What the row says the contender was made of."""
    if name in ATLAS:
        keys = ("rule", "momentum", "omega_window", "chunk_size", "muon_interval", "memory_expansion", "feature_rank")
        return {key: getattr(model.config, key) for key in keys}
    if name == "mamba2":
        return {key: getattr(model.config, key) for key in ("num_heads", "head_dim", "state_size", "expand")}
    return {}
