"""Horovod's own timeline (HOROVOD_TIMELINE) beside the traces: what it negotiates, and when.

Rank 0 writes it for all, on its clock, for the whole training: a tensor is a process in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.errors import DataError, read_json

if TYPE_CHECKING:
    from tfdist.traces.report import Report

# Processes of the ranks come first.
_FIRST = 1_000_000


def events(report: Report, path: Path) -> Iterator[dict[str, Any]]:
    """Yields what it has of the traced steps, on the clock of the report.

    Raises:
        DataError: there is none, or it is damaged.
    """
    clock_us = report.traces[0].clock_ns / 1000
    begun = report.begun_ns / 1000
    ended = report.traces[0].ended / 1000
    try:
        own = _read(path)
        start = next(own)["args"]["start_time_since_epoch_in_micros"] - clock_us - begun
        # An event that ends names no begin: of each process it is the last one that began.
        open_in: dict[int, int] = {}
        for event in own:
            moved = event | {"pid": _FIRST + event["pid"]}
            if event["ph"] == "M":
                if "name" in event["args"]:
                    moved["args"] = {"name": f"Horovod: {event['args']['name']}"}
                yield moved
                continue
            moved["ts"] = event["ts"] + start
            is_end = event["ph"] == "E"
            depth = open_in.get(event["pid"], 0)
            if depth if is_end else 0 <= moved["ts"] <= ended - begun:
                open_in[event["pid"]] = depth + {"B": 1, "E": -1}.get(event["ph"], 0)
                yield moved
    except (OSError, ValueError, LookupError, TypeError, StopIteration) as error:
        raise DataError(
            f"{path} must be the timeline that Horovod wrote beside this trace",
            received=f"an error: {error or type(error).__name__}",
            mend="Put it back, or trace the steps again without HOROVOD_TIMELINE",
        ) from None


def _read(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the events of a file, which has no end where a job was killed."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            text = line.strip().lstrip("[").rstrip("]").rstrip(",")
            if text:
                yield from read_json(f"[{text}]")
