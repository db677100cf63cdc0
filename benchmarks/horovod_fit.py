"""Training with tfdist against scripts written by hand: steps per second, ratios of pairs.

Whole programs are compared in turn, each in processes of its own. The overhead of a step, where a
hundredth counts, is measured by fits in turn within one job.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine import QUIET_SHARE, OthersWatch, of_ended_children, wait_until_quiet
from tfdist.launch import local, mpi, programs, supervisor
from tfdist.launch.supervisor import Job

_ROOT = Path(__file__).parents[1]
_WORKERS = 2
_ATTEMPTS = 3
# A step may take 1.02 times as long as the best one by hand.
_STEP_TARGET = 0.98


def run(quick: bool = False) -> list[dict]:
    """Returns one row for each kind of work: work, baseline and ours (steps/s), ratio, target.

    ``ratios`` holds those of the pairs that count: pairs during which other programs took more
    than a twenty-fifth of the cores are measured anew, twice at most, and dropped as long as any
    other is left. ``others`` is the largest share that they took in a pair that counts.
    """
    size = _Size(8, 2, 1, 1) if quick else _Size(40, 6, 5, 12)
    return [
        *_whole_programs(size, quick),
        _paired("horovod step, 2 ranks", _on_ranks, "pair_horovod", size, quick),
        _paired("mirrored step, 2 CPUs", _alone, "pair_mirrored", size, quick),
        _paired("single step", _alone, "pair_single", size, quick),
    ]


class _Size(NamedTuple):
    steps: int
    epochs: int
    rounds: int
    pairs: int


def _whole_programs(size: _Size, quick: bool) -> list[dict]:
    naive = _as_documented("naive_horovod", size.steps, size.epochs)
    two = _on_ranks("tfdist_horovod", size.steps, size.epochs)
    one = _alone("tfdist_horovod", size.steps, size.epochs, 0)
    rounds = [[_speed(job, quick) for job in (naive, two, one)] for _ in range(size.rounds)]
    # A step of two ranks is the work of two steps: efficiency is the ratio of the steps.
    named = {
        "horovod fit, 2 ranks, naive script": ("naive", 1.45),
        "horovod fit, 2 ranks, efficiency": ("one", 0.88),
    }
    rows = []
    for work, (against, target) in named.items():
        pairs = []
        for naive_run, two_run, one_run in rounds:
            baseline = naive_run if against == "naive" else one_run
            others = max(baseline["others"], two_run["others"])
            pairs.append(_Pair(baseline["steps_per_s"], two_run["steps_per_s"], others))
        rows.append(_row(work, pairs, target))
    return rows


def _speed(job: Job, quick: bool) -> dict[str, float]:
    """Returns the speed of a program, measured while others were quiet where that was possible."""
    attempts = []
    for _ in range(1 if quick else _ATTEMPTS):
        if not quick:
            wait_until_quiet()
        with OthersWatch(of_ended_children) as others:
            [event] = _events(job, "speed")
        attempts.append({**event, "others": others.share})
        if others.share <= QUIET_SHARE:
            break
    return min(attempts, key=lambda attempt: attempt["others"])


def _paired(
    work: str, start: Callable[..., Job], program: str, size: _Size, quick: bool
) -> dict[str, Any]:
    job = start(program, size.steps, size.pairs)
    pairs: list[_Pair] = []
    for _ in range(1 if quick else _ATTEMPTS):
        if not quick:
            wait_until_quiet()
        events = _events(job, "pair")
        pairs += [_Pair(event["baseline"], event["ours"], event["others"]) for event in events]
        if len(_quiet(pairs)) >= size.pairs / 2:
            break
    return _row(work, pairs, _STEP_TARGET)


class _Pair(NamedTuple):
    baseline: float
    ours: float
    others: float


def _quiet(pairs: list[_Pair]) -> list[_Pair]:
    return [pair for pair in pairs if pair.others <= QUIET_SHARE]


def _row(work: str, pairs: list[_Pair], target: float) -> dict[str, Any]:
    used = _quiet(pairs) or pairs
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


def _events(job: Job, name: str) -> list[dict[str, Any]]:
    found = []
    outcome = supervisor.run(
        job,
        on_line=lambda rank, stream, text: None,
        on_event=lambda rank, event: (
            found.append(event) if rank == 0 and event["event"] == name else None
        ),
    )
    if outcome.exit_code != 0:
        raise RuntimeError("\n".join([outcome.reason, *outcome.last_lines]))
    return found


def _command(program: str, *arguments: int) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.programs.{program}", *map(str, arguments)]


def _environ() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(_ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}


def _on_ranks(program: str, *arguments: int) -> Job:
    return mpi.job(_command(program, *arguments), workers=_WORKERS, environ=_environ())


def _alone(program: str, *arguments: int) -> Job:
    return local.job(_command(program, *arguments), environ=_environ())


def _as_documented(program: str, *arguments: int) -> Job:
    """The command line of Horovod's page on mpirun; rank 0 alone speaks."""
    env = programs.rank_environment(_environ())
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    mpirun = programs.find("mpirun", "the benchmark", env)
    options = ["-np", str(_WORKERS), "--bind-to", "none", "--map-by", "slot"]
    return Job(command=[mpirun, *options, *_command(program, *arguments)], env=env, world_size=1)
