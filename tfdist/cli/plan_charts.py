"""A plan as a picture: memory by strategy, and speed by number of devices."""

from __future__ import annotations

from pathlib import Path

from tfdist.planning.report import Plan
from tfdist.records import charts

_PARTS = ("weights", "slots", "gradients")


def draw(plan: Plan, target: Path) -> None:
    """Draws bars of the memory of each row, and the scaling.

    Args:
        target: a .png file, see ``charts.checked``.

    Raises:
        EngineMissingError: matplotlib is not installed.
    """
    figure = charts.figure(13, 5.2)
    bars, speed = figure.subplots(1, 2)
    _memory(bars, plan)
    if plan.scaling is not None:
        _scaling(speed, plan)
    figure.suptitle(
        f"{plan.cluster.describe()}, {plan.global_batch_size:,} rows a step\n{plan.advice.reason}",
        fontsize=10,
    )
    charts.save(figure, target)


def _memory(axes, plan: Plan) -> None:
    rows = [row for row in reversed(plan.rows) if row.needs is not None]
    labels = [row.name for row in rows]
    most = max((row.peak for row in rows), default=1.0)
    unit, name = (1e9, "GB") if most > 1e9 else (1e6, "MB")
    before = [0.0] * len(rows)
    for part in _PARTS:
        # The peak may come before all gradients are there.
        sizes = [
            min(getattr(row.needs, part) / unit, row.peak / unit - held)
            for row, held in zip(rows, before, strict=True)
        ]
        axes.barh(labels, sizes, left=before, label=part)
        before = [one + other for one, other in zip(before, sizes, strict=True)]
    rest = [row.peak / unit - held for row, held in zip(rows, before, strict=True)]
    axes.barh(labels, rest, left=before, label="activations and the rest")
    label = f"{name} on the device that holds most"
    rooms = [row.room for row in rows]
    if rooms and min(rooms) < 4 * most:
        axes.plot(
            *([room / unit for room in rooms], labels, "k|"),
            markersize=18,
            markeredgewidth=2,
            label="what a device has",
        )
    elif rooms:  # Beside it nothing else would be seen.
        label += f", of at least {min(rooms) / 1e9:,.1f} GB"
    axes.set_xlabel(label)
    axes.tick_params(axis="y", labelsize=8)
    axes.legend(fontsize=8)


def _scaling(axes, plan: Plan) -> None:
    points = plan.scaling.points
    same = [point for point in points if point.speed_up is not None]
    counts = [point.devices for point in points]
    axes.plot(counts, counts, color="gray", linestyle=":", label="as many times as devices")
    grown = [point.grown_efficiency * point.devices for point in points]
    axes.plot(counts, grown, marker="o", label="rows on each device stay")
    speeds = [point.speed_up for point in same]
    axes.plot([point.devices for point in same], speeds, marker="o", label="rows of a step stay")
    axes.axvline(
        plan.scaling.last_that_pays, color="black", linestyle="--", label="the last that pays"
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("devices")
    axes.set_ylabel("times as fast as one")
    axes.legend(fontsize=8)
