"""curves.png: loss and metrics over the epochs."""

from __future__ import annotations

import math

from tfdist.errors import EngineMissingError
from tfdist.records import charts
from tfdist.records.replacing import replacing
from tfdist.runs.files import read_rows
from tfdist.runs.folder import RunFolder

# A metric of many values, as F1Score has one a class, would be a picture of many metres.
_MOST_PANELS = 16


def draw(folder: RunFolder, title: str, names: list[str]) -> str:
    """Draws one panel for each metric, training and validation together.

    Args:
        names: of the metrics.

    Returns:
        Where they are, or why there are none: matplotlib is not installed.
    """
    if not names:
        return "none: the training shows no number of its own"
    names, more = names[:_MOST_PANELS], len(names[_MOST_PANELS:])
    title += f"\n{more} more numbers are in {folder.history.name}" if more else ""
    try:
        figure = charts.figure(4.5 * len(names), 3.6)
    except EngineMissingError as error:
        return f"none: {error}"
    from matplotlib.ticker import MaxNLocator

    rows = read_rows(folder.history)
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
    figure.suptitle("\n".join([title, *_warnings(rows, names)]))
    with replacing(folder.curves) as temporary:
        figure.savefig(temporary, dpi=110)
    return str(folder.curves)


def _warnings(rows: list[dict[str, float]], names: list[str]) -> list[str]:
    """Returns a line for each curve that has points which cannot be drawn."""
    found = []
    for key in (*names, *(f"val_{name}" for name in names)):
        epochs = [row["epoch"] for row in rows if not math.isfinite(row.get(key, 0.0))]
        if epochs:
            found.append(
                f"{key} is {next(r[key] for r in rows if r['epoch'] == epochs[0])} "
                f"in epoch {epochs[0]}" + (f" and {len(epochs) - 1} more" if epochs[1:] else "")
            )
    return found
