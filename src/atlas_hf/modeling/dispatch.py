"""Which implementation runs, PyTorch's or Triton's: decided here, and nowhere else.

The kernels live in `atlas_hf.kernels`, outside the files that travel with a checkpoint, and need Triton: this is the one
place from which they are reached, by name and at need, so that the modeling code runs without either. They compute the
same functions, so the choice is one of speed and no part of a model.
"""

import importlib
import os
import warnings

import torch
from transformers.utils import logging

from .recurrence_state import RecurrenceOptions

KERNELS = ("auto", "torch", "triton")
# Counts the changes of what the kernels are called with: modeling code from a checkpoint may meet another package's.
INTERFACE = 1
LOWEST_CAPABILITY = (8, 0)

# Below transformers' own logger, so that its verbosity holds: `transformers.logging.set_verbosity_info()` shows the lines.
logger = logging.get_logger("transformers.models.atlas")

# What `describe` begins with where nothing can run.
NO_PATH = "none: "
PARTS = ("scan", "newton_schulz", "step", "fla_modules")
# Of every part looked for: the module or None, and what stands in its way
_found = {part: [] for part in PARTS}
_told = set()


def check_kernels(kernels: str) -> None:
    if kernels not in KERNELS:
        raise ValueError(f"kernels={kernels!r} is not allowed: choose one of {', '.join(KERNELS)}")


def select_walk(
    kernels: str, options: RecurrenceOptions, num_matrices: int, window: int, like: torch.Tensor, **widths: int
):
    """The fused walk over a sequence's chunks, or None: PyTorch's runs.

    Args:
        kernels: one of `KERNELS`.
        num_matrices: 1, 2 or 3, of a linear, mlp or gated memory.
        window: the Omega window `c`.
        like: a tensor of the recurrence, for device and dtype.
        widths: `key_dim`, `value_dim`, `hidden_dim` (of a linear memory 0) and `features` of one head.

    Raises:
        ValueError: `"triton"` is asked for and cannot run; the message names what is in the way and the remedy.
    """
    module, reason = _choose(
        kernels, "scan", like.device, like.dtype, lambda m: m.supports(options, num_matrices, window, **widths)
    )
    _tell("torch" if module is None else "triton", reason)
    return None if module is None else module.walk


def select_step(kernels: str, options: RecurrenceOptions, num_matrices: int, window: int, like: torch.Tensor, **widths):
    """The module that takes a token of decoding in one launch, or None. Arguments as for `select_walk`.

    `widths` also says whether there is a `residual`.

    Raises:
        ValueError: as `select_walk`.
    """
    module, reason = _choose(
        kernels, "step", like.device, like.dtype, lambda m: _refusal(m, options, num_matrices, window, **widths)
    )
    if module is None and like.device.type == "cuda":
        _tell("torch for decoding", reason)
    return module


def select_factors(kernels: str, num_tokens: int, like: torch.Tensor):
    """Triton's `newton_schulz_factors` for `num_tokens` tokens in view, or None: PyTorch's runs.

    Raises:
        ValueError: `"triton"` is asked for and cannot run here at all.
    """
    module, _ = _choose(kernels, "newton_schulz", like.device, like.dtype, lambda m: None)
    return module.newton_schulz_factors if module is not None and num_tokens <= module.WIDEST else None


def select_fused(kernels: str, like: torch.Tensor):
    """The module of fla's fused norms, convolution and activation, or None: PyTorch's own run.

    Not in a graph that torch.compile makes, which fuses PyTorch's by itself, and never interpreted.

    Raises:
        ValueError: `"triton"` is asked for, the tensor is on a GPU, and fla cannot run there.
    """
    if like.device.type != "cuda" or torch.compiler.is_compiling():
        return None
    return _choose(kernels, "fla_modules", like.device, like.dtype, lambda m: None)[0]


