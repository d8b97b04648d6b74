"""The loss curve as a picture."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def draw_loss_curve(path: Path, losses: list[tuple[int, float]], levels: dict[str, float]) -> None:
    """Write a PNG of the training loss by step, with horizontal lines at `levels` (losses in nats, by name)."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if losses:
        steps, values = zip(*losses, strict=True)
        axes.plot(steps, values, color="#1f4e79", label="training loss")
    for number, (name, level) in enumerate(levels.items()):
        axes.axhline(level, color=f"C{number + 1}", linestyle="--", linewidth=1, label=f"{name} ({level:.2f})")
    axes.set_xlabel("step")
    axes.set_ylabel("loss per token (nats)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
