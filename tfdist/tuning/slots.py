"""Where trials run beside each other: each process with cores, or GPUs, of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfdist.errors import OptionError, spelt
from tfdist.launch import hosts, programs
from tfdist.topology.gpus import VISIBLE, visible_gpus

# After SIGTERM the ranks have 20 s for a checkpoint, and 110 s where they write one: see
# ``launch.supervisor``. After Ctrl-C they are ended at once.
_SECONDS_TO_END = {signal.SIGTERM: 125.0, signal.SIGINT: 20.0}
LONGEST_READ = 1 << 16
_PROGRAM = "tfdist.tuning.trial"


@dataclass(frozen=True)
class Slot:
    """What a trial has for itself: numbers of CPUs, and GPUs as CUDA names them; None: all."""

    cpus: tuple[int, ...] | None = None
    gpus: str | None = None


def divided(parallel: int, workers: int) -> list[Slot]:
    """Returns a slot for each of so many trials at a time.

    Args:
        workers: processes of a trial; where there is not a core for each of all, trials share them.

    Raises:
        OptionError: there are GPUs, and fewer.
    """
    gpus = visible_gpus()
    if gpus and len(gpus) < parallel:
        raise OptionError(
            "each trial that runs beside others must have a GPU of its own",
            received=f"{spelt('parallel', parallel)} with {len(gpus)} GPUs",
            mend=f"Give {spelt('parallel', len(gpus))}, or hide them: {VISIBLE}=-1",
        )
    each = len(gpus) // parallel
    has_cores = parallel > 1 and hosts.physical_cores() // parallel >= workers
    shares = hosts.shares(parallel) if has_cores else []
    return [
        Slot(
            tuple(shares[number]) if shares else None,
            ",".join(gpus[number * each : (number + 1) * each]) if each else None,
        )
        for number in range(parallel)
    ]


@dataclass
class Running:
    """A process of a trial, which tells a JSON object a line on ``process.stdout``.

    Attributes:
        slot: one that the place has given.
        process: a ``subprocess.Popen``, or what its place has for it.
    """

    number: int
    slot: Any
    process: Any
    last: dict[str, Any] = field(default_factory=dict)
    _part: bytes = b""

    def events(self) -> list[dict[str, Any]] | None:
        """Returns what it has told since; None at its end."""
        data = os.read(self.process.stdout.fileno(), LONGEST_READ)
        if not data:
            return None
        *lines, self._part = (self._part + data).split(b"\n")
        return [json.loads(line) for line in lines]


def start(number: int, request: dict[str, Any], slot: Slot, log: Path) -> Running:
    """Starts the program of ``trial``, which ends when this process does.

    Args:
        log: what it prints is added to this file.
    """
    env = os.environ | ({} if slot.gpus is None else {VISIBLE: slot.gpus})
    request = request | {"parent": os.getpid(), "cpus": slot.cpus}
    with log.open("ab") as printed:
        process = subprocess.Popen(
            [sys.executable, "-m", _PROGRAM, *programs.in_arguments(request)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=printed,
            start_new_session=True,  # Ctrl-C of a terminal is passed on by ``end``.
        )
    return Running(number, slot, process)


def end(every: Iterable[Running], number: signal.Signals) -> None:
    """Ends processes with a signal, after a limit by SIGKILL, and all that they have started."""
    every = list(every)
    for each in every:
        with contextlib.suppress(ProcessLookupError):
            each.process.send_signal(number)
    deadline = time.monotonic() + _SECONDS_TO_END[number]
    for each in every:
        try:
            # What it still tells must not fill the pipe and keep it from ending.
            each.process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            each.process.kill()  # The guard of its ranks ends these.
            each.process.communicate()