def describe(
    kernels: str, options: RecurrenceOptions, num_matrices: int, window: int, *, part: str = "scan", **widths: int
) -> str:
    """The path that `chunk_atlas` takes on this machine, and why: a line for people. Arguments as for `select_walk`.

    `part="step"`: that of decoding, in `step_atlas`; `widths` then say whether there is a `residual` too.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        module, reason = _choose(
            kernels, part, device, torch.float32, lambda m: _refusal(m, options, num_matrices, window, **widths)
        )
    except ValueError as error:
        return f"{NO_PATH}{error}"
    return f"{'torch' if module is None else 'triton'} ({reason})"


def _refusal(module, options, num_matrices: int, window: int, residual: bool = False, **widths: int) -> str | None:
    """What of a call the scan or the step of Triton cannot do, or None."""
    if residual:
        return "a residual has no decoding kernel: leave it out by residual_scale=0"
    return module.supports(options, num_matrices, window, **widths)


def _choose(kernels: str, part: str, device: torch.device, dtype: torch.dtype, refusal):
    """A part of the kernels or None, and why. `refusal(module)` says what of the call it cannot do, or None."""
    check_kernels(kernels)
    if kernels == "torch":
        return None, "kernels='torch'"
    if kernels == "auto" and device.type != "cuda":
        return None, f"kernels='auto' and tensors on {device.type}"
    module, hindrance = None, _hindrance(device, dtype)
    if hindrance is None:
        module, hindrance = _load(part)
    if hindrance is None:
        hindrance = refusal(module)
    if hindrance is None:
        return module, f"kernels={kernels!r} on {device.type}"
    if kernels == "triton":
        raise ValueError(f"kernels='triton' cannot run: {hindrance}; or set kernels='auto' or 'torch'")
    return None, hindrance


def _hindrance(device: torch.device, dtype: torch.dtype) -> str | None:
    if dtype == torch.float64:
        return (
            "the kernels work in float32, and the tensors are float64: convert model or inputs to float32 or bfloat16"
        )
    if device.type != "cuda":
        if os.environ.get("TRITON_INTERPRET") == "1":
            return None
        return (
            f"the tensors are on {device.type}, and Triton needs a GPU: move model and inputs to one (or set "
            "TRITON_INTERPRET=1 before Triton is imported, to have its kernels interpreted, slowly)"
        )
    if torch.version.hip is not None:
        return "the kernels are made for NVIDIA's GPUs, and this PyTorch is built for ROCm: use one"
    capability = torch.cuda.get_device_capability(device)
    if capability < LOWEST_CAPABILITY:
        return (
            f"the kernels need a GPU of compute capability {'.'.join(map(str, LOWEST_CAPABILITY))} or above, and this one "
            f"has {'.'.join(map(str, capability))}: use a newer one"
        )
    return None


def _load(part: str):
    """The module `atlas_hf.kernels.<part>` or None, and what stands in its way; looked for once in a process."""
    hindrance = _hindrance_of(part)
    return _found[part][0], hindrance


@torch.compiler.assume_constant_result  # torch.compile cannot follow an import
def _hindrance_of(part: str) -> str | None:
    if not _found[part]:
        _found[part].extend(_look_for(part))
    return _found[part][1]


def _look_for(part: str):
    install = "install atlas-hf with its extra gpu (in its folder: pip install -e '.[gpu]')"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what Triton and fla themselves use
            importlib.import_module("atlas_hf")
            module = importlib.import_module(f"atlas_hf.kernels.{part}")
        interface = importlib.import_module("atlas_hf.kernels").INTERFACE
    except ModuleNotFoundError as error:
        missing = error.name or str(error)
        if missing.startswith("atlas_hf."):
            return None, f"the installed atlas-hf has no {missing}: {install} in the version that saved the checkpoint"
        if missing in ("atlas_hf", "triton", "fla"):
            return None, f"{missing.replace('_', '-')} is not installed: {install}"
        return None, _broken(part, error)
    except Exception as error:
        # Compiled extensions of another build fail in any way: what is merely faster must not stop a model
        return None, _broken(part, error)
    if interface != INTERFACE:
        return None, (
            f"the installed atlas-hf has kernels of interface {interface}, this modeling code needs {INTERFACE}: install "
            "the version that saved the checkpoint"
        )
    return module, None


def _broken(part: str, error: Exception) -> str:
    reason = f"atlas_hf.kernels.{part} cannot be imported ({type(error).__name__}: {error}): reinstall triton and fla"
    logger.warning(f"Atlas runs without Triton: {reason}")
    return reason


def _tell(path: str, reason: str) -> None:
    """Say once in a process that a path runs."""
    if path not in _told and not torch.compiler.is_compiling():
        _told.add(path)
        logger.info(f"Atlas' recurrence runs on {path}: {reason}")
