"""The picture of how unequal clients are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tfdist.records import charts
from tfdist.records.clients.counts import ClientCounts

# More bars are thinner than a pixel, more names than a legend has room for.
_CLIENTS_DRAWN = 100
_CLASSES_NAMED = 20


def draw(skew: ClientCounts, path: str | Path) -> None:
    """Writes the PNG of ``Skew.plot``."""
    target = charts.checked(path)
    figure = charts.figure(11, 6.5)
    dealt = "" if skew.partition is None else f", {skew.partition}"
    figure.suptitle(f"{len(skew.ids):,} clients, {skew.num_records.sum():,} records{dealt}")
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 2))
    _draw_clients(skew, figure.add_subplot(grid[0, :]))
    records = skew.num_records
    bins = 30
    if np.ptp(records) < bins:
        bins = np.arange(records.min(), records.max() + 2) - 0.5
    _draw_histogram(figure.add_subplot(grid[1, 0]), records, bins, "records of a client")
    if skew.counts is not None:
        label = "label skew of a client: 0 as all together, to 1"
        distances = skew.distances[np.isfinite(skew.distances)]
        bins = np.linspace(0, 1, 31)
        _draw_histogram(figure.add_subplot(grid[1, 1]), distances, bins, label)
    charts.save(figure, target)


def _draw_clients(skew: ClientCounts, axes: Any) -> None:
    from matplotlib import colormaps

    shown = min(len(skew.ids), _CLIENTS_DRAWN)
    places = np.arange(shown)
    if skew.counts is None:
        axes.bar(places, skew.num_records[:shown], width=0.9)
    else:
        counts = skew.counts[:shown]
        num_classes = counts.shape[1]
        named = num_classes <= _CLASSES_NAMED
        colors = colormaps["tab20" if 10 < num_classes <= 20 else "tab10" if named else "turbo"]
        below = np.zeros(shown)
        for number, name in enumerate(skew.class_names):
            color = colors(number if named else number / num_classes)
            rows = np.flatnonzero(counts[:, number])  # A bar of no height takes as long to draw.
            axes.bar(rows, counts[rows, number], 0.9, below[rows], color=color, label=name)
            below = below + counts[:, number]
        if named:
            axes.legend(title="class", loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    axes.set_xlim(-0.6, shown - 0.4)
    axes.set_ylabel("records")
    first = "" if shown == len(skew.ids) else f"the first {shown} of {len(skew.ids):,} "
    axes.set_xlabel(f"{first}clients, by class" if skew.counts is not None else f"{first}clients")
    if shown <= 40:
        axes.set_xticks(places, [_short(name) for name in skew.ids], rotation=90, fontsize=7)


def _draw_histogram(axes: Any, values: np.ndarray, bins: Any, label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.hist(values, bins=bins, color="tab:blue")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if values.dtype.kind == "i":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(label)
    axes.set_ylabel("clients")


def _short(name: str) -> str:
    return name if len(name) <= 16 else f"{name[:15]}…"
