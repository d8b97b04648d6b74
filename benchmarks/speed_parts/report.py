"""Table and plot of the speed results."""

import json
from pathlib import Path


def write_report(path: Path) -> None:
    """Write `.md` and `.png` beside the JSON file."""
    rows = json.loads(path.read_text())
    path.with_suffix(".md").write_text(table(rows))
    plot(rows, path.with_suffix(".png"))


def columns(rows: list[dict]) -> list[tuple[str, int]]:
    """`(measure, length)` in the order in which they are told."""
    order = {"train": 0, "prefill": 1, "decode": 2, "decode compiled": 3}
    return sorted({(r["measure"], r["length"]) for r in rows}, key=lambda c: (order[c[0]], c[1]))


def runs(rows: list[dict]) -> list[str]:
    """A line for each run that the rows come from: what it ran on, and, if there are several, who ran in it."""
    told = {}
    for row in rows:
        about = ", ".join(f"{key} {value}" for key, value in row["run"].items())
        told.setdefault(about, []).append(f"{row['contender']} {row['measure']} {row['length']}")
    if len(told) == 1:
        return [f"{about[0].upper()}{about[1:]}." for about in told]
    return [f"* {about}: {', '.join(cells)}." for about, cells in told.items()]


def table(rows: list[dict]) -> str:
    """Markdown: ratios to Llama in CPU time, then what else was measured."""
    heads = columns(rows)
    names = list(dict.fromkeys(r["contender"] for r in rows))
    cells = {(r["contender"], r["measure"], r["length"]): r for r in rows}
    lines = [
        "# Speed",
        "",
        "`OMP_NUM_THREADS=1 python benchmarks/speed.py --peer FOLDER`: hidden 256, four layers, four heads, vocabulary",
        "4,096, float32, batch 2, Atlas with `memory_expansion=4`; widths are equal, numbers of parameters are not. Ratios",
        "are Llama's time over the contender's, in the same run and turn by turn: above 1 is faster than Llama. Medians over",
        'the rounds; CPU time of all threads. "decode compiled": both by `torch.compile`, on static caches.',
        "",
        *runs(rows),
        "",
        "## Ratio to Llama, CPU time (wall time)",
        "",
        "| contender | " + " | ".join(f"{measure} {length}" for measure, length in heads) + " |",
        "|---" * (len(heads) + 1) + "|",
    ]
    for name in names:
        values = [cells.get((name, *head)) for head in heads]
        shown = [f"{v['cpu_ratio']:.2f} ({v['wall_ratio']:.2f})" if v else "" for v in values]
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    lines += [
        "",
        "## Rates, memory and state",
        "",
        "Tokens per CPU second; share of the rate of a 2048-cube matrix product, with a backward pass counted as two forward",
        "passes and recomputation not at all; bytes that a training step adds, also over Llama's; bytes of the cache.",
        "",
        "| contender | measure | tokens/s | share of peak | memory MB | to Llama's | cache MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in names:
        for head in heads:
            r = cells.get((name, *head))
            if r is None:
                continue
            share = "" if r.get("share_of_peak") is None else f"{100 * r['share_of_peak']:.0f} %"
            memory = "" if r.get("memory_bytes") is None else f"{r['memory_bytes'] / 1e6:.0f}"
            other = r.get("memory_of_llama")
            to_llama = f"{r['memory_bytes'] / other:.2f}" if memory and other else ""
            cache = "" if r.get("cache_bytes") is None else f"{r['cache_bytes'] / 1e6:.2f}"
            lines.append(
                f"| {name} | {head[0]} {head[1]} | {r['tokens_per_second']:.0f} | {share} | {memory} | {to_llama} | {cache} |"
            )
    rates = {(r["contender"], r["length"]): r["tokens_per_second"] for r in rows if r["measure"] == "prefill"}
    longest = max((length for _, length in rates), default=0)
    shortest = min((length for _, length in rates), default=0)
    if longest > shortest:
        told = [
            f"{name} {rates[name, longest] / rates[name, shortest]:.2f}"
            for name in names
            if {(name, longest), (name, shortest)} <= rates.keys()
        ]
        lines += [
            "",
            f"Tokens a second of a prompt of {longest:,} tokens over those of {shortest:,}: {', '.join(told)}.",
        ]
    return "\n".join(lines) + "\n"


def plot(rows: list[dict], path: Path) -> None:
    """Ratios to Llama, a group of bars for every measure."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    heads, names = columns(rows), list(dict.fromkeys(r["contender"] for r in rows))
    cells = {(r["contender"], r["measure"], r["length"]): r["cpu_ratio"] for r in rows}
    figure, axis = plt.subplots(figsize=(11, 4.5))
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        heights = [cells.get((name, *head), 0) for head in heads]
        axis.bar([x + i * width for x in range(len(heads))], heights, width, label=name)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set(yscale="log", ylabel="speed relative to Llama (CPU time)")
    axis.set_xticks([x + 0.4 - width / 2 for x in range(len(heads))], [f"{m} {n}" for m, n in heads])
    axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
