"""Two workers of MultiWorkerMirroredStrategy: with tfdist and by hand."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.machine import QUIET_SHARE, wait_until_quiet
from benchmarks.pairs import (
    FULL,
    QUICK,
    WORKERS,
    Size,
    alone,
    command,
    environ,
    events,
    paired,
    quiet_events,
    whole_programs,
)
from tfdist.launch import tf_cluster
from tfdist.launch.supervisor import Job

# What the next batch may cost beyond plain tf.data.
_FEED_MS = 1.0
# A feed takes less than a millisecond a step: more of them than of fits.
_FEED_STEPS_PER_STEP = 5
# As tfdist's workers keep what a step frees.
_KEEPING_MEMORY = ":".join(
    f"glibc.malloc.{name}"
    for name in ("mmap_max=0", "trim_threshold=2147483647", "top_pad=134217728")
)


def run(quick: bool = False) -> list[dict]:
    """Returns one row for each kind of work; see ``horovod_fit.run``."""
    size = QUICK if quick else FULL
    fit = (size.steps, size.epochs)
    against = {
        "multi_worker fit, 2 workers, naive script": (_on_workers("naive_multi_worker", *fit), 1.0),
        "multi_worker fit, 2 workers, efficiency": (
            alone("tfdist_fit", "multi_worker", *fit, 0),
            0.80,
        ),
    }
    ours = _on_workers("tfdist_fit", "multi_worker", *fit)
    pair = _on_workers("pair_multi_worker", size.steps, size.pairs)
    return [
        *whole_programs(against, ours, size, quick),
        paired("multi_worker step, 2 workers", pair, size, quick),
        _feed(size, quick),
        _floor(size, quick),
    ]


def _floor(size: Size, quick: bool) -> dict[str, Any]:
    """The row of plain TensorFlow, in milliseconds of a step: alone, and on two workers."""
    keeping = environ() | {"GLIBC_TUNABLES": _KEEPING_MEMORY}
    jobs = {
        mode: tf_cluster.job(
            command("floor_multi_worker", mode, size.steps), workers=WORKERS, environ=keeping
        )
        for mode in ("alone", "whole")
    }
    found: dict[str, list[float]] = {mode: [] for mode in jobs}
    for _ in range(size.rounds):
        for mode, job in jobs.items():
            if not quick:
                wait_until_quiet()
            [event] = events(job, "floor")
            found[mode].append(event["ms"])
    ratios = [one / whole for one, whole in zip(found["alone"], found["whole"], strict=True)]
    medians = {mode: round(statistics.median(ms), 1) for mode, ms in found.items()}
    return {
        "work": "multi_worker, ms a step of plain TensorFlow: workers alone, and together",
        "baseline": medians["alone"],
        "ours": medians["whole"],
        "ratio": round(statistics.median(ratios), 3),
        "target": None,
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def _feed(size: Size, quick: bool) -> dict[str, Any]:
    """The row of the feed, in milliseconds a step; ratio: plain tf.data and what it may cost more,
    over what it costs."""
    job = _on_workers("feed_multi_worker", _FEED_STEPS_PER_STEP * size.steps, size.pairs)
    found = quiet_events(job, "feed", size.pairs, quick)
    used = [event for event in found if event["others"] <= QUIET_SHARE] or found
    ratios = [(event["plain"] + _FEED_MS) / event["ours"] for event in used]
    return {
        "work": f"multi_worker feed, ms a step, at most {_FEED_MS:g} beyond tf.data",
        "baseline": round(statistics.median(event["by_hand"] for event in used), 3),
        "ours": round(statistics.median(event["ours"] for event in used), 3),
        "plain": round(statistics.median(event["plain"] for event in used), 3),
        "ratio": round(statistics.median(ratios), 3),
        "target": 1.0,
        "ratios": [round(ratio, 3) for ratio in ratios],
        "others": round(max(event["others"] for event in used), 3),
        "pairs_dropped": len(found) - len(used),
    }


def _on_workers(program: str, *arguments: int | str) -> Job:
    return tf_cluster.job(command(program, *arguments), workers=WORKERS, environ=environ())
