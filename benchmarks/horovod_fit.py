"""Training with tfdist against scripts written by hand: steps per second, ratios of pairs.

Whole programs are compared in turn, each in processes of its own. The overhead of a step, where a
hundredth counts, is measured by fits in turn within one job.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.machine import QUIET_SHARE, OthersWatch, wait_until_quiet
from tfdist.launch import local, mpi, programs, supervisor
from tfdist.launch.supervisor import Job

_ROOT = Path(__file__).parents[1]
_WORKERS = 2
_ATTEMPTS = 3


def run(quick: bool = False) -> list[dict]:
    """Returns one row for each kind of work: work, baseline and ours (steps/s), ratio, target.

    ``ratios`` holds those of all pairs, ``others`` the largest share of the cores that other
    programs took during a measurement. A job during which they took more than a twenty-fifth is
    repeated, twice at most.
    """
    steps, epochs, rounds, pairs = (8, 2, 1, 1) if quick else (60, 6, 5, 12)
    bench = _Bench(patient=not quick)
    return [
        *_whole_programs(bench, steps, epochs, rounds),
        bench.paired("horovod step, 2 ranks", _on_ranks("pair_horovod", steps, pairs), 0.98),
        bench.paired("mirrored step, 2 CPUs", _alone("pair_mirrored", steps, pairs), 0.98),
        bench.paired("single step", _alone("pair_single", steps, pairs), 0.98),
    ]


def _whole_programs(bench: _Bench, steps: int, epochs: int, rounds: int) -> list[dict]:
    naive, ours, one = [], [], []
    for _ in range(rounds):
        naive += bench.speeds(_as_documented("naive_horovod", steps, epochs), "speed")
        ours += bench.speeds(_on_ranks("tfdist_horovod", steps, epochs), "speed")
        one += bench.speeds(_alone("tfdist_horovod", steps, epochs, 0), "speed")
    two, naive, one = ([event["steps_per_s"] for event in events] for events in (ours, naive, one))
    return [
        bench.row("horovod fit, 2 ranks, naive script", naive, two, 1.45),
        # A step of two ranks is the work of two steps: efficiency is the ratio of the steps.
        bench.row("horovod fit, 2 ranks, efficiency", one, two, 0.88),
    ]


class _Bench:
    """Runs jobs while the machine is quiet, and remembers how quiet it was."""

    def __init__(self, patient: bool):
        self._patient = patient
        self._others = 0.0

    def speeds(self, job: Job, event_name: str) -> list[dict[str, Any]]:
        """Returns the events of that name which rank 0 of the job emits.

        Raises:
            RuntimeError: the job failed; the message holds its last lines.
        """
        attempts = []
        for _ in range(_ATTEMPTS if self._patient else 1):
            if self._patient:
                wait_until_quiet()
            with OthersWatch() as others:
                found = _events(job, event_name)
            attempts.append((others.share, found))
            if others.share <= QUIET_SHARE:
                break
        share, found = min(attempts, key=lambda attempt: attempt[0])
        self._others = max(self._others, share)
        return found

    def paired(self, work: str, job: Job, target: float) -> dict:
        pairs = self.speeds(job, "pair")
        return self.row(
            work, [pair["baseline"] for pair in pairs], [pair["ours"] for pair in pairs], target
        )

    def row(self, work: str, baseline: list[float], ours: list[float], target: float) -> dict:
        ratios = [o / b for b, o in zip(baseline, ours, strict=True)]
        others, self._others = self._others, 0.0
        return {
            "work": work,
            "baseline": round(statistics.median(baseline), 1),
            "ours": round(statistics.median(ours), 1),
            "ratio": round(statistics.median(ratios), 3),
            "target": target,
            "ratios": [round(ratio, 3) for ratio in ratios],
            "others": round(others, 3),
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
