"""``shard``: the bytes that a replica holds, and what a step costs."""

from __future__ import annotations

from typing import Any

from benchmarks import steps_in_turn
from benchmarks.pairs import FULL, QUICK, WORKERS, alone, command, environ, events, paired
from tfdist.launch import mpi, tf_cluster
from tfdist.launch.supervisor import Job

# shard -> a target and the strategies. A step may take 1.05 times as long as with whole slots; what
# gathers weights twice, and computes twice, has no target.
_STEPS = {
    "optimizer": (0.952, ("horovod", "multi_worker", "mirrored")),
    "weights": (None, ("horovod", "multi_worker")),
}


def run(quick: bool = False) -> list[dict[str, Any]]:
    size = QUICK if quick else FULL
    rows = []
    for shard, (target, names) in _STEPS.items():
        for name in names:
            job = _job(name, shard, size.steps, size.pairs)
            work = f"{name} step, 2 replicas, shard={shard!r}"
            rows.append(paired(work, job, size, quick, target))
    [slots] = events(_job("horovod", "optimizer", 2, 1), "slots")
    megabytes = [slots["whole"] / 2**20, max(slots["parts"]) / 2**20]
    rows.append(steps_in_turn.row("MB of Adam's slots on one of 2 replicas", *megabytes, 1.96))
    return [*rows, *_peaks(quick), _gpt()]


def _gpt() -> dict[str, Any]:
    """The GPT of the examples on one device, and on that device of rank 0 that holds most."""
    [whole] = events(alone("bytes_gpt"), "bytes")
    grid = mpi.job(command("bytes_gpt", "grid"), workers=WORKERS, environ=environ())
    [divided] = events(grid, "bytes")
    most = [max(event["most"].values()) / 1e6 for event in (whole, divided)]
    work = "MB on a device in a step of gpt_grid: 2 ranks, 2 stages, slots divided"
    return steps_in_turn.row(work, *most, 2.0)


def _peaks(quick: bool) -> list[dict[str, Any]]:
    """Returns the peak memory of a rank, in units of one of 16 layers' weights."""
    width = 512 if quick else 3072  # Smaller tensors stay with the allocator when they are freed.
    peaks = {}
    for shard in ("none", "optimizer", "weights"):
        job = mpi.job(
            command("memory_shard", shard, width),
            workers=WORKERS,
            environ=environ() | {"MALLOC_MMAP_THRESHOLD_": "1000000"},
        )
        peaks[shard] = max(event["later"] for event in events(job, "peak"))
    # 34: half of weights, gradients and slots, and two layers' weights; 10 % more may be held.
    return [
        {
            "work": f"peak memory of a rank, shard={shard!r}, layers' weights",
            "baseline": round(peaks["none"], 3),
            "ours": round(peaks[shard], 3),
            "ratio": round(peaks["none"] / peaks[shard], 3),
            "target": round(peaks["none"] / (1.1 * 34), 3) if shard == "weights" else None,
        }
        for shard in ("optimizer", "weights")
    ]


def _job(name: str, *arguments: int | str) -> Job:
    if name == "mirrored":
        return alone("pair_shard", name, *arguments)
    launcher = mpi if name == "horovod" else tf_cluster
    return launcher.job(command("pair_shard", name, *arguments), workers=WORKERS, environ=environ())
