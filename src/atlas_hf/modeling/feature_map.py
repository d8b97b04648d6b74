"""Polynomial features of keys and queries with learnable coefficients (paper, Eq. 4, 5 and 22).

Legend: H heads, K key width, R feature rank, F features, p degree, c_i coefficient of degree i.
"""

import copy
import math
from functools import lru_cache
from itertools import combinations_with_replacement

import torch
from torch import nn


def num_features(key_dim: int, degree: int, rank: int | None = None) -> int:
    """Width `F` of `phi`: degree 1 alone is the identity (`F = K`); else `1 + K + sum_{i=2..p} C(R+i-1, i)`.

    Raises:
        ValueError: a degree that is not 1 to 4, a key width below 1, or a rank that is not 1 to `key_dim`.
    """
    rank = key_dim if rank is None else rank
    if not isinstance(degree, int) or degree not in (1, 2, 3, 4):
        raise ValueError(f"feature degree must be 1, 2, 3 or 4, got {degree}")
    if key_dim < 1:
        raise ValueError(f"key width must be at least 1, got {key_dim}")
    if not 1 <= rank <= key_dim:
        raise ValueError(f"feature rank must lie between 1 and the key width {key_dim}, got {rank}")
    if degree == 1:
        return key_dim
    return 1 + key_dim + sum(math.comb(rank + i - 1, i) for i in range(2, degree + 1))


@torch.compiler.assume_constant_result  # torch.compile cannot follow itertools
def _monomials(rank: int, degree: int) -> tuple[list[int], list[int], list[float]]:
    """Symmetric monomials of one degree: index of the parent monomial, last factor, square root of the multinomial."""
    parents = {m: i for i, m in enumerate(combinations_with_replacement(range(rank), degree - 1))}
    tuples = list(combinations_with_replacement(range(rank), degree))
    counts = [[m.count(i) for i in set(m)] for m in tuples]
    weights = [math.sqrt(math.factorial(degree) / math.prod(math.factorial(n) for n in c)) for c in counts]
    return [parents[m[:-1]] for m in tuples], [m[-1] for m in tuples], weights


@lru_cache(maxsize=64)
def _cached_tables(rank: int, degree: int, device: torch.device, dtype: torch.dtype):
    # Outside inference mode, else a later training step could not save these tensors for its backward pass.
    with torch.inference_mode(False):
        return _tables(rank, degree, device, dtype)


def _tables(rank: int, degree: int, device: torch.device, dtype: torch.dtype):
    parents, last, weights = _monomials(rank, degree)
    return (
        torch.tensor(parents, device=device),
        torch.tensor(last, device=device),
        torch.tensor(weights, device=device, dtype=dtype),
    )


