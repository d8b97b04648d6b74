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


def _gelu_derivative(u: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.gelu_backward(torch.ones_like(u), u)


def activate_with_derivative(hidden: torch.Tensor, num_hidden_matrices: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`h [..., E]` and its derivatives by the stacked pre-activations, `dh/du [..., G E]`; see `derivative_backward`."""
    if num_hidden_matrices == 1:
        return F.gelu(hidden), _gelu_derivative(hidden)
    u2, u3 = hidden.chunk(2, -1)
    value = F.gelu(u2)
    return value * u3, torch.cat([_gelu_derivative(u2) * u3, value], -1)


def activate_backward(hidden: torch.Tensor, grad: torch.Tensor, num_hidden_matrices: int) -> torch.Tensor:
    """Gradient by the pre-activations `[..., G E]` from that by `activate`'s result."""
    if num_hidden_matrices == 1:
        return torch.ops.aten.gelu_backward(grad, hidden)
    u2, u3 = hidden.chunk(2, -1)
    return torch.cat([torch.ops.aten.gelu_backward(grad * u3, u2), grad * F.gelu(u2)], -1)


def derivative_backward(
    hidden: torch.Tensor, grad: torch.Tensor, d_slope: torch.Tensor, num_hidden_matrices: int
) -> torch.Tensor:
    """Gradient by the pre-activations from those by both results of `activate_with_derivative`."""
    u2 = hidden if num_hidden_matrices == 1 else hidden[..., : hidden.shape[-1] // 2]
    # gelu'' = (2 - u^2) pdf(u)
    second = torch.exp(-0.5 * u2.square()) * (2 - u2.square()) / math.sqrt(2 * math.pi)
    if num_hidden_matrices == 1:
        return torch.ops.aten.gelu_backward(grad, hidden).addcmul_(d_slope, second)
    u3 = hidden[..., hidden.shape[-1] // 2 :]
    d2, d3 = d_slope.chunk(2, -1)
    first = _gelu_derivative(u2)
    by_u2 = (grad * u3 + d3) * first + d2 * u3 * second
    return torch.cat([by_u2, grad * F.gelu(u2) + d2 * first], -1)


def stack_hidden(matrices: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """`W2` or `[W2; W3]`: the hidden matrices read the same features, so they are multiplied as one `[..., G E, F]`."""
    return matrices[0] if len(matrices) == 1 else torch.cat(matrices, -2)
