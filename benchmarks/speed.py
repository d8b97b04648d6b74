"""How fast is Atlas? Every contender takes turns with transformers' Llama of the same size and a large matrix product.

    python benchmarks/speed.py                                   # everything: some tens of minutes on two cores
    python benchmarks/speed.py --contenders omeganet --train 512 --prefill --decode
    python benchmarks/speed.py --peer PATH                       # and titans-pytorch, installed in the folder PATH
    python benchmarks/speed.py --table                           # only draw table and plot again

Prompts longer than 8,192 tokens are read by the contenders of `--long` alone: Llama, their partner, takes minutes for each.
Rows are merged into the output file: a new one replaces that of the same contender, measure and length. Each names the run
that it comes from.
"""

import argparse
import json
import os
import platform
import subprocess
import time
from pathlib import Path

import torch
import transformers

from speed_parts import contenders, measure
from speed_parts.report import write_report

RESULTS = Path(__file__).parent / "results" / "speed.json"
LONG = 8192
MAKERS = {"train": measure.training_step, "prefill": measure.prefill, "decode": measure.decoding}
MAKERS["decode compiled"] = measure.compiled_decoding


def measure_one(name, kind, length, models, args, about) -> dict:
    """One row of the results."""
    make = MAKERS[kind]
    torch.compiler.reset()  # or graphs of other models would be asked first
    contender, reference = make(models[name], length), make(models["llama"], length)
    row = {"contender": name, "measure": kind, "length": length, **measure.compare(contender, reference, args.rounds)}
    tokens = measure.BATCH * (measure.DECODE_STEPS if kind.startswith("decode") else length)
    row["tokens_per_second"] = tokens / row["cpu_seconds"]
    flops = contenders.forward_flops(name, models[name], length)
    if kind == "train":
        if flops is not None:
            row["share_of_peak"] = 3 * flops * row["tokens_per_second"] / row["peak_flops_per_cpu_second"]
        row["memory_bytes"] = measure.peak_memory(__file__, name, length, args.peer)
        row["memory_of_llama"] = measure.peak_memory(__file__, "llama", length)
    if kind.startswith("decode"):
        row["cache_bytes"] = measure.cache_bytes(contender.cache)
    row["config"] = contenders.config_of(name, models[name])
    return {**row, "run": about}


def processor() -> str:
    """The processor's model, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine(args) -> dict:
    """What a run's figures depend on."""
    try:
        told = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
        commit = told.stdout.strip()
    except OSError:  # no git here
        commit = ""
    return {
        "started": time.strftime("%Y-%m-%d %H:%M"),
        "cpu": processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit,
        "rounds": args.rounds,
        "load at the start": round(os.getloadavg()[0], 1),
    }


def write(path: Path, row: dict) -> None:
    rows = json.loads(path.read_text()) if path.exists() else []
    key = ("contender", "measure", "length")
    rows = [old for old in rows if any(old[k] != row[k] for k in key)] + [row]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contenders", nargs="*", choices=contenders.NAMES, default=list(contenders.NAMES))
    parser.add_argument("--train", nargs="*", type=int, default=[512, 2048], metavar="LENGTH")
    parser.add_argument("--prefill", nargs="*", type=int, default=[2048, 8192, 32768], metavar="LENGTH")
    parser.add_argument("--long", nargs="*", choices=contenders.NAMES, default=["omeganet", "atlas_every_token"])
    parser.add_argument("--decode", nargs="*", type=int, default=[512, 8192], metavar="CONTEXT")
    parser.add_argument(
        "--compiled", nargs="*", type=int, default=[512, 8192], metavar="CONTEXT", help="decoding by torch.compile"
    )
    parser.add_argument("--rounds", type=int, default=measure.ROUNDS)
    parser.add_argument("--peer", type=Path, help="folder in which titans-pytorch is installed")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="only draw the table and the plot of the output file")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        print(measure.memory_of_training_step(contenders.build(args.memory_of, args.peer), args.length))
        return
    if args.table:
        write_report(args.output)
        return
    names = [*args.contenders, *(["titans_pytorch"] if args.peer else [])]
    models = {name: contenders.build(name, args.peer) for name in dict.fromkeys([*names, "llama"])}
    about = machine(args)
    for name in names:
        kinds = {"train": args.train, "prefill": args.prefill, "decode": args.decode}
        if name == "titans_pytorch":
            kinds["decode"] = []
        if name in (*contenders.ATLAS, "llama"):
            kinds["decode compiled"] = args.compiled
        for kind, lengths in kinds.items():
            for length in lengths:
                if kind == "prefill" and length > LONG and name not in args.long:
                    continue
                try:
                    row = measure_one(name, kind, length, models, args, about)
                except Exception as error:  # others' models may not run here; the rest is to be measured all the same
                    print(f"{name} {kind} {length}: skipped, {type(error).__name__}: {error}", flush=True)
                    continue
                write(args.output, row)
                print(f"{name} {kind} {length}: {row['cpu_ratio']:.3f} of Llama's speed", flush=True)
    write_report(args.output)


if __name__ == "__main__":
    main()
