"""Table and plot of the recall results."""

import json
from pathlib import Path

from .task import SETTINGS
from .training import BATCH_SIZE, LEARNING_RATE


def write_report(path: Path) -> None:
    """Write `recall.md` and `recall.png` beside the JSON file."""
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


def table(rows: list[dict]) -> str:
    """Markdown: a section for every setting and number of steps, a line for every run."""
    lines = [
        "# Multi-query associative recall",
        "",
        "Share of queries answered right on held-out sequences, by training step.",
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
            + " | CPU s/step | parameters |"
        )
        lines.append("|---" * (len(marks) + 7) + "|")
        for row in group:
            curve = {int(k): v for k, v in row["accuracy"].items()}
            cells = [f"{curve[m]:.3f}" if m in curve else "" for m in marks]
            changed = ", ".join(f"{k}={v}" for k, v in row["overrides"].items())
            recipe = [str(row["batch_size"]), f"{row['learning_rate']:g}"]
            cells = [row["mixer"], changed, *recipe, str(row["seed"]), *cells]
            cells += [f"{row['cpu_seconds_per_step']:.3f}", str(row["parameters"])]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(rows: list[dict], path: Path) -> None:
    """Mean recall over steps of the runs with the presets' fields and the usual recipe, a panel for every setting."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    usual = (BATCH_SIZE, LEARNING_RATE)
    plain = [row for row in rows if not row["overrides"] and (row["batch_size"], row["learning_rate"]) == usual]
    settings = [s for s in SETTINGS if any(row["setting"] == s for row in plain)]
    if not settings:
        return
    figure, axes = plt.subplots(1, len(settings), figsize=(6 * len(settings), 4.5), squeeze=False)
    colours = {}
    for axis, setting in zip(axes[0], settings, strict=True):
        mixers = sorted({row["mixer"] for row in plain if row["setting"] == setting})
        for mixer in mixers:
            colour = colours.setdefault(mixer, f"C{len(colours) % 10}")
            runs = [row for row in plain if row["setting"] == setting and row["mixer"] == mixer]
            longest = max(row["steps"] for row in runs)
            runs = [{int(k): v for k, v in row["accuracy"].items()} for row in runs if row["steps"] == longest]
            steps = sorted(runs[0])
            mean = [sum(run[s] for run in runs) / len(runs) for s in steps]
            style = "--" if mixer in ("attention", "gated_delta") else "-"
            axis.plot(steps, mean, style, color=colour, label=f"{mixer} ({len(runs)})")
        axis.set(title=setting, xlabel="training step", ylabel="recall", ylim=(0, 1.02))
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
