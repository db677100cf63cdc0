"""curves.png: loss and metrics over the epochs."""

from __future__ import annotations

from pathlib import Path

from tfdist.cli.run_folder import replacing


def draw(rows: list[dict[str, float]], names: list[str], path: Path, title: str) -> None:
    """Draws one panel for each metric, training and validation together.

    Args:
        rows: the history, a dict per epoch, as in history.csv.
        names: of the metrics.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(4.5 * len(names), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    epochs = [row["epoch"] for row in rows]
    for position, name in enumerate(names, start=1):
        axes = figure.add_subplot(1, len(names), position)
        for key, label in ((name, "training"), (f"val_{name}", "validation")):
            if key in rows[-1]:
                axes.plot(epochs, [row.get(key) for row in rows], marker="o", label=label)
        axes.set_title(name)
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110)
