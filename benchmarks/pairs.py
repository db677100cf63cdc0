"""Programs that train by hand and with tfdist, measured in pairs on a quiet machine."""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine import QUIET_SHARE, OthersWatch, of_ended_children, wait_until_quiet
from tfdist.launch import local, supervisor
from tfdist.launch.supervisor import Job

_ROOT = Path(__file__).parents[1]
WORKERS = 2
ATTEMPTS = 3
# A step may take 1.02 times as long as the best one by hand.
STEP_TARGET = 0.98
# Longest time without an epoch, on a busy machine too.
_SILENCE_S = 300.0


class Size(NamedTuple):
    """Steps of an epoch, epochs and rounds of whole programs, and pairs of fits in one job."""

    steps: int
    epochs: int
    rounds: int
    pairs: int


FULL, QUICK = Size(20, 4, 3, 6), Size(8, 2, 1, 1)


class Pair(NamedTuple):
    """Steps/s of both, and the share of the cores that other programs took meanwhile."""

    baseline: float
    ours: float
    others: float


def whole_programs(
    named: dict[str, tuple[Job, float | None]], ours: Job, size: Size, quick: bool
) -> list[dict[str, Any]]:
    """Returns a row for each program that ``ours`` is compared with: work -> (job, target)."""
    pairs: dict[str, list[Pair]] = {work: [] for work in named}
    for _ in range(size.rounds):
        mine = _speed(ours, quick)
        for work, (job, _) in named.items():
            theirs = _speed(job, quick)
            others = max(theirs["others"], mine["others"])
            pairs[work].append(Pair(theirs["steps_per_s"], mine["steps_per_s"], others))
    return [row(work, pairs[work], target) for work, (_, target) in named.items()]


def _speed(job: Job, quick: bool) -> dict[str, float]:
    """Returns the speed of a program, measured while others were quiet where that was possible."""
    attempts = []
    for _ in range(1 if quick else ATTEMPTS):
        if not quick:
            wait_until_quiet()
        with OthersWatch(of_ended_children) as others:
            [event] = events(job, "speed")
        attempts.append({**event, "others": others.share})
        if others.share <= QUIET_SHARE:
            break
    return min(attempts, key=lambda attempt: attempt["others"])


def paired(
    work: str, job: Job, size: Size, quick: bool, target: float | None = STEP_TARGET
) -> dict[str, Any]:
    """Returns the row of a job that fits by hand and with tfdist in turn."""
    found = quiet_events(job, "pair", size.pairs, quick)
    return row(work, [Pair(e["baseline"], e["ours"], e["others"]) for e in found], target)


def quiet_events(job: Job, name: str, count: int, quick: bool) -> list[dict[str, Any]]:
    """Returns what a job reports, run until half of ``count`` came while others were quiet."""
    found: list[dict[str, Any]] = []
    for _ in range(1 if quick else ATTEMPTS):
        if not quick:
            wait_until_quiet()
        found += events(job, name)
        if sum(event["others"] <= QUIET_SHARE for event in found) >= count / 2:
            break
    return found


def row(work: str, pairs: list[Pair], target: float | None) -> dict[str, Any]:
    """Returns one row of the result: medians over the pairs that others left alone."""
    used = [pair for pair in pairs if pair.others <= QUIET_SHARE] or pairs
    ratios = [pair.ours / pair.baseline for pair in used]
    return {
        "work": work,
        "baseline": round(statistics.median(pair.baseline for pair in used), 1),
        "ours": round(statistics.median(pair.ours for pair in used), 1),
        "ratio": round(statistics.median(ratios), 3),
        "target": target,
        "ratios": [round(ratio, 3) for ratio in ratios],
        "others": round(max(pair.others for pair in used), 3),
        "pairs_dropped": len(pairs) - len(used),
    }


def events(job: Job, name: str) -> list[dict[str, Any]]:
    """Returns the events called ``name`` of rank 0 of a job."""
    found = []
    outcome = supervisor.run(
        dataclasses.replace(job, stall_timeout_s=_SILENCE_S),
        on_line=lambda rank, stream, text: None,
        on_event=lambda rank, event: (
            found.append(event) if rank == 0 and event["event"] == name else None
        ),
    )
    if outcome.exit_code != 0:
        raise RuntimeError("\n".join([outcome.reason, *outcome.last_lines]))
    return found


def command(program: str, *arguments: int | str) -> list[str]:
    """Returns the command line of one of ``benchmarks/programs``."""
    return [sys.executable, "-m", f"benchmarks.programs.{program}", *map(str, arguments)]


def environ() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(_ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}


def alone(program: str, *arguments: int | str) -> Job:
    return local.job(command(program, *arguments), environ=environ())
