"""Scaling as a picture: throughput over devices, and what is left of it for each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tfdist.benching.fits import Measured, speed_up
from tfdist.benching.planned import Planned
from tfdist.records import charts


def draw(rows: Sequence[Measured], plan: Planned, path: Path, title: str) -> None:
    """Draws throughput and efficiency of each strategy over its devices; dashed is what is planned.

    Raises:
        EngineMissingError: matplotlib is not installed.
    """
    figure = charts.figure(9.0, 3.8)
    from matplotlib.ticker import LogLocator

    base, gains = speed_up(rows)
    throughput, efficiency = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    for name in dict.fromkeys(row.entry.strategy for row in rows):
        own = [(row, gains[at]) for at, row in enumerate(rows) if at in gains]
        own = sorted(
            ((row, gain) for row, gain in own if row.entry.strategy == name),
            key=lambda pair: pair[0].entry.devices,
        )
        devices = [row.entry.devices for row, _ in own]
        speeds = [row.speed for row, _ in own]
        low = [row.speed - min(row.samples_per_s) for row, _ in own]
        high = [max(row.samples_per_s) - row.speed for row, _ in own]
        drawn = throughput.errorbar(devices, speeds, [low, high], marker="o", capsize=3, label=name)
        shares = [gain * base.entry.devices / row.entry.devices for row, gain in own]
        efficiency.plot(devices, shares, marker="o", label=name)
        line, style = plan.line(name), {"linestyle": "--", "color": drawn.lines[0].get_color()}
        throughput.plot(line.keys(), line.values(), **style)
        shares = [speed / base.speed / count for count, speed in line.items()]
        efficiency.plot(line.keys(), shares, **style)  # Planned is only where one is the base.
    most = max(row.entry.devices for row in rows)
    if plan.rows:
        most = max(most, *(row.candidate.devices for row in plan.rows))
        throughput.plot([], [], linestyle="--", color="gray", label="planned")
    counts = sorted({row.entry.devices for row in rows} | {2**n for n in range(most.bit_length())})
    ends = [base.entry.devices, most]
    linear = [base.speed, base.speed * most / base.entry.devices]
    throughput.plot(ends, linear, linestyle=":", color="gray", label="linear")
    efficiency.axhline(1.0, linestyle=":", color="gray")
    for axes, name in ((throughput, "samples/s"), (efficiency, "efficiency")):
        axes.set_title(name)
        axes.set_xlabel("devices")
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, map(str, counts))
        axes.grid(alpha=0.3)
    throughput.set_yscale("log")
    throughput.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    throughput.yaxis.set_major_formatter("{x:,g}")
    throughput.minorticks_off()
    efficiency.set_ylim(bottom=0)
    throughput.legend()
    figure.suptitle(title)
    charts.save(figure, path)


def draw_sums(rows: Sequence[tuple[str, int, float]], path: Path, title: str) -> None:
    """Draws the seconds of a sum over its bytes.

    Args:
        rows: (way, bytes, seconds).

    Raises:
        EngineMissingError: matplotlib is not installed.
    """
    figure = charts.figure(5.5, 3.8)
    axes = figure.add_subplot(1, 1, 1)
    for way in dict.fromkeys(way for way, _, _ in rows):
        own = [(size, seconds) for name, size, seconds in rows if name == way]
        axes.plot(*zip(*own, strict=True), marker="o", label=way)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes")
    axes.set_ylabel("seconds")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.suptitle(title)
    charts.save(figure, path)
