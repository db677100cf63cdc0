"""Two workers of MultiWorkerMirroredStrategy: with tfdist and by hand."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.machine import QUIET_SHARE
from benchmarks.pairs import (
    FULL,
    QUICK,
    WORKERS,
    Size,
    alone,
    command,
    environ,
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
_NOTHING_MS = 0.001


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
    ]


def _feed(size: Size, quick: bool) -> dict[str, Any]:
    """The row of the feed, in milliseconds a step beyond plain tf.data; ratio: allowed / ours."""
    job = _on_workers("feed_multi_worker", _FEED_STEPS_PER_STEP * size.steps, size.pairs)
    found = quiet_events(job, "feed", size.pairs, quick)
    used = [event for event in found if event["others"] <= QUIET_SHARE] or found

    def beyond_plain(name: str) -> list[float]:
        return [max(event[name] - event["plain"], _NOTHING_MS) for event in used]

    ours = beyond_plain("ours")
    return {
        "work": f"multi_worker feed, ms a step beyond plain tf.data, at most {_FEED_MS:g}",
        "baseline": round(statistics.median(beyond_plain("by_hand")), 3),
        "ours": round(statistics.median(ours), 3),
        "ratio": round(_FEED_MS / statistics.median(ours), 3),
        "target": 1.0,
        "ratios": [round(_FEED_MS / each, 3) for each in ours],
        "others": round(max(event["others"] for event in used), 3),
        "pairs_dropped": len(found) - len(used),
    }


def _on_workers(program: str, *arguments: int | str) -> Job:
    return tf_cluster.job(command(program, *arguments), workers=WORKERS, environ=environ())
