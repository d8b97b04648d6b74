"""Causal depthwise convolution over the last few tokens, with the tail that decoding goes on from."""

import torch
import torch.nn.functional as F
from torch import nn

from .dispatch import select_fused


def _depthwise_is_fast(x, weight) -> bool:
    """Whether PyTorch's grouped convolution beats shifted sums: by oneDNN, in float32, without its slow backward pass."""
    if x.device.type != "cpu" or not x.dtype == weight.dtype == torch.float32:
        return False
    return torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled and not torch.is_grad_enabled()


class ShortConvolution(nn.Module):
    """`silu(sum_j w_j x_{t-W+1+j})` for every channel; tokens before the sequence's first are zero.

    Args:
        channels: `C`.
        kernel_size: `W >= 1`.
    """

    def __init__(self, channels: int, kernel_size: int):
        super().__init__()
        self.kernel_size = kernel_size
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size))

    def reset_parameters(self, init) -> None:
        bound = self.kernel_size**-0.5
        init.uniform_(self.weight, -bound, bound)

    def forward(self, x, tail=None, lengths=None, kernels="torch", weight=None):
        """Convolve `x [B, T, C]`, of which row `i` has `lengths[i]` tokens and then padding.

        Args:
            weight: `[C, 1, W]` in place of the module's own, for who calls it again later (`recomputed`).
            tail: `[B, W - 1, C]`, the inputs before `x`; `None` at a sequence's start.
            lengths: `[B]`, or `None` if all of `x` is real.

        Returns:
            `[B, T, C]` and the new tail, the last `W - 1` real inputs of each row.
        """
        weight, earlier = self.weight if weight is None else weight, self.kernel_size - 1
        x = F.pad(x, (0, 0, earlier, 0)) if tail is None else torch.cat([tail.to(x.dtype), x], 1)
        length = x.shape[1] - earlier
        # Nothing to fuse in a single token
        fused = select_fused(kernels, x) if length > 1 and x.dtype == weight.dtype else None
        if fused is not None:
            y = fused.short_convolution(x, weight)
        elif length > 1 and _depthwise_is_fast(x, weight):
            # As images one pixel high with their channels last, which need no transposed copy
            with torch.autocast(device_type="cpu", enabled=False):
                y = F.conv2d(x.mT[:, :, None], weight[:, :, None], groups=x.shape[2])[:, :, 0].mT
            y = F.silu(y)
        elif length == 1:
            y = F.silu((x * weight[:, 0].mT).sum(1, keepdim=True))
        else:
            y = F.silu(sum(x[:, j : j + length] * weight[:, 0, j] for j in range(self.kernel_size)))
        if lengths is None:
            return y, x[:, length:]
        place = lengths[:, None] + torch.arange(earlier, device=x.device)
        return y, x.gather(1, place[..., None].expand(-1, -1, x.shape[-1]))
