"""Tables that do not fit in a step: a small DLRM, of whose tables a batch looks up a thousandth."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks import steps_in_turn
from benchmarks.pairs import FULL, QUICK, WORKERS, alone, command, environ, events, paired
from tfdist.launch import mpi
from tfdist.launch.supervisor import Job

_TARGET = 0.95
_ROWS, _QUICK_ROWS = 1_000_000, 10_000
# What a rank would send of four dense tables of 32 columns of float32, in MB, once.
_DENSE_MB_OF_A_ROW = 4 * 32 * 4 / 1e6


def run(quick: bool = False) -> list[dict[str, Any]]:
    size, rows = (QUICK, _QUICK_ROWS) if quick else (FULL, _ROWS)
    size = size._replace(steps=(size.steps + 2) // 3, pairs=(size.pairs + 1) // 3)
    found = []
    for name in ("single", "horovod"):
        for optimizer in ("adam", "sgd"):
            job = _job(name, optimizer, rows, size.steps, size.pairs)
            work = f"{name} step, four tables of {rows:,}, {optimizer}"
            found.append(paired(work, job, size, quick, _TARGET))
    [sent] = events(_job("horovod", "sgd", rows, size.steps, 1), "sent")
    work = f"MB that a rank sends in a step, four tables of {rows:,}, dense by hand"
    dense = rows * _DENSE_MB_OF_A_ROW
    return [*found, steps_in_turn.row(work, dense, sent["bytes"] / 1e6, rows / 20_000)]


def _job(name: str, *arguments: Any) -> Job:
    if name == "single":
        return alone("pair_tables", name, *arguments)
    # Not through shared memory: what is sent is read from the loopback device.
    env = environ() | {"OMPI_MCA_btl_tcp_if_include": "lo"}
    job = mpi.job(command("pair_tables", name, *arguments), workers=WORKERS, environ=env)
    by_tcp = ["self,tcp" if word == "self,vader" else word for word in job.command]
    return dataclasses.replace(job, command=by_tcp)
