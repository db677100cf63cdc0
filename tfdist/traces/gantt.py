"""Two steps of all ranks, drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tfdist.records import charts
from tfdist.traces import intervals
from tfdist.traces.report import Report
from tfdist.traces.shares import PARTS, parts_of

_EXECUTIONS = 2
_COLORS = {
    "compute": "#3b6fb6",
    "exposed": "#d9822b",
    "for_rank": "#c23b4a",
    "for_data": "#8e6bbf",
    "for_host": "#d5d8dc",
}


def draw(report: Report, path: Path) -> None:
    """Writes the picture as a PNG: two executions from the middle of the trace, on one clock.

    Raises:
        EngineMissingError: matplotlib is not installed.
    """
    figure = charts.figure(12, 1.6 + 0.6 * len(report.traces))
    axes = figure.add_subplot()
    first = report.traces[0]
    middle = max(0, (len(first.executions) - _EXECUTIONS) // 2)
    chosen = slice(middle, middle + _EXECUTIONS)
    begun = min(
        trace.executions[chosen][0, 0] + shift
        for trace, shift in zip(report.traces, report.meetings.shifts, strict=True)
    )
    for row, trace in enumerate(report.traces):
        shift = report.meetings.shifts[row]
        window = np.array([[trace.executions[chosen][0, 0], trace.executions[chosen][-1, 1]]])
        parts = parts_of(trace, report.meetings)
        for name in PARTS:
            times = (intervals.intersect(window, parts[name]) + shift - begun) / 1e6
            bars = np.stack([times[:, 0], times[:, 1] - times[:, 0]], axis=1)
            label = "" if row else PARTS[name]
            axes.broken_barh(bars, (row - 0.4, 0.8), color=_COLORS[name], label=label)
        for at in (trace.executions[chosen][:, 0] + shift - begun) / 1e6:
            axes.plot([at, at], [row - 0.48, row + 0.48], color="black", linewidth=1)
    axes.set_yticks(range(len(report.traces)), [f"rank {trace.rank}" for trace in report.traces])
    axes.invert_yaxis()
    axes.set_xlabel("ms (black lines: where a step begins)")
    steps = first.steps[chosen]
    axes.set_title(f"{report.folder}: steps {steps[0][0]} to {steps[-1][1]}")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(PARTS), frameon=False)
    charts.save(figure, path)
