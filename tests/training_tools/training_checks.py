"""What the tests of training tools share: the tiny model's fields, and looks at losses and gradients."""

import pytest
import torch
from transformers import TrainerCallback

# peft asks a model for a property that transformers has renamed.
PEFT_WARNING = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
# trl's configuration sets a field that transformers has renamed.
TRL_WARNING = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")

VOCAB = 64
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "chunk_size": 4,
    "muon_interval": 2,
    "feature_rank": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def losses(trainer) -> list[float]:
    """Training losses by step."""
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_gradients(actual, expected, bound=5e-4):
    """Equal to rounding in float32, each tensor by its norm, and not all zero.

    Muon's Newton-Schulz steps magnify rounding: single elements far below a gradient's norm differ by parts in a thousand.
    """
    assert actual.keys() == expected.keys()
    assert sum(g.abs().sum() for g in expected.values()) > 0
    for name, gradient in expected.items():
        assert (actual[name] - gradient).norm() <= bound * gradient.norm() + 1e-9, name


class KeepGradients(TrainerCallback):
    """Takes the first step's gradients before they are used up."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0:
            self.gradients = gradients(model)
