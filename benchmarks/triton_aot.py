"""The kernels, compiled ahead of time for A100 and H100 on a machine without a GPU: what they need of one.

    python benchmarks/triton_aot.py               prints the table, writes benchmarks/results/triton_aot.md and .json

The scan of every preset and the step of those that have one, at the paper's sizes; Newton-Schulz on each of its tiles. The
recurrence's tensors are float32 in a bfloat16 model too; the scan's products are as under
`torch.set_float32_matmul_precision("high")`, by TF32 in three parts, or ("highest") by float32. This proves that the kernels
compile and fit, neither their results nor their speed. Spills are those of all functions of a kernel, of one thread.
"""

import argparse
import ast
import contextlib
import hashlib
import io
import itertools
import json
import os
import re
from pathlib import Path
from typing import NamedTuple

# Interpreted kernels cannot be compiled
os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import atlas_hf.kernels
from atlas_hf import AtlasConfig
from atlas_hf.kernels import newton_schulz, step
from atlas_hf.kernels.fused_scan.backward import backward_kernel
from atlas_hf.kernels.fused_scan.forward import forward_kernel
from atlas_hf.kernels.fused_scan.plan import COUNTS, Plan, plan_of
from atlas_hf.kernels.step_kernel import step_kernel
from atlas_hf.modeling.feature_map import PolynomialFeatureMap, num_features
from atlas_hf.modeling.newton_schulz import COEFFICIENTS, EPS
from atlas_hf.modeling.recurrence_state import RecurrenceOptions

RESULTS = Path(__file__).parent / "results" / "triton_aot.md"
PRESETS = ("omeganet", "atlas", "atlas_plus_plus", "titans")
# Sizes, and how products of float32 are taken: by TF32 in three parts, or as they are
SHAPES = (("340M", "tf32x3"), ("1.3B", "tf32x3"), ("340M", "ieee"), ("1.3B", "ieee"))
# Shared memory that one block may have, in bytes
ARCHITECTURES = {80: 163 * 1024, 90: 227 * 1024}
SCANS = {"forward": forward_kernel, "backward": backward_kernel}
STEP_PRESETS = ("omeganet", "atlas")
# Steps come with products by float32 alone
STEP_SIZES = ("340M", "1.3B")


def source_hash() -> str:
    """Of the kernels' code, comments and docstrings aside: results of another one are out of date."""
    code = []
    for path in sorted(Path(atlas_hf.kernels.__path__[0]).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            documented = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
            if documented and ast.get_docstring(node) is not None:
                del node.body[0]
        code.append(ast.dump(tree))
    return hashlib.sha256("".join(code).encode()).hexdigest()[:16]


class Job(NamedTuple):
    """A kernel with the types of its arguments, in their order; constants' types are `constexpr`."""

    kernel: object
    types: dict[str, str]
    constants: dict
    launch: dict

    @property
    def aligned(self) -> dict:
        """Arguments that are multiples of 16 bytes: the tensors."""
        return {(i,): [["tt.divisibility", 16]] for i, t in enumerate(self.types.values()) if t.startswith("*")}


def options_of(config: AtlasConfig) -> RecurrenceOptions:
    names = ("chunk_size", "rule", "momentum", "inner_loss", "output_errors", "muon_interval", "newton_schulz_steps")
    names += ("inner_norm", "hidden_rate", "decay_to")
    return RecurrenceOptions(**{name: getattr(config, name) for name in names}, newton_schulz_coefficients=COEFFICIENTS)


def plan_of_model(preset: str, size: str, precision: str) -> Plan:
    config = getattr(AtlasConfig, preset)(size)
    num_hidden = {"linear": 0, "mlp": 1, "gated": 2}[config.memory]
    hidden_dim = config.memory_expansion * config.head_dim
    features = num_features(config.head_dim, config.feature_degree, config.feature_rank)
    return plan_of(
        options_of(config), num_hidden, config.omega_window, hidden_dim, config.head_dim, features, precision
    )


def scan_job(direction: str, plan: Plan) -> Job:
    types = {}
    for parameter in SCANS[direction].params:
        name = parameter.name
        if name in ("plan", "with_outputs", "with_starts"):
            types[name] = "constexpr"
        elif name in COUNTS:
            types[name] = "i32"
        else:
            double = name == "precise" or (name in ("gram_kk", "d_gram_kk") and plan.writes > 0)
            types[name] = "*fp64" if double else "*fp32"
    constants = {"plan": plan}
    if direction == "forward":
        constants |= {"with_outputs": True, "with_starts": True}
    return Job(SCANS[direction], types, constants, plan.launch())


def step_job(preset: str, size: str) -> Job:
    """The decode step of a model, its constants as `kernels.step.Step` sets them."""
    config = getattr(AtlasConfig, preset)(size)
    head, hidden = config.head_dim, config.memory_expansion * config.head_dim
    with torch.device("meta"):
        feature_map = PolynomialFeatureMap(1, head, config.feature_degree, config.feature_rank)
        features = num_features(head, config.feature_degree, config.feature_rank)
        memory = torch.empty(1, head, hidden), torch.empty(1, hidden, features)
        made = step.Step(options_of(config), memory, feature_map, config.omega_window)
    constants = json.loads(made.plan)
    counts = {"delta_0_row", "delta_0_head", "delta_1_row", "delta_1_head", "heads"}
    types = {}
    for parameter in step_kernel.params:
        name = parameter.name
        if name in constants:
            types[name] = "constexpr"
        elif name in counts:
            types[name] = "i32"
        else:
            types[name] = "*i64" if name == "position" else "*fp32"
    return Job(step_kernel, types, constants, {"num_warps": step.NUM_WARPS, "num_stages": 1})


def newton_schulz_job(direction: str, tile: int) -> Job:
    kernel = {"forward": newton_schulz._forward_kernel, "backward": newton_schulz._backward_kernel}[direction]
    constants = dict(zip("ABC", COEFFICIENTS, strict=True)) | {"EPS": EPS, "BLOCK": tile}
    if direction == "forward":
        constants["KEEP"] = tile <= newton_schulz.WIDEST_BACKWARD
    types = {}
    for parameter in kernel.params:
        name = parameter.name
        if name in constants:
            types[name] = "constexpr"
        else:
            counts = ("num_tokens", "num_problems", "repeats", "steps")
            types[name] = "i32" if name in counts else "*fp64"
    return Job(kernel, types, constants, {"num_warps": newton_schulz.WARPS[tile], "num_stages": 1})


def compile_job(job: Job, architecture: int):
    """The compiled kernel, and what the assembler told of it."""
    source = ASTSource(fn=job.kernel, signature=job.types, constexprs=job.constants, attrs=job.aligned)
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(io.StringIO()) as told:
        knobs.nvidia.dump_ptxas_log = True
        # Nothing is told of what lies in the cache; line numbers make the assembler slow
        knobs.compilation.always_compile = knobs.compilation.disable_line_info = True
        compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=job.launch)
    return compiled, told.getvalue()


