"""Perplexity of a text of any length, read piece by piece through one cache: memory does not grow with the text."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import DynamicCache, PreTrainedModel


@dataclass(frozen=True)
class StreamedLoss:
    """`total`: negative log probability of `num_tokens` tokens, in nats; `num_bytes`: of the text that they stand for."""

    total: float
    num_tokens: int
    num_bytes: int

    def __add__(self, other: "StreamedLoss") -> "StreamedLoss":
        """Of two texts, each read by itself."""
        return StreamedLoss(
            self.total + other.total, self.num_tokens + other.num_tokens, self.num_bytes + other.num_bytes
        )

    @property
    def perplexity(self) -> float:
        """Per token."""
        mean = self.total / self.num_tokens
        return math.exp(mean) if mean < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Raises ValueError where `num_bytes` was not given."""
        if self.num_bytes == 0:
            raise ValueError("num_bytes=0: give the text's length to `streamed_loss` to have bits per byte")
        return self.total / self.num_bytes / math.log(2)


@torch.inference_mode()
def streamed_loss(
    model: PreTrainedModel, ids: torch.Tensor, prefix_id: int, *, num_bytes: int = 0, segment_size: int = 512
) -> StreamedLoss:
    """How well `model` predicts every token of `ids [N]`, each from all before it, however many.

    Args:
        prefix_id: token read before the first, such as the end-of-text token that stands before every training document.
        num_bytes: length of the text, for `bits_per_byte`.
        segment_size: tokens read at a time; changes memory and speed, but the result only by rounding.

    Raises:
        ValueError: no token, or a segment without one.
    """
    if ids.ndim != 1 or ids.numel() == 0:
        raise ValueError(f"ids must be [N] with N >= 1, got {tuple(ids.shape)}")
    if segment_size < 1:
        raise ValueError(f"segment_size={segment_size} is not allowed: it must be at least 1")
    was_training = model.training
    model.eval()
    cache, total, last = DynamicCache(config=model.config), 0.0, ids.new_tensor([prefix_id])
    try:
        for segment in ids.split(segment_size):
            inputs, last = torch.cat([last, segment[:-1]]), segment[-1:]
            logits = model(inputs[None].to(model.device), cache=cache).logits[0].float()
            total += F.cross_entropy(logits, segment.to(model.device), reduction="sum").item()
    finally:
        model.train(was_training)
    return StreamedLoss(total, ids.numel(), num_bytes)
