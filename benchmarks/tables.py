"""Tables that do not fit in a step: a small DLRM, of whose tables a batch looks up a thousandth."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.pairs import (
    FULL,
    QUICK,
    WORKERS,
    Pair,
    alone,
    command,
    environ,
    events,
    quiet_events,
    row,
)
from tfdist.launch import mpi
from tfdist.launch.supervisor import Job

_TARGET = 0.95
_ROWS, _QUICK_ROWS = 1_000_000, 10_000
# What a rank would send of four dense tables of 32 columns of float32, in MB, once.
_DENSE_MB_OF_A_ROW = 4 * 32 * 4 / 1e6


def run(quick: bool = False) -> list[dict[str, Any]]:
    size, rows = (QUICK, _QUICK_ROWS) if quick else (FULL, _ROWS)
    pairs = max(1, size.pairs // 3)
    found = []
    for name, optimizers in (("single", ("adam", "sgd")), ("horovod", ("adam", "sgd"))):
        for optimizer in optimizers:
            job = _job(name, optimizer, rows, size.steps // 4, pairs)
            events_ = quiet_events(job, "pair", pairs, quick)
            used = [Pair(e["baseline"], e["ours"], e["others"]) for e in events_]
            found.append(row(f"{name} step, four tables of {rows:,}, {optimizer}", used, _TARGET))
    [sent] = events(_job("horovod", "sgd", rows, size.steps // 4, 1), "sent")
    dense, ours = rows * _DENSE_MB_OF_A_ROW, sent["bytes"] / 1e6
    found.append(
        {
            "work": f"MB that a rank sends in a step, four tables of {rows:,}, dense by hand",
            "baseline": round(dense, 1),
            "ours": round(ours, 2),
            "ratio": round(dense / ours, 1),
            "target": rows / 20_000,
        }
    )
    return found


def _job(name: str, *arguments: Any) -> Job:
    if name == "single":
        return alone("pair_tables", name, *arguments)
    # Not through shared memory: what is sent is read from the loopback device.
    env = environ() | {"OMPI_MCA_btl_tcp_if_include": "lo"}
    job = mpi.job(command("pair_tables", name, *arguments), workers=WORKERS, environ=env)
    by_tcp = ["self,tcp" if word == "self,vader" else word for word in job.command]
    return dataclasses.replace(job, command=by_tcp)
