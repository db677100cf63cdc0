"""A schedule, drawn: as text and as a picture. Nothing here knows TensorFlow."""

from __future__ import annotations

import os

from tfdist.records import charts
from tfdist.strategies.pipeline.schedule import WHOLE, Schedule, Slot, Task

_WIDTH = 100


def text(schedule: Schedule, costs: list[float] | None = None, width: int = _WIDTH) -> str:
    """Returns one line for each device, time from left to right.

    A forward pass is the number of its microbatch and dots, a backward pass the number and
    dashes, waiting is blank. Numbers are written with their last digit; a whole batch is a "w".
    """
    slots = schedule.timeline(costs)
    makespan = max(slot.end for slot in slots)
    # Whole columns for a unit of time where they fit: equal tasks then look equal.
    scale = width / makespan
    if costs is None and scale > 1:
        scale = float(int(scale))
    lines = []
    for device in range(schedule.num_devices):
        line = [" "] * round(makespan * scale)
        for slot in slots:
            if slot.device == device:
                _write(line, slot, scale)
        lines.append(f"stage {device} |{''.join(line)}|")
    return "\n".join(lines)


def _write(line: list[str], slot: Slot, scale: float) -> None:
    start, end = round(slot.start * scale), round(slot.end * scale)
    if start >= len(line):
        return
    for column in range(start + 1, min(end, len(line))):
        line[column] = "." if slot.task.is_forward else "-"
    line[start] = _label(slot.task)[-1]


def _label(task: Task) -> str:
    return "w" if task.microbatch == WHOLE else str(task.microbatch)


def draw(
    schedule: Schedule, path: str | os.PathLike, title: str, costs: list[float] | None = None
) -> None:
    """Writes the chart as a PNG.

    Raises:
        OptionError: the folder is missing, or the name does not end in .png.
        EngineMissingError: matplotlib is not installed.
    """
    target = charts.checked(path)
    slots = schedule.timeline(costs)
    figure = charts.figure(12, 1.2 + 0.6 * schedule.num_devices)
    axes = figure.add_subplot()
    chunks_on = [schedule.device_of.count(device) for device in range(schedule.num_devices)]
    for slot in slots:
        task = slot.task
        turn = schedule.device_of[: task.chunk].count(slot.device)
        # Later chunks of a device are darker.
        shade = 0.45 + 0.4 * turn / chunks_on[slot.device]
        color = (1 - shade, 1 - shade / 2, 1.0) if task.is_forward else (1 - shade / 2, 1.0, 0.6)
        axes.barh(
            slot.device,
            slot.end - slot.start,
            left=slot.start,
            height=0.8,
            color=color,
            edgecolor="white",
            linewidth=0.8,
        )
        if len(slots) <= 400:
            middle = (slot.start + slot.end) / 2
            axes.text(middle, slot.device, _label(task), ha="center", va="center", fontsize=8)
    axes.set_yticks(range(schedule.num_devices), [f"stage {d}" for d in range(len(chunks_on))])
    axes.invert_yaxis()
    axes.set_xlim(0, max(slot.end for slot in slots))
    whole = ", w: whole batch" if schedule.whole else ""
    axes.set_xlabel(f"time (blue: forward, green: backward; number: microbatch{whole})")
    axes.set_title(title)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    charts.save(figure, target)
