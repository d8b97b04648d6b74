"""The mixers compared, in one two-layer skeleton of width 64.

Every mixer has the same short causal convolution (four tokens) on queries, keys and values, so that none has to spend a
layer on putting a value next to its key.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization

from atlas_hf import AtlasConfig
from atlas_hf.modeling.chunk_inputs import log_products
from atlas_hf.modeling.memory_layer import AtlasMemory, HeadRMSNorm
from atlas_hf.modeling.modeling_atlas import AtlasMLP, AtlasRMSNorm
from atlas_hf.modeling.short_convolution import ShortConvolution

WIDTH, HEADS, LAYERS = 64, 2, 2


class _Projected(nn.Module):
    """Projections, short convolution and output that the two baselines share."""

    def __init__(self):
        super().__init__()
        self.qkv_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.conv = ShortConvolution(3 * WIDTH, 4)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def reset_parameters(self):
        self.conv.reset_parameters(nn.init)

    def heads(self, x):
        """`q, k, v [B, H, T, K]`."""
        qkv, _ = self.conv(self.qkv_proj(x))
        return (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))


class SoftmaxAttention(_Projected):
    """Causal softmax attention; order comes from the convolution."""

    def forward(self, x):
        y = F.scaled_dot_product_attention(*self.heads(x), is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class GatedDeltaRule(_Projected):
    """`S_t = alpha_t S_{t-1} (1 - beta_t k_t k_t^T) + beta_t v_t k_t^T`, read after each write (Gated DeltaNet)."""

    def __init__(self):
        super().__init__()
        self.g_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_proj = nn.Linear(WIDTH, 2 * HEADS)
        self.norm = HeadRMSNorm(WIDTH // HEADS, 1e-6)

    def reset_parameters(self):
        super().reset_parameters()
        with torch.no_grad():  # alpha 0.999 and beta 0.5
            self.gate_proj.bias.copy_(torch.tensor([6.9] * HEADS + [0.0] * HEADS))

    def forward(self, x):
        q, k, v = self.heads(x)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        log_alpha, beta = self.gate_proj(x).transpose(1, 2).chunk(2, 1)
        y = gated_delta_rule(q, k, v, F.logsigmoid(log_alpha), beta.sigmoid())
        y = self.norm(y.transpose(1, 2)).flatten(2)
        return self.o_proj(y * F.silu(self.g_proj(x)))


def gated_delta_rule(q, k, v, log_alpha, beta):
    """Outputs `[B, H, T, V]` of the whole sequence by one triangular solve for what each token writes."""
    decay = log_products(log_alpha).exp()
    system = (beta[..., None] * decay * (k @ k.transpose(-1, -2))).tril(-1)
    writes = torch.linalg.solve_triangular(system, beta[..., None] * v, upper=False, unitriangular=True)
    return (decay * (q @ k.transpose(-1, -2))) @ writes


# Preset and overrides of every Atlas mixer: the presets, and the ablations of the paper's Table 6 on `atlas`. "No Muon" is
# `omeganet`, and "gated memory" is `atlas_plus_plus`. Muon writes a linear memory with anchored errors only.
ATLAS_MIXERS = {
    "atlas": ("atlas", {}),
    "atlas_plus_plus": ("atlas_plus_plus", {}),
    "omeganet": ("omeganet", {}),
    "titans": ("titans", {}),
    "atlas_linear_memory": ("atlas", {"memory": "linear", "output_errors": "anchored"}),
    "atlas_window_1": ("atlas", {"omega_window": 1}),
    "atlas_no_features": ("atlas", {"feature_degree": 1}),
    "omeganet_linear_memory": ("omeganet", {"memory": "linear"}),
    "omeganet_no_features": ("omeganet", {"feature_degree": 1}),
    "omeganet_linear_no_features": ("omeganet", {"memory": "linear", "feature_degree": 1}),
}
MIXERS = ("attention", "gated_delta", *ATLAS_MIXERS)


def mixer_config(name: str, overrides: dict) -> AtlasConfig:
    """Configuration of an Atlas mixer at the skeleton's width."""
    preset, fixed = ATLAS_MIXERS[name]
    fields = {
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "intermediate_size": 2 * WIDTH,
    }
    return getattr(AtlasConfig, preset)(**{**fields, **fixed, **overrides})


class _Block(nn.Module):
    def __init__(self, mixer, config):
        super().__init__()
        self.norm1, self.norm2 = AtlasRMSNorm(WIDTH, 1e-6), AtlasRMSNorm(WIDTH, 1e-6)
        self.mixer, self.mlp = mixer, AtlasMLP(config)

    def forward(self, x):
        x = x + self.mixer(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class RecallModel(nn.Module):
    """Embedding, two blocks, norm, head."""

    def __init__(self, name: str, vocab_size: int, overrides: dict | None = None):
        super().__init__()
        if name not in MIXERS:
            raise ValueError(f"mixer {name!r} is none of {', '.join(MIXERS)}")
        config = mixer_config(name if name in ATLAS_MIXERS else "omeganet", overrides or {})
        self.embed = nn.Embedding(vocab_size, WIDTH)
        kinds = {"attention": SoftmaxAttention, "gated_delta": GatedDeltaRule}
        mixers = [kinds[name]() if name in kinds else AtlasMemory(config, i) for i in range(LAYERS)]
        self.blocks = nn.ModuleList(_Block(mixer, config) for mixer in mixers)
        self.norm = AtlasRMSNorm(WIDTH, 1e-6)
        self.head = nn.Linear(WIDTH, vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02 if isinstance(module, nn.Embedding) else WIDTH**-0.5)
        with torch.no_grad():
            for mixer in mixers:
                if isinstance(mixer, AtlasMemory):
                    mixer.reset_parameters(initialization)
                else:
                    mixer.reset_parameters()

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
