"""Random problems for the recurrence's tests, and the options they are run with."""

import itertools
import random
from dataclasses import dataclass

import torch

from atlas_hf.ops import PolynomialFeatureMap

GATES = ("log_alpha", "eta", "log_theta", "gamma")
CHUNK = 4
# One token, the chunk's edge from both sides, and three chunks with and without a token more.
LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 1)


@dataclass
class Problem:
    """Arguments of one call of the recurrence, and the tensors that gradients are taken by."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    memory: list[torch.Tensor]
    gates: dict[str, torch.Tensor]
    feature_map: PolynomialFeatureMap | None
    residual_scale: torch.Tensor | None

    def leaves(self):
        tensors = {"q": self.q, "k": self.k, "v": self.v, **self.gates}
        tensors |= {f"memory_{i}": m for i, m in enumerate(self.memory)}
        if self.feature_map is not None:
            tensors |= dict(self.feature_map.named_parameters())
        if self.residual_scale is not None:
            tensors["residual_scale"] = self.residual_scale
        return {name: t.requires_grad_() for name, t in tensors.items()}

    def run(self, form, tokens=slice(None), **options):
        """Call one of the twins on some of the tokens (a slice, or an index `[B, n]` of each row's own)."""

        def cut(x):
            return (
                x[:, tokens]
                if isinstance(tokens, slice)
                else torch.stack([r[i] for r, i in zip(x, tokens, strict=True)])
            )

        options = {"chunk_size": CHUNK, "output_final_state": True, **options}
        gates = {name: cut(gate) for name, gate in self.gates.items()}
        return form(
            cut(self.q),
            cut(self.k),
            cut(self.v),
            self.memory,
            **gates,
            feature_map=self.feature_map,
            residual_scale=self.residual_scale,
            **options,
        )


def unit(x):
    return torch.nn.functional.normalize(x, dim=-1)


def make_problem(
    memory="mlp",
    window=3,
    tokens=11,
    batch=2,
    heads=2,
    key_dim=4,
    hidden=5,
    degree=2,
    rank=2,
    residual=True,
    seed=0,
    dtype=torch.float64,
):
    """A problem in which everything is active: no gate at its end, no matrix zero, all feature degrees in use."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64).to(dtype)

    feature_map, features = None, key_dim
    if degree > 1:
        feature_map = PolynomialFeatureMap(heads, key_dim, degree, rank, dtype=dtype)
        features = feature_map.num_features
        for parameter in feature_map.parameters():
            parameter.data = 0.5 * normal(*parameter.shape)
    shapes = [(heads, key_dim, features)]
    if memory != "linear":
        shapes = [(heads, key_dim, hidden)] + [(heads, hidden, features)] * (2 if memory == "gated" else 1)
    gates = {
        "log_alpha": -0.3 * uniform(batch, tokens, heads),
        "eta": 0.5 * uniform(batch, tokens, heads),
        "log_theta": -0.2 - uniform(batch, tokens, heads),
        "gamma": uniform(batch, tokens, heads, window),
    }
    return Problem(
        unit(normal(batch, tokens, heads, key_dim)),
        unit(normal(batch, tokens, heads, key_dim)),
        normal(batch, tokens, heads, key_dim),
        [0.4 * normal(*shape) for shape in shapes],
        gates,
        feature_map,
        normal(heads) if residual else None,
    )


def option_grid(share: int, seed: int = 0):
    """Every `share`-th of all combinations of options, in an order shuffled once, with `memory` and `window` among them."""
    names = ("memory", "rule", "momentum", "output_errors", "inner_loss", "inner_norm", "decay_to", "window")
    values = (
        ("linear", "mlp", "gated"),
        ("gd", "muon"),
        ("carry", "restart", "none"),
        ("exact", "anchored"),
        ("l2", "dot"),
        (True, False),
        ("init", "zero"),
        (1, 3),
    )
    grid = [dict(zip(names, row, strict=True)) for row in itertools.product(*values)]
    grid = [o for o in grid if not (o["memory"] == "linear" and o["rule"] == "muon" and o["output_errors"] == "exact")]
    rng = random.Random(seed)
    rng.shuffle(grid)
    for option in grid[::share]:
        if option["rule"] == "muon":
            option["muon_interval"] = rng.choice((1, 2))
        option["residual"] = rng.choice((True, False))
        option["degree"] = rng.choice((1, 2, 2, 3))
    return grid[::share]


def split_options(options: dict):
    """The part of a grid's row that makes the problem, and the part that goes to the recurrence."""
    problem = {name: options[name] for name in ("memory", "window", "residual", "degree")}
    return problem, {name: value for name, value in options.items() if name not in problem}


def label(options: dict) -> str:
    return "-".join(f"{value}" for value in options.values())


def public(state):
    """The part of a state that all twins agree on."""
    return {name: value for name, value in state.items() if not name.startswith("step_")}


def assert_states_close(actual, expected, rtol=1e-10, atol=1e-10):
    actual, expected = public(actual), public(expected)
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            actual[name], expected[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


def weighted_sum(y, state):
    """A scalar in which every output and every number of the final state has a weight of its own."""
    generator = torch.Generator().manual_seed(1)
    parts = [y, *(value for name, value in sorted(public(state).items()) if name != "position")]
    return sum((p * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)).sum() for p in parts)
