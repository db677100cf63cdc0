"""Elastic fits whose ranks are killed at random moments: ``elastic_moments.py [MOMENTS] [SEED]``.

Prints a row for each: the kills (seconds after both ranks were there, and where those ranks were
then), the exit code, seconds to the end, and the largest difference of the weights from those of a
training that nothing happened to. ``test_horovod_elastic.py`` tries a few of them.

Where a kill strikes within a meeting, the driver's own trace tells: TFDIST_MEETING_TRACE names a
file, see ``_Strike``.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_FIT = Path(__file__).with_name("elastic_fit.py")
_WORKERS, _MIN_WORKERS = 3, 1
_DEADLINE_S = 400


@dataclass(frozen=True)
class Moment:
    """When ranks are killed.

    Attributes:
        after: what has happened then: "start" (all processes are there), "ask" (a rank asks to
            meet), "connect" (Horovod connects them), "met", or "step" (one was done).
        number: how many times it has happened.
        delays: seconds from then to each kill.
    """

    after: str
    number: int
    delays: tuple[float, ...]


def draw(rng: random.Random) -> Moment:
    """Returns a random moment; half of them within meetings."""
    after = rng.choice(["start", "ask", "connect", "connect", "met", "step"])
    number = {"start": 1, "step": rng.randint(1, 40)}.get(after, rng.choice([1, 1, 2, 3, 4]))
    longest = {"start": 8.0, "ask": 0.3, "connect": 0.15, "met": 0.3, "step": 0.1}[after]
    first = rng.uniform(0.0, longest)
    second = (first + rng.uniform(0.1, 1.0),) if rng.random() < 0.4 else ()
    return Moment(after, number, (first, *second))


@dataclass
class Outcome:
    """What came of one: see the module's words."""

    moment: Moment
    code: int
    seconds: float
    weights: float | None
    struck: list[str] = field(default_factory=list)
    output: str = ""

    @property
    def survived(self) -> bool:
        return self.code == 0 and self.weights is not None and self.weights < 1e-6


def run(moment: Moment, folder: Path, rng: random.Random) -> Outcome:
    """Trains once, with kills; a second, later loss of a meeting comes where there is none."""
    trace = folder / "trace"
    trace.touch()
    slots = folder / "slots"  # Of which a small machine has fewer by itself.
    slots.write_text(f"#!/bin/sh\necho localhost:{_WORKERS}\n")
    slots.chmod(0o755)
    command = [
        *(sys.executable, "-m", "tfdist", "launch", "--workers", str(_WORKERS)),
        *("--min-workers", str(_MIN_WORKERS), "--start-timeout", "200"),
        *("--host-discovery", str(slots)),
        *("--", sys.executable, str(_FIT), str(folder)),
    ]
    if moment.after != "start" and moment.number > 1:  # So that they meet again.
        command.append("rank=2,step=14")
    environ = os.environ | {
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "OPTIONS": json.dumps({"threads": 1}),
        "TRACE": str(trace),
        "WORKERS": str(_WORKERS),
    }
    begun = time.monotonic()
    with open(folder / "output", "w+") as output:
        job = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        over = threading.Event()
        struck: list[str] = []
        killer = threading.Thread(
            target=_strike, args=(moment, folder, trace, rng, over, struck), daemon=True
        )
        killer.start()
        try:
            code = job.wait(_DEADLINE_S)
        except subprocess.TimeoutExpired:
            job.terminate()
            job.wait(60)
            code = -1
        over.set()
        killer.join()
        output.seek(0)
        text = output.read()
    weights = None
    if (folder / "found.json").exists():
        weights = json.loads((folder / "found.json").read_text())["weights"]
    return Outcome(moment, code, time.monotonic() - begun, weights, struck, text)


def _strike(
    moment: Moment,
    folder: Path,
    trace: Path,
    rng: random.Random,
    over: threading.Event,
    struck: list[str],
) -> None:
    while not _has_come(moment, trace):
        if over.wait(0.002):
            return
    at = time.monotonic()
    for delay in moment.delays:
        if over.wait(max(0.0, at + delay - time.monotonic())):
            return
        alive = _ranks(folder)
        if len(alive) <= _MIN_WORKERS:
            return
        victim = rng.choice(alive)
        last = [line.split()[0] for line in trace.read_text().splitlines()[-_WORKERS:]]
        victim.kill()
        struck.append(f"{time.monotonic() - at:.3f} s ({' '.join(last)})")


def _has_come(moment: Moment, trace: Path) -> bool:
    begun = [line.split()[0] for line in trace.read_text().splitlines()]
    if moment.after == "start":
        return begun.count("start") >= _WORKERS
    return begun.count(moment.after) >= moment.number


def _ranks(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            arguments = process.cmdline()
            if str(_FIT) in arguments[1:2] and str(folder) in arguments:
                found.append(process)
        except psutil.Error:
            continue
    return sorted(found, key=lambda process: process.pid)


def main(moments: int, seed: int) -> None:
    print("| kills | strike at | exit code | seconds | weights differ by |")
    print("| --- | --- | --- | --- | --- |")
    failed = 0
    for number in range(moments):
        rng = random.Random(seed * 1000 + number)
        moment = draw(rng)
        with tempfile.TemporaryDirectory() as folder:
            outcome = run(moment, Path(folder), rng)
        delays = ", ".join(f"{delay:.2f}" for delay in moment.delays)
        print(
            f"| {moment.after} {moment.number} + {delays} s | {'; '.join(outcome.struck)} "
            f"| {outcome.code} | {outcome.seconds:.1f} | {outcome.weights} |",
            flush=True,
        )
        if not outcome.survived:
            failed += 1
            print(outcome.output, file=sys.stderr, flush=True)
    print(f"{moments - failed} of {moments} were survived")
    sys.exit(min(failed, 1))


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    main(*(given + [50, 1][len(given) :]))
