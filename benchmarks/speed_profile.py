"""Where does Atlas' time go, and how fast could it be? What bounds the ratios to Llama that `speed.py` measures.

    python benchmarks/speed_profile.py
    python benchmarks/speed_profile.py --contenders omeganet --train 512 --prefill --decode 512

One CPU thread. A model can't be faster than its matrix products alone, at the rate at which they run in it; nor, at best, at
the rate of one large product. A decoded token can't be faster than reading the weights and the state once.
"""

import argparse
import statistics
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from speed_parts import contenders, measure

RESULTS = Path(__file__).parent / "results" / "speed_profile.md"
PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::baddbmm_", "aten::addbmm")
SOLVES = ("aten::linalg_solve_triangular",)
MAKERS = {"train": measure.training_step, "prefill": measure.prefill, "decode": measure.decoding}
READ_BYTES = 2**28


def count_flops(run) -> int:
    """Floating point operations of the matrix products of a call."""
    in_place = {torch.ops.aten.baddbmm_: lambda _, a, b, **_kwargs: flop_registry[torch.ops.aten.bmm](a, b)}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        run()
    return counter.get_total_flops()


def seconds_of_parts(run, rounds: int) -> dict[str, float]:
    """Seconds in products and in triangular solves, and the number of calls of PyTorch's operators.

    The least of the rounds: the profiler tells the time on the wall, and others may hold the processor.
    """
    rows = []
    for _ in range(rounds):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            run()
        events = profiler.key_averages()
        times = [sum(e.self_cpu_time_total for e in events if e.key in names) / 1e6 for names in (PRODUCTS, SOLVES)]
        rows.append((*times, sum(e.count for e in events if e.key.startswith("aten::"))))
    return dict(zip(("products", "solves", "calls"), map(min, zip(*rows, strict=True)), strict=True))


def read_rate(rounds: int) -> float:
    """Bytes a second that a sum over a large tensor reads."""
    x = torch.ones(READ_BYTES // 4)
    return READ_BYTES / statistics.median(measure.timed(x.sum)[0] for _ in range(rounds))


def examine(name: str, kind: str, length: int, models: dict, rounds: int) -> dict:
    """One row: times of a call, its parts, and the bounds of the ratio to Llama."""
    run, reference = MAKERS[kind](models[name], length), MAKERS[kind](models["llama"], length)
    compared = measure.compare(run, reference, rounds)
    llama = compared["cpu_seconds"] * compared["cpu_ratio"]
    row = {"contender": name, "measure": kind, "length": length, "seconds": compared["cpu_seconds"]}
    row |= {"llama_seconds": llama, "ratio": compared["cpu_ratio"], **seconds_of_parts(run, rounds)}
    row["flops"] = count_flops(run)
    row["bound_products"] = llama / row["products"]
    row["bound_peak"] = llama / (row["flops"] / compared["peak_flops_per_cpu_second"])
    if kind == "decode":
        weights = sum(p.numel() * p.element_size() for p in models[name].parameters())
        weights -= models[name].get_input_embeddings().weight.nbytes
        read = measure.DECODE_STEPS * (weights + measure.cache_bytes(run.cache))
        row["bound_bytes"] = llama / (read / read_rate(rounds))
    return row


def table(rows: list[dict], rounds: int) -> str:
    """Markdown."""
    lines = [
        "# Where the time goes, and what bounds it",
        "",
        "`python benchmarks/speed_profile.py`: CPU milliseconds of one call (decoding: of 16 tokens) on one thread, medians",
        f"of {rounds} rounds that take turns with Llama, in the skeleton",
        "of `speed.md`. Products: matrix products, those of projections and SwiGLU included. Calls: of PyTorch's operators.",
        "Bounds of the ratio to Llama, if nothing but this took time: the products, at the rate at which they run here or at",
        "that of one 2048-cube product; in decoding, reading weights and state once a token.",
        "",
        f"torch {torch.__version__}",
        "",
        "| contender | measure | total | products | solves | calls | GFLOP | ratio | products alone | at peak | reading |",
        "|---" * 11 + "|",
    ]
    for r in rows:
        reading = f"{r['bound_bytes']:.2f}" if "bound_bytes" in r else ""
        lines.append(
            f"| {r['contender']} | {r['measure']} {r['length']} | {1e3 * r['seconds']:.0f} | {1e3 * r['products']:.0f} | "
            f"{1e3 * r['solves']:.0f} | {r['calls']} | {r['flops'] / 1e9:.1f} | {r['ratio']:.2f} | "
            f"{r['bound_products']:.2f} | {r['bound_peak']:.2f} | {reading} |"
        )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=[*contenders.ATLAS, "llama"],
        default=["omeganet", "atlas_every_token", "llama"],
        help="the profiler holds every call of an operator: Muon at every token over thousands of tokens takes 20 GB",
    )
    parser.add_argument("--train", nargs="*", type=int, default=[512], metavar="LENGTH")
    parser.add_argument("--prefill", nargs="*", type=int, default=[2048], metavar="LENGTH")
    parser.add_argument("--decode", nargs="*", type=int, default=[512, 8192], metavar="CONTEXT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    models = {name: contenders.build(name) for name in dict.fromkeys([*args.contenders, "llama"])}
    rows = []
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for name in args.contenders:
        for kind, lengths in {"train": args.train, "prefill": args.prefill, "decode": args.decode}.items():
            for length in lengths:
                rows.append(examine(name, kind, length, models, args.rounds))
                print(f"{name} {kind} {length}: {rows[-1]['ratio']:.2f} of Llama's speed", flush=True)
                args.output.write_text(table(rows, args.rounds))
    print(table(rows, args.rounds))


if __name__ == "__main__":
    main()
