"""Outer optimisers: which parameters are matrices for Muon, which decay, and Muon with AdamW as one optimiser."""

import re
from dataclasses import dataclass, field

import torch
from torch import nn

from atlas_hf.modeling.memory_layer import HeadRMSNorm
from atlas_hf.modeling.modeling_atlas import AtlasRMSNorm
from atlas_hf.modeling.short_convolution import ShortConvolution

_IN_BLOCK = re.compile(r"(^|\.)layers\.\d+\.")
# Modules of which nothing may decay: a norm's scale and a convolution's taps have a size that means something.
WITHOUT_DECAY = (AtlasRMSNorm, HeadRMSNorm, ShortConvolution, nn.LayerNorm, nn.RMSNorm)


@dataclass
class ParameterSplit:
    """Trainable parameters by what an optimiser may do with them, each by its name in the model.

    Attributes:
        matrices: 2D weights of linear layers inside the blocks: Muon's. They decay.
        decayed: embeddings, heads, the memories' learned starts `[H, out, in]` and feature projections: AdamW's.
        kept: gates, norms, convolutions, feature coefficients and biases: AdamW's, without weight decay.
    """

    matrices: dict[str, nn.Parameter] = field(default_factory=dict)
    decayed: dict[str, nn.Parameter] = field(default_factory=dict)
    kept: dict[str, nn.Parameter] = field(default_factory=dict)

    def adamw_groups(self, weight_decay: float, *, with_matrices: bool = True) -> list[dict]:
        """Parameter groups for AdamW: all parameters, or all but the matrices."""
        decayed = [*self.matrices.values()] if with_matrices else []
        groups = [
            {"params": [*decayed, *self.decayed.values()], "weight_decay": weight_decay},
            {"params": [*self.kept.values()], "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]


def split_parameters(model: nn.Module) -> ParameterSplit:
    """Sort the trainable parameters of an Atlas model, of a wrapper around one, or of adapters on one.

    Shared parameters (tied embeddings) appear once, under their first name.
    """
    split, seen = ParameterSplit(), set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen or not parameter.requires_grad:
                continue
            seen.add(id(parameter))
            full = f"{path}.{name}" if path else name
            if isinstance(module, WITHOUT_DECAY) or _is_gate(full) or parameter.ndim < 2 or "coefficients" in name:
                split.kept[full] = parameter
            elif parameter.ndim == 2 and isinstance(module, nn.Linear) and _IN_BLOCK.search(full):
                split.matrices[full] = parameter
            else:
                split.decayed[full] = parameter
    return split


def _is_gate(name: str) -> bool:
    """The memory's gates; the SwiGLU's `mlp.gate_proj` is an ordinary matrix."""
    return "memory.gate_proj" in name or "memory.gate_bias" in name


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` on a model's matrices and `torch.optim.AdamW` on the rest, as one optimiser.

    One learning rate serves both: Muon's updates are scaled to the size of AdamW's. Schedulers, checkpoints and `Trainer`
    see a single optimiser, whose first group is Muon's.

    Args:
        model: an Atlas model, or anything that `split_parameters` can sort.
        lr: learning rate of both.
        weight_decay: of matrices, embeddings and memories; gates, norms and convolutions never decay.
        momentum, ns_steps: Muon's.
        betas, eps: AdamW's.

    Raises:
        ValueError: the model has no trainable matrix.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.95,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ):
        split = split_parameters(model)
        if not split.matrices:
            raise ValueError(
                "the model has no trainable matrix for Muon: use torch.optim.AdamW, or unfreeze some layers"
            )
        self._muon = torch.optim.Muon(
            [*split.matrices.values()],
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            ns_steps=ns_steps,
            adjust_lr_fn="match_rms_adamw",
        )
        rest = split.adamw_groups(weight_decay, with_matrices=False)
        self._adamw = torch.optim.AdamW(rest, lr=lr, betas=betas, eps=eps) if rest else None
        groups = [*self._muon.param_groups, *(self._adamw.param_groups if rest else ())]
        self._sorted = False
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self._share()

    def add_param_group(self, param_group: dict) -> None:
        """Raises ValueError: parameters are sorted by the model when the optimiser is made."""
        if self._sorted:
            raise ValueError("MuonAdamW sorts a model's parameters itself: make a new one after unfreezing some")
        super().add_param_group(param_group)

    def _share(self) -> None:
        """Let the two see this optimiser's groups and state, so that there is one of each."""
        self._muon.param_groups, self._muon.state = self.param_groups[:1], self.state
        if self._adamw is not None:
            self._adamw.param_groups, self._adamw.state = self.param_groups[1:], self.state
        self._sorted = True

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_muon": self._muon, "_adamw": self._adamw}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._share()

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._muon.step()
        if self._adamw is not None:
            self._adamw.step()
        return loss

    def load_state_dict(self, state_dict) -> None:
        super().load_state_dict(state_dict)
        self._share()
