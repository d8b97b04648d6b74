"""A program for Triton's interpreter: the fused scan against the torch path, errors of both against float64, as JSON.

    TRITON_INTERPRET=1 python scan_equality.py '[{"memory": "mlp", "window": 3, "tokens": 11}, ...]'

A process of its own, because Triton reads the variable once, when it is imported. Each case is a problem's and a
recurrence's options in one, and: `lengths` or `cu_seqlens`; `split`, where the sequence is cut in two calls, the state handed
over; `tiles`, the widest tile, so that small matrices take several. Memory that a kernel is given to fill starts as NaN.
"""

import dataclasses
import json
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ops"))

from problems import make_problem, public, weighted_sum

from atlas_hf.kernels import scan
from atlas_hf.modeling import recurrence_chunk

OF_PROBLEM = ("memory", "window", "tokens", "batch", "heads", "key_dim", "hidden", "degree", "residual", "seed")
TORCH_WALK = recurrence_chunk._Walk


class KernelWalk:
    apply = staticmethod(scan.walk)


def poison(new):
    def filled(*args, **kwargs):
        x = new(*args, **kwargs)
        return x.fill_(math.nan) if x.is_floating_point() else x

    return filled


def results(problem, case, walk):
    """Outputs, final state and the gradient of every input, by name."""
    recurrence_chunk._Walk = walk
    options = {k: v for k, v in case.items() if k not in (*OF_PROBLEM, "split", "tiles")}
    for name in ("lengths", "cu_seqlens"):
        if name in options:
            options[name] = torch.tensor(options[name])
    leaves = problem.leaves()
    if "split" in case:
        cut = case["split"]
        first, state = problem.run(recurrence_chunk.chunk_atlas, slice(None, cut), **options)
        second, state = problem.run(recurrence_chunk.chunk_atlas, slice(cut, None), initial_state=state, **options)
        y = torch.cat([first, second], 1)
    else:
        y, state = problem.run(recurrence_chunk.chunk_atlas, **options)
    grads = torch.autograd.grad(weighted_sum(y, state), list(leaves.values()), allow_unused=True)
    found = {"y": y} | {name: x for name, x in public(state).items() if name.startswith(("matrix", "momentum"))}
    return found | {f"d_{name}": g for name, g in zip(leaves, grads, strict=True) if g is not None}


def root_mean_square(x) -> float:
    return x.double().square().mean().sqrt().item()


def largest(x) -> float:
    return x.double().abs().max().item()


def errors(found, exact) -> dict[str, dict[str, float]]:
    """How large the differences are against what is exact, by both measures; where that is zero, nothing else is right."""
    tiny = torch.finfo(torch.float32).tiny
    return {
        name: {size.__name__: size(found[name] - x) / max(tiny, size(x)) for size in (root_mean_square, largest)}
        for name, x in exact.items()
    }


def check(case):
    how = {name: case[name] for name in OF_PROBLEM if name in case}
    if "tiles" in case:
        narrow = {"widest_tile": case["tiles"], "inner_tile": case["tiles"]}
        plan_of, scan.plan_of = scan.plan_of, lambda *args: dataclasses.replace(plan_of(*args), **narrow)
    exact = results(make_problem(dtype=torch.float64, **how), case, TORCH_WALK)
    reference = results(make_problem(dtype=torch.float32, **how), case, TORCH_WALK)
    kernel = results(make_problem(dtype=torch.float32, **how), case, KernelWalk)
    if "tiles" in case:
        scan.plan_of = plan_of
    assert kernel.keys() == exact.keys()
    return {"kernel": errors(kernel, exact), "torch": errors(reference, exact)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.Tensor.new_empty = poison(torch.Tensor.new_empty)
    torch.empty_like = poison(torch.empty_like)
    print(json.dumps([check(case) for case in json.loads(sys.argv[1])]))
