"""flash-linear-attention's modules where they are the same function as the model's own: same parameters, same checkpoint.

They keep half-precision intermediates in float32, where PyTorch's twins round more often: equal to rounding. Left out is what
is another function: `l2norm` adds its epsilon under the root where the model bounds the norm from below, and the caches of
`ShortConvolution` hold other things, so that here the tail stands before the tokens.
"""

import torch
from fla.modules.activations import swiglu as fla_swiglu
from fla.modules.causal_conv1d import causal_conv1d
from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss
from fla.modules.norm.fused_norm_gate import rms_norm_gated
from fla.modules.norm.layernorm import rms_norm as fla_rms_norm


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`AtlasRMSNorm`: `x [..., D]`, `weight [D]` of one dtype."""
    return fla_rms_norm(x, weight, None, eps=eps)


def gated_norm(x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float) -> torch.Tensor:
    """`HeadRMSNorm` and the gate's SiLU in one: `x, gate [..., V]`, `weight [V]`, of any dtypes; x's comes out."""
    return rms_norm_gated(x, gate, weight, None, eps=eps)


def short_convolution(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`silu(sum_j w_j x_{t-W+1+j})` without the first `W - 1` tokens: `x [B, W - 1 + T, C]`, `weight [C, 1, W]`."""
    y, _ = causal_conv1d(x, weight[:, 0], activation="silu")
    return y[:, weight.shape[-1] - 1 :]


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, of one dtype."""
    return fla_swiglu(gate, up)


def linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, ignore_index: int
) -> torch.Tensor:
    """Sum of the cross entropies of `x weight^T` against `targets`: `x [n, D]`, `weight [vocab, D]`, `targets [n]`."""
    return fused_linear_cross_entropy_loss(x, targets, weight, ignore_index=ignore_index, reduction="sum")
