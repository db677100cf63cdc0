"""All ranks in one file for Perfetto and chrome://tracing, on one clock.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.errors import DataError, OptionError, read_json
from tfdist.records.replacing import replacing
from tfdist.traces.rank import Operations, RankTrace
from tfdist.traces.report import Report
from tfdist.traces.shares import PARTS, parts_of

# In the file: processes of the ranks come before those of Horovod's timeline.
_FIRST_TENSOR = 1_000_000


def check(path: str | os.PathLike) -> None:
    """Raises OptionError: the folder is missing, or the name does not end in .json.gz."""
    if not Path(path).name.endswith(".json.gz") or not Path(path).parent.is_dir():
        raise OptionError(
            "--perfetto must be a .json.gz file in a folder that exists",
            received=os.fspath(path),
            mend="Name such a file, and make its folder first",
        )


def write(report: Report, path: Path) -> list[str]:
    """Writes the file, gzipped, whole or not at all; a rank is a process in it.

    Returns:
        Lines on what is not in it.

    Raises:
        WriteError: it cannot be written.
        DataError: Horovod's timeline is not what it wrote.
    """
    lacking = []
    timeline = report.traces[0].notes.get("horovod_timeline")
    if timeline and not Path(timeline).is_file():
        lacking = [f"Horovod's timeline is not in it: there is no file {timeline}"]
        timeline = None
    with replacing(path) as partial, gzip.open(partial, "wt", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = ""
        own = _of_horovod(report, Path(timeline)) if timeline else ()
        for event in itertools.chain(_events(report), own):
            file.write(separator + json.dumps(event))
            separator = ",\n"
        file.write("\n]}\n")
    return lacking


def _events(report: Report) -> Iterator[dict[str, Any]]:
    begun = report.begun_ns
    for trace, shift in zip(report.traces, report.meetings.shifts, strict=True):
        process = {"pid": trace.rank}
        name = f"rank {trace.rank} on {trace.notes['host']}"
        yield {"ph": "M", "name": "process_name", **process, "args": {"name": name}}
        yield {
            "ph": "M",
            "name": "process_sort_index",
            **process,
            "args": {"sort_index": trace.rank},
        }
        row = 0
        for title, made in _rows(report, trace):
            # Bars in one row must not overlap: what does goes to further rows.
            lanes = _lanes(made.times)
            for lane in range(int(lanes.max(initial=0)) + 1):
                thread = {**process, "tid": row + lane}
                yield {"ph": "M", "name": "thread_name", **thread, "args": {"name": title}}
            starts = (made.times[:, 0] + shift - begun) / 1000
            lengths = (made.times[:, 1] - made.times[:, 0]) / 1000
            for index, number in enumerate(made.which):
                of, kind = made.labels[number]
                yield {
                    "ph": "X",
                    "name": of,
                    "cat": kind,
                    "ts": round(float(starts[index]), 3),
                    "dur": round(float(lengths[index]), 3),
                    "pid": trace.rank,
                    "tid": row + int(lanes[index]),
                }
            row += int(lanes.max(initial=0)) + 1


def _rows(report: Report, trace: RankTrace) -> Iterator[tuple[str, Operations]]:
    labels = [
        (f"step {first}" if first == last else f"steps {first} to {last}", "step")
        for first, last in trace.steps
    ]
    yield "steps", Operations(trace.executions, np.arange(len(labels)), labels)
    parts = parts_of(trace, report.meetings)
    which = np.repeat(np.arange(len(PARTS)), [len(parts[name]) for name in PARTS])
    times = np.concatenate([parts[name] for name in PARTS])
    yield "where the time goes", Operations(times, which, [(of, "") for of in PARTS.values()])
    yield "compute", trace.compute
    yield "communication", trace.communication
    yield "input", trace.inputs


def _lanes(times: np.ndarray) -> np.ndarray:
    """Returns for each interval the first row that is free when it begins."""
    lanes = np.zeros(len(times), int)
    free: list[float] = []
    for index in np.argsort(times[:, 0], kind="stable"):
        begun, ended = times[index]
        lane = next((number for number, until in enumerate(free) if until <= begun), len(free))
        if lane == len(free):
            free.append(ended)
        free[lane] = ended
        lanes[index] = lane
    return lanes


def _of_horovod(report: Report, path: Path) -> Iterator[dict[str, Any]]:
    """Yields what Horovod's own timeline has of the traced steps, on the clock of the report.

    Rank 0 writes it for all (HOROVOD_TIMELINE), on its clock, for the whole training: what is
    negotiated, and when. A tensor is a process in it.

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
            moved = event | {"pid": _FIRST_TENSOR + event["pid"]}
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
