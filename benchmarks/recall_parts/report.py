"""Table and plot of the recall results."""

import json
from collections import Counter
from pathlib import Path

from atlas_hf.modeling.configuration_atlas import PRESETS

from .task import SETTINGS


def write_report(path: Path) -> None:
    """Write `recall.md`, `recall.png` and, where fields were varied, `recall_sweep.png` beside the JSON file."""
    rows = json.loads(path.read_text())
    rows.sort(
        key=lambda r: (
            list(SETTINGS).index(r["setting"]),
            r["steps"],
            r["mixer"],
            json.dumps(r["overrides"]),
            r["batch_size"],
            r["learning_rate"],
            r["seed"],
        )
    )
    path.with_suffix(".md").write_text(table(rows))
    plot(rows, path.with_suffix(".png"))
    plot_sweep(rows, path.with_name(f"{path.stem}_sweep.png"))


def table(rows: list[dict]) -> str:
    """Markdown: a section for every setting and number of steps, a line for every run."""
    lines = [
        "# Multi-query associative recall",
        "",
        "Share of queries answered right on held-out sequences, by training step: `python benchmarks/recall.py`, with",
        "`--setting`, `--mixers`, `--seeds`, `--steps`, `--batch-size`, `--learning-rate` and `--override` as each row says.",
    ]
    groups = {}
    for row in rows:
        groups.setdefault((row["setting"], row["steps"]), []).append(row)
    for (setting, steps), group in groups.items():
        marks = sorted({int(step) for row in group for step in row["accuracy"]})
        lines += ["", f"## {setting}, {steps} steps", ""]
        lines.append(
            "| mixer | changed fields | batch | rate | seed | "
            + " | ".join(map(str, marks))
            + " | CPU s/step | parameters | commit |"
        )
        lines.append("|---" * (len(marks) + 8) + "|")
        for row in group:
            curve = {int(k): v for k, v in row["accuracy"].items()}
            cells = [f"{curve[m]:.3f}" if m in curve else "" for m in marks]
            changed = ", ".join(f"{k}={v}" for k, v in row["overrides"].items())
            recipe = [str(row["batch_size"]), f"{row['learning_rate']:g}"]
            cells = [row["mixer"], changed, *recipe, str(row["seed"]), *cells]
            cells += [f"{row['cpu_seconds_per_step']:.3f}", str(row["parameters"]), row["commit"]]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def recipe(row: dict) -> tuple:
    return row["steps"], row["batch_size"], row["learning_rate"]


def shown_recipe(rows: list[dict]) -> tuple:
    """Of one setting's recipes the one that most of Atlas' presets ran, then most mixers, then the longest."""
    mixers = {}
    for row in rows:
        mixers.setdefault(recipe(row), set()).add(row["mixer"])
    return max(mixers, key=lambda r: (len(mixers[r] & PRESETS.keys()), len(mixers[r]), r))


def plot(rows: list[dict], path: Path) -> None:
    """Mean recall over steps of the runs with the mixers' own fields; for every setting the recipe of `shown_recipe`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plain = [row for row in rows if not row["overrides"]]
    settings = [s for s in SETTINGS if any(row["setting"] == s for row in plain)]
    if not settings:
        return
    figure, axes = plt.subplots(1, len(settings), figsize=(6 * len(settings), 4.5), squeeze=False)
    numbers = {}  # of the mixers: their colour, and past ten colours dots
    for axis, setting in zip(axes[0], settings, strict=True):
        here = [row for row in plain if row["setting"] == setting]
        chosen = shown_recipe(here)
        for mixer in sorted({row["mixer"] for row in here if recipe(row) == chosen}):
            number = numbers.setdefault(mixer, len(numbers))
            runs = [row["accuracy"] for row in here if row["mixer"] == mixer and recipe(row) == chosen]
            steps = sorted(map(int, runs[0]))
            mean = [sum(run[str(s)] for run in runs) / len(runs) for s in steps]
            style = "--" if mixer in ("attention", "gated_delta") else "-" if number < 10 else ":"
            axis.plot(steps, mean, style, color=f"C{number % 10}", label=f"{mixer} ({len(runs)})")
        axis.set(
            title=f"{setting}, {chosen[0]} steps, batches of {chosen[1]}",
            xlabel="training step",
            ylabel="recall",
            ylim=(0, 1.02),
        )
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_sweep(rows: list[dict], path: Path) -> None:
    """Recall half-way and at the end, one field changed at a time, beside the preset's own values in the same recipe."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    varied = Counter((r["setting"], *recipe(r)) for r in rows if r["overrides"])
    if not varied:
        return
    # The recipe with the most changed fields is the sweep; the others are single trials.
    chosen = varied.most_common(1)[0][0]
    here = [r for r in rows if (r["setting"], *recipe(r)) == chosen]
    mixers = {r["mixer"] for r in here if r["overrides"]}
    runs = {}
    for row in here:
        if row["mixer"] in mixers:
            changed = ", ".join(f"{k} {v}" for k, v in row["overrides"].items()) or "as it is"
            runs.setdefault(f"{row['mixer']}: {changed}", []).append(row["accuracy"])
    figure, axis = plt.subplots(figsize=(8, 0.28 * len(runs) + 1.2))
    marks = sorted(map(int, here[0]["accuracy"]))
    for colour, mark in enumerate((marks[len(marks) // 2], marks[-1])):
        for place, curves in enumerate(runs.values()):
            values = [curve[str(mark)] for curve in curves]
            axis.plot(values, [-place] * len(values), ".", color=f"C{colour}", alpha=0.4)
            label = f"step {mark}, mean of seeds" if place == 0 else None
            axis.plot(sum(values) / len(values), -place, "o", color=f"C{colour}", label=label)
    labels = [f"{name} ({len(curves)})" for name, curves in runs.items()]
    axis.set_yticks([-place for place in range(len(runs))], labels, fontsize=7)
    axis.set(xlabel=f"recall, {chosen[0]} setting", xlim=(0, 1.02))
    axis.grid(axis="x", linewidth=0.4)
    axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