class PolynomialFeatureMap(nn.Module):
    """`phi(x) = [c_0, c_1 x, c_2 sym2(Px), ..., c_p symp(Px)]`, so that `phi(x).phi(y)` is a polynomial of `x.y` and `Px.Py`.

    Source: paper, Eq. 4 and 5 (features), Eq. 22 (coefficients that start as the Taylor series of `exp`). `c_0` starts at
    zero: a constant feature lets every key overlap with every other. With `rank = K` the projection `P` is the identity and
    `phi` is the paper's map; a smaller rank keeps the width `F` of wide heads within bounds.

    Args:
        num_heads: `H`.
        key_dim: `K >= 1`.
        degree: `p`, 1 to 4. Degree 1 is the identity and has no parameters.
        rank: `R`, 1 to `K`; `None` means `K`.
        dtype: of the parameters, `feature_coefficients [H, p + 1]` and, where `R < K`, `feature_projection [H, R, K]`.

    Raises:
        ValueError: a degree or rank outside its range; in a call, an input of another key width or number of heads, or
            not of a floating-point dtype.
    """

    def __init__(self, num_heads: int, key_dim: int, degree: int, rank: int | None = None, dtype=torch.float32):
        super().__init__()
        self.num_features = num_features(key_dim, degree, rank)
        rank = key_dim if rank is None else rank
        self.num_heads, self.key_dim, self.degree, self.rank = num_heads, key_dim, degree, rank
        self.feature_coefficients = self.feature_projection = None
        if degree > 1:
            self.feature_coefficients = nn.Parameter(torch.empty(num_heads, degree + 1, dtype=dtype))
            if rank < key_dim:
                self.feature_projection = nn.Parameter(torch.empty(num_heads, rank, key_dim, dtype=dtype))
            self.reset_parameters(nn.init)

    def reset_parameters(self, init, constant: float = 0.0) -> None:
        """Taylor coefficients, but `c_0 = constant`; rows of `P` of a length that keeps `|Px|` near 1 for unit `x`.

        `init` is `torch.nn.init` or `transformers.initialization`.
        """
        if self.feature_coefficients is None:
            return
        taylor = torch.tensor([constant] + [1 / math.sqrt(math.factorial(i)) for i in range(1, self.degree + 1)])
        with torch.no_grad():
            start = taylor.to(self.feature_coefficients.device, self.feature_coefficients.dtype)
            copy = init.copy_ if hasattr(init, "copy_") else lambda tensor, other: tensor.copy_(other)
            copy(self.feature_coefficients, start.expand(self.num_heads, -1))
            if self.feature_projection is not None:
                init.normal_(self.feature_projection, mean=0.0, std=1 / math.sqrt(self.rank))

    def as_it_stands(self) -> "PolynomialFeatureMap":
        """The same map with the parameters of now: what makes features again later must not see others put in their place."""
        twin = copy.copy(self)
        twin._parameters = dict(self._parameters)
        for name in ("forward", "_old_forward", "_hf_hook"):  # bound to this map, where accelerate offloads its weights
            twin.__dict__.pop(name, None)
        return twin

    def squared_norm_at_start(self) -> float:
        """`|phi(x)|^2` of a unit vector with the starting coefficients (and `|Px| = 1`), the constant left out."""
        return 1.0 if self.degree == 1 else sum(1 / math.factorial(i) for i in range(1, self.degree + 1))

    def _check(self, x: torch.Tensor, head_axis: int) -> None:
        heads = self.num_heads if self.degree == 1 else x.shape[head_axis]
        if x.shape[-1] != self.key_dim or heads != self.num_heads:
            raise ValueError(
                f"x must have {self.num_heads} heads on axis {head_axis} and the key width {self.key_dim} on its last, got "
                f"{tuple(x.shape)}"
            )
        if not x.is_floating_point():
            raise ValueError(f"x must be of a floating-point dtype, got {x.dtype}: convert it")

    def _per_head(self, parameter: torch.Tensor, like: torch.Tensor, head_axis: int) -> torch.Tensor:
        shape = [1] * like.ndim
        shape[head_axis] = self.num_heads
        shape[-parameter.ndim + 1 :] = parameter.shape[1:]
        return parameter.view(shape).to(like.dtype)

    def _project(self, x: torch.Tensor, head_axis: int) -> torch.Tensor:
        if self.feature_projection is None:
            return x
        if head_axis == 0:  # one product a head: as a broadcast, matrices would be copied for every row
            by_head = x.reshape(self.num_heads, -1, self.key_dim)
            return torch.bmm(by_head, self.feature_projection.mT.to(x.dtype)).view(*x.shape[:-1], self.rank)
        return x @ self._per_head(self.feature_projection, x, head_axis).transpose(-1, -2)

    def forward(self, x: torch.Tensor, head_axis: int = 0) -> torch.Tensor:
        """`phi(x)`: `[..., N, K] -> [..., N, F]`, heads on axis `head_axis` (not one of the last two)."""
        self._check(x, head_axis)
        if self.degree == 1:
            return x
        c = self._per_head(self.feature_coefficients, x, head_axis).unbind(-1)
        parts = [c[0][..., None].expand(*x.shape[:-1], 1), c[1][..., None] * x]
        projected = power = self._project(x, head_axis)
        tables = _tables if torch.compiler.is_compiling() else _cached_tables
        # The parent's own weight is taken out again: monomials are multiplied unweighted, and weighted at the end.
        for i in range(2, self.degree + 1):
            parent, last, weight = tables(self.rank, i, x.device, x.dtype)
            power = power.index_select(-1, parent) * projected.index_select(-1, last)
            parts.append(power * (c[i][..., None] * weight))
        return torch.cat(parts, -1)

    def kernel(self, x: torch.Tensor, y: torch.Tensor, head_axis: int = 0) -> torch.Tensor:
        """`phi(x) phi(y)^T` without features: `[..., N, K], [..., M, K] -> [..., N, M]`."""
        gram = x @ y.transpose(-1, -2)
        if self.degree == 1:
            return gram
        if self.feature_projection is None:
            return self._polynomial(gram, gram, head_axis)
        px, py = self._project(x, head_axis), self._project(y, head_axis)
        return self._polynomial(gram, px @ py.transpose(-1, -2), head_axis)

    def squared_norm(self, x: torch.Tensor, head_axis: int = 0) -> torch.Tensor:
        """`|phi(x)|^2`: `[..., N, K] -> [..., N]`."""
        norm = x.square().sum(-1, keepdim=True)
        if self.degree == 1:
            return norm[..., 0]
        projected = norm
        if self.feature_projection is not None:
            projected = self._project(x, head_axis).square().sum(-1, keepdim=True)
        return self._polynomial(norm, projected, head_axis)[..., 0]

    def _polynomial(self, gram: torch.Tensor, projected: torch.Tensor, head_axis: int) -> torch.Tensor:
        c2 = self._per_head(self.feature_coefficients, gram, head_axis).square().unbind(-1)
        value = c2[self.degree][..., None]
        for i in range(self.degree - 1, 1, -1):  # Horner over the degrees from two on
            value = value * projected + c2[i][..., None]
        return value * projected.square() + c2[1][..., None] * gram + c2[0][..., None]
