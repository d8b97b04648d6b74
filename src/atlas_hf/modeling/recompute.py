"""Memory against a little time: what is cheap to make and large to keep is made again in the backward pass."""

import torch
from torch.utils.checkpoint import checkpoint


def recomputed(function, *args):
    """`function(*args)`; of its graph only `args` are kept. For functions without randomness.

    Weights belong in `args`: a module may hold others by the time of the backward pass.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
