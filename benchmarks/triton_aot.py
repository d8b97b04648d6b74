"""The scan's kernels, compiled ahead of time for A100 and H100 on a machine without a GPU: what they need of one.

    python benchmarks/triton_aot.py               prints the table, writes benchmarks/results/triton_aot.md and .json

Every preset at the paper's sizes. The recurrence's tensors are float32 in a bfloat16 model too; products are as under
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

# Interpreted kernels cannot be compiled
os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import atlas_hf.kernels.fused_scan
import atlas_hf.kernels.newton_schulz_tiles
from atlas_hf import AtlasConfig
from atlas_hf.kernels.fused_scan.backward import backward_kernel
from atlas_hf.kernels.fused_scan.forward import forward_kernel
from atlas_hf.kernels.fused_scan.plan import COUNTS, Plan, plan_of
from atlas_hf.modeling.feature_map import num_features
from atlas_hf.modeling.newton_schulz import COEFFICIENTS
from atlas_hf.modeling.recurrence_state import RecurrenceOptions

RESULTS = Path(__file__).parent / "results" / "triton_aot.md"
PRESETS = ("omeganet", "atlas", "atlas_plus_plus", "titans")
# Sizes, and how products of float32 are taken: by TF32 in three parts, or as they are
SHAPES = (("340M", "tf32x3"), ("1.3B", "tf32x3"), ("340M", "ieee"))
# Shared memory that one block may have, in bytes
ARCHITECTURES = {80: 163 * 1024, 90: 227 * 1024}
KERNELS = {"forward": forward_kernel, "backward": backward_kernel}


def source_hash() -> str:
    """Of the kernels' code, comments and docstrings aside: results of another one are out of date."""
    code = []
    scan = sorted(Path(atlas_hf.kernels.fused_scan.__path__[0]).glob("*.py"))
    for path in (*scan, Path(atlas_hf.kernels.newton_schulz_tiles.__file__)):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            documented = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
            if documented and ast.get_docstring(node) is not None:
                del node.body[0]
        code.append(ast.dump(tree))
    return hashlib.sha256("".join(code).encode()).hexdigest()[:16]


def plan_of_model(preset: str, size: str, precision: str) -> Plan:
    config = getattr(AtlasConfig, preset)(size)
    names = ("chunk_size", "rule", "momentum", "inner_loss", "output_errors", "muon_interval", "newton_schulz_steps")
    names += ("inner_norm", "hidden_rate", "decay_to")
    options = RecurrenceOptions(
        **{name: getattr(config, name) for name in names}, newton_schulz_coefficients=COEFFICIENTS
    )
    num_hidden = {"linear": 0, "mlp": 1, "gated": 2}[config.memory]
    hidden_dim = config.memory_expansion * config.head_dim
    features = num_features(config.head_dim, config.feature_degree, config.feature_rank)
    return plan_of(options, num_hidden, config.omega_window, hidden_dim, config.head_dim, features, precision)


def signature(kernel, plan: Plan):
    """Types of the kernel's arguments, and which of them are multiples of 16 bytes."""
    types = {}
    for parameter in kernel.params:
        name = parameter.name
        if name in ("plan", "with_outputs", "with_starts"):
            types[name] = "constexpr"
        elif name in COUNTS:
            types[name] = "i32"
        else:
            double = name == "precise" or (name in ("gram_kk", "d_gram_kk") and plan.writes > 0)
            types[name] = "*fp64" if double else "*fp32"
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind.startswith("*")}
    return types, aligned


def compile_kernel(direction: str, plan: Plan, architecture: int):
    """The compiled kernel, and what the assembler told of it."""
    kernel = KERNELS[direction]
    types, aligned = signature(kernel, plan)
    constants = {"plan": plan}
    if direction == "forward":
        constants |= {"with_outputs": True, "with_starts": True}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(io.StringIO()) as told:
        knobs.nvidia.dump_ptxas_log = True
        # Nothing is told of what lies in the cache; line numbers make the assembler slow
        knobs.compilation.always_compile = knobs.compilation.disable_line_info = True
        compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=plan.launch())
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


def measure(direction: str, preset: str, size: str, precision: str, architecture: int) -> dict:
    plan = plan_of_model(preset, size, precision)
    row = {"kernel": direction, "preset": preset, "size": size, "products": precision, "arch": f"sm_{architecture}"}
    row |= {"num_warps": plan.launch()["num_warps"]}
    row |= resources(*compile_kernel(direction, plan, architecture))
    return row | {"shared_limit": ARCHITECTURES[architecture], "scratch_bytes_per_row": 4 * plan.at.end}


def report(results: dict) -> str:
    lines = [
        "# Triton kernels, compiled ahead of time",
        "",
        "`python benchmarks/triton_aot.py`, without a GPU: resources, neither results nor speed. Tensors are float32,",
        'products by TF32 in three parts, as under `torch.set_float32_matmul_precision("high")`, or by float32 ("highest").',
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
    for (size, precision), preset in itertools.product(SHAPES, PRESETS):
        for architecture, direction in itertools.product(ARCHITECTURES, KERNELS):
            results["rows"].append(measure(direction, preset, size, precision, architecture))
            print(report(results).splitlines()[-1], flush=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(report(results))
    output.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
