"""On one GPU: are the numbers right, and how fast is Atlas beside Gated DeltaNet and Llama? Under eight minutes.

    python benchmarks/gpu.py                          # parity, then times at the 340M size in bfloat16
    python benchmarks/gpu.py --parts parity           # only whether the numbers are right
    python benchmarks/gpu.py --dry-run                # all of it on a CPU, tiny: does the program work?
    TRITON_INTERPRET=1 python benchmarks/gpu.py --dry-run --parts parity       # and the kernels, interpreted

Needs `pip install -e '.[gpu]'` for the kernels and for Gated DeltaNet; what cannot run is skipped with its reason. The
results are written after every row, and nothing new is begun after `--budget` seconds. Exits with 1 if numbers differ.
Parity and every contender have a process of their own.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from gpu_parts import contenders, measure, parity
from gpu_parts.report import table
from speed import machine

RESULTS = Path(__file__).parent / "results" / "gpu.json"
KINDS = ("train", "prefill", "decode")
OVER = "the time was over"
# Seconds that a process may take beyond the budget, to end what it has begun.
GRACE = 60


def about(device: torch.device, args) -> dict:
    """What the figures were measured on."""
    found = machine(args)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
        found["capability"] = f"{properties.major}.{properties.minor}"
    for package in ("triton", "flash-linear-attention"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


class Run:
    """The results so far, on the disk after every row, and the time that is left."""

    def __init__(self, path: Path, budget: float):
        self.path, self.end = path, time.monotonic() + budget
        self.result = json.loads(path.read_text()) if path.exists() else {"machine": {}, "parity": [], "rows": []}

    @property
    def left(self) -> float:
        return max(0.0, self.end - time.monotonic())

    def has(self, part: str, keys: dict) -> bool:
        return any(keys.items() <= row.items() for row in self.result[part])

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.result, indent=1) + "\n")
        self.path.with_suffix(".md").write_text(table(self.result))

    def add(self, part: str, row: dict) -> None:
        self.result[part].append(row)
        self.write()
        shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()}
        print(" ".join(f"{key}={value}" for key, value in shown.items()), flush=True)


def check(run: Run, scale, device) -> None:
    """Every comparison; one that breaks down has differed."""
    kernels = "triton" if os.environ.get("TRITON_INTERPRET") == "1" else "auto"
    for name, compare in parity.cases(scale, device, kernels):
        if run.has("parity", {"name": name}):
            continue
        row = {"name": name}
        try:
            row |= compare() if run.left else {"skipped": OVER}
        except (contenders.SkippedError, torch.OutOfMemoryError) as reason:
            row["skipped"] = f"{type(reason).__name__}: {str(reason)[:300]}"
        except Exception as error:
            if kernels == "triton" and "cannot run" in str(error):
                row["skipped"] = str(error)
            else:
                row |= {"error": f"{type(error).__name__}: {str(error)[:500]}", "passed": False}
        run.add("parity", row)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def measures(scale, args):
    """Key of every row of times: contender by contender, so that one process serves each."""
    for name in args.contenders:
        for kind in (kind for kind in KINDS if kind in args.parts):
            for batch, length in getattr(scale, kind):
                yield {"contender": name, "measure": kind, "batch": batch, "length": length}


def work(run: Run, scale, device, args) -> None:
    """All of `args.parts` in this process."""
    run.result["machine"] |= about(device, args)
    if "parity" in args.parts:
        check(run, scale, device)
    for row in measures(scale, args):
        if run.left:
            machine = run.result["machine"]
            if "peak_flops" not in machine:
                machine["peak_flops"] = measure.peak_flops(device, scale)
            row |= measure.measure(row, scale, device, machine["peak_flops"])
        else:
            row["skipped"] = OVER
        run.add("rows", row)


def delegate(run: Run, scale, args) -> None:
    """A process for every contender, and one for parity: a kernel that breaks the GPU's context costs its own row only."""

    def started(parts, names) -> str:
        """How a process for these ended; what it found is in `run`."""
        command = [sys.executable, __file__, "--one-process", "--output", run.path, "--budget", run.left]
        command += ["--parts", *parts, "--contenders", *names] + ["--dry-run"] * args.dry_run
        # Line numbers, which nobody reads here, make the assembler slow
        environment = {**os.environ, "TRITON_DISABLE_LINE_INFO": "1"}
        try:
            finished = subprocess.run(list(map(str, command)), timeout=run.left + GRACE, env=environment)
            ended = f"code {finished.returncode}"
        except subprocess.TimeoutExpired:
            ended = "a timeout"
        run.result = Run(run.path, 0).result
        return f"its process ended with {ended}"

    if "parity" in args.parts:
        names = [name for name, _ in parity.cases(scale, None, "auto")]
        while missing := [name for name in names if not run.has("parity", {"name": name})]:
            if not run.left:
                run.add("parity", {"name": missing[0], "skipped": OVER})
                continue
            ended = started(["parity"], args.contenders)
            # Where a process broke off, the case at hand has differed, and another process goes on with the next
            if missing := [name for name in names if not run.has("parity", {"name": name})]:
                run.add("parity", {"name": missing[0], "passed": False, "error": ended})
    kinds = [kind for kind in KINDS if kind in args.parts]
    for name in args.contenders if kinds else ():
        ended = started(kinds, [name]) if run.left else OVER
        for key in measures(scale, argparse.Namespace(contenders=[name], parts=kinds)):
            if not run.has("rows", key):
                run.add("rows", {**key, "skipped": ended})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, on a CPU")
    parser.add_argument("--parts", nargs="+", choices=("parity", *KINDS), default=["parity", *KINDS])
    parser.add_argument("--contenders", nargs="+", choices=contenders.NAMES, default=list(contenders.NAMES))
    parser.add_argument("--budget", type=float, default=400, metavar="SECONDS", help="nothing is begun after this time")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--one-process", action="store_true", help="add to the output file, and start no processes")
    args = parser.parse_args()
    if not args.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA device here: --dry-run tries the program out on a CPU")
    scale = contenders.DRY if args.dry_run else contenders.FULL
    args.rounds = scale.rounds
    if args.one_process:
        run = Run(args.output, args.budget)
        work(run, scale, torch.device("cpu" if args.dry_run else "cuda"), args)
    else:
        args.output.unlink(missing_ok=True)
        run = Run(args.output, args.budget)
        delegate(run, scale, args)
    different = [row["name"] for row in run.result["parity"] if not row.get("passed", True)]
    if different:
        sys.exit(f"different from PyTorch's path: {', '.join(different)}")


if __name__ == "__main__":
    main()