def resources(compiled, told: str) -> dict:
    """Shared bytes of a block, registers of a thread, and bytes of a thread's spills, by the assembler's account."""
    stores = [int(n) for n in re.findall(r"(\d+) bytes spill stores", told)]
    return {
        "shared_bytes": compiled.metadata.shared,
        "registers": max(int(n) for n in re.findall(r"Used (\d+) registers", told)),
        "spill_bytes": sum(stores),
        "functions": len(stores),
    }


def cases():
    """What is compiled: kernel, preset, size and products, as the table names them."""
    for (size, precision), preset, direction in itertools.product(SHAPES, PRESETS, SCANS):
        yield direction, preset, size, precision
    for size, preset in itertools.product(STEP_SIZES, STEP_PRESETS):
        yield "step", preset, size, "ieee"
    for tile, direction in itertools.product(newton_schulz.WARPS, SCANS):
        if direction == "forward" or tile <= newton_schulz.WIDEST_BACKWARD:
            yield f"newton-schulz {direction}", "any", f"{tile} tokens", "float64"


def measure(kernel: str, preset: str, size: str, products: str, architecture: int) -> dict:
    scratch = 0
    if kernel in SCANS:
        plan = plan_of_model(preset, size, products)
        job, scratch = scan_job(kernel, plan), 4 * plan.at.end
    elif kernel == "step":
        job = step_job(preset, size)
    else:
        job = newton_schulz_job(kernel.split()[-1], int(size.split()[0]))
    row = {"kernel": kernel, "preset": preset, "size": size, "products": products, "arch": f"sm_{architecture}"}
    row |= {"num_warps": job.launch["num_warps"]} | resources(*compile_job(job, architecture))
    return row | {"shared_limit": ARCHITECTURES[architecture], "scratch_bytes_per_row": scratch}


def report(results: dict) -> str:
    lines = [
        "# Triton kernels, compiled ahead of time",
        "",
        "`python benchmarks/triton_aot.py`, without a GPU: resources, neither results nor speed. Forward and backward are",
        "the scan's. Tensors are float32, Newton-Schulz alone works in float64; products go by TF32 in three parts, as under",
        '`torch.set_float32_matmul_precision("high")`, or by float32 ("highest"; ieee).',
        f"Spills are of one thread, in bytes. triton {results['triton']}; kernels `{results['source']}`.",
        "",
        "| kernel | preset | size | products | arch | warps | shared, KiB | of | registers | spills | functions |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        lines.append(
            f"| {row['kernel']} | {row['preset']} | {row['size']} | {row['products']} | {row['arch']} | {row['num_warps']} | "
            f"{row['shared_bytes'] / 1024:.0f} | {row['shared_limit'] // 1024} | {row['registers']} | "
            f"{row['spill_bytes']} | {row['functions']} |"
        )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS)
    output = parser.parse_args().output
    results = {"triton": triton.__version__, "source": source_hash(), "rows": []}
    for case, architecture in itertools.product(cases(), ARCHITECTURES):
        results["rows"].append(measure(*case, architecture))
        print(report(results).splitlines()[-1], flush=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(report(results))
    output.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
