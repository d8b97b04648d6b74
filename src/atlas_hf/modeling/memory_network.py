"""The memory as a small network of fast weights (paper, Eq. 42 and 43).

Legend: H heads, V value width, E hidden width, F features, G hidden matrices (1 for "mlp", 2 for "gated").

    linear  M(z) = W phi(z)                                          one matrix    [H, V, F]
    mlp     M(z) = rho z + W1 gelu(W2 phi(z))                        two           [H, V, E], [H, E, F]
    gated   M(z) = rho z + W1 (gelu(W2 phi(z)) * W3 phi(z))          three         [H, V, E], [H, E, F], [H, E, F]
"""

import math

import torch
import torch.nn.functional as F

MEMORIES = ("linear", "mlp", "gated")


def memory_kind(memory: tuple[torch.Tensor, ...]) -> str:
    """Name of the memory that these matrices make up: one, two or three of them."""
    if not 1 <= len(memory) <= 3:
        raise ValueError(f"memory must hold one (linear), two (mlp) or three (gated) matrices, got {len(memory)}")
    return MEMORIES[len(memory) - 1]


def activate(hidden: torch.Tensor, num_hidden_matrices: int) -> torch.Tensor:
    """Hidden activations `h [..., E]` from the stacked pre-activations `u [..., G E]`."""
    if num_hidden_matrices == 1:
        return F.gelu(hidden)
    u2, u3 = hidden.chunk(2, -1)
    return F.gelu(u2) * u3


def activate_with_derivative(hidden: torch.Tensor, num_hidden_matrices: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`h [..., E]` and its derivatives by the stacked pre-activations, `dh/du [..., G E]`."""
    u2 = hidden if num_hidden_matrices == 1 else hidden[..., : hidden.shape[-1] // 2]
    cdf = 0.5 * (1 + torch.erf(u2 * math.sqrt(0.5)))
    slope = torch.addcmul(cdf, u2, torch.exp(-0.5 * u2.square()), value=1 / math.sqrt(2 * math.pi))
    value = u2 * cdf
    if num_hidden_matrices == 1:
        return value, slope
    u3 = hidden[..., hidden.shape[-1] // 2 :]
    return value * u3, torch.cat([slope * u3, value], -1)


def output_gain(slope: torch.Tensor, output_matrix: torch.Tensor) -> torch.Tensor:
    """How strongly a token's hidden pre-activations move its output: `|W1 diag(dh/du)|_F^2`, of all hidden matrices together.

    A step of the hidden matrices changes the output by up to this times the error, so the normalised step divides by it
    where it exceeds 1. Without that, an output matrix that has grown makes the hidden matrices overshoot, and a gated
    memory, whose activations are products, diverges.

    Args:
        slope: `[..., N, G E]`.
        output_matrix: `W1 [..., V, E]`.

    Returns:
        `[..., N]`.
    """
    columns = output_matrix.square().sum(-2, keepdim=True)  # [..., 1, E]
    squares = slope.square().unflatten(-1, (-1, columns.shape[-1])).sum(-2)
    return (squares * columns).sum(-1)


def stack_hidden(matrices: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """`W2` or `[W2; W3]`: the hidden matrices read the same features, so they are multiplied as one `[..., G E, F]`."""
    return matrices[0] if len(matrices) == 1 else torch.cat(matrices, -2)
