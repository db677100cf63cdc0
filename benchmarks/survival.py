"""What each strategy survives: real faults to real trainings, which then resume.

Each fault strikes ``tfdist train`` from outside, in its second epoch. Measured are the seconds
until the command has ended, with all its processes, and whether the resumed training reaches the
weights of an unbroken one.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.table import Table

from tfdist import topology
from tfdist.cli import saved_weights
from tfdist.strategies import REGISTRY, Spec

_MODEL = f"{Path(__file__).parent / 'programs' / 'slow_model.py'}:model_fn"
_STALL_TIMEOUT_S = 10
# Past the checkpoint of the first epoch, whose writing has a longer deadline.
_INTO_EPOCH_S = 0.5
_TIMEOUT_S = 300
_TOLERANCE = 1e-5
# What a row shows -> strategy, options of its own. All but those whose shards are of clients.
TRAININGS: dict[str, tuple[str, tuple[str, ...]]] = {
    **{name: (name, ()) for name in REGISTRY if name != "federated"},
    "horovod, shard=weights": ("horovod", ("shard=weights",)),
    "multi_worker, shard=optimizer": ("multi_worker", ("shard=optimizer",)),
    "pipeline, replicas=horovod": (
        "pipeline",
        ("stages=2", "microbatches=2", "replicas=horovod", "shard=optimizer"),
    ),
    "mesh, replicas=horovod": ("mesh", ("model=2", "replicas=horovod", "shard=optimizer")),
}


def run(quick: bool = False) -> list[dict]:
    """Returns rows: strategy, fault, exit_code, seconds, said, weights_equal."""
    with tempfile.TemporaryDirectory(prefix="tfdist-survival-") as folder:
        root = Path(folder)
        shards = _write_shards(root / "shards")
        rows = []
        for name in ("single",) if quick else TRAININGS:
            place = root / name.replace(", ", "-")
            unbroken = _Training(name, shards, place / "unbroken")
            assert unbroken.finish() == 0, unbroken.said()
            for fault, strike in FAULTS.items():
                if strike is _kill_last and unbroken.rank == 0:
                    continue  # It is the first, too.
                rows.append(_measure(name, fault, shards, place / fault, unbroken))
        return rows


def table(rows: list[dict]) -> Table:
    """Returns what the command prints of the rows."""
    shown = Table(title="faults: what happens, and what is lost", title_justify="left")
    for column in ("strategy", "fault", "exit code", "seconds", "weights equal"):
        shown.add_column(column, overflow="fold")
    for row in rows:
        equal = {True: "yes", False: "NO", None: "asynchronous"}[row["weights_equal"]]
        seconds = "on resume" if row["seconds"] is None else f"{row['seconds']:.1f}"
        cells = (row["strategy"], row["fault"], str(row["exit_code"]), seconds, equal)
        shown.add_row(*cells)
    return shown


def _processes(spec: Spec, own: tuple[str, ...]) -> tuple[list[str], int]:
    """Returns options of tfdist train, and the rank that is struck: the last one."""
    if spec.has_servers:  # The chief, two workers, and a server.
        return ["--workers", "2", "--ps", "1"], 3
    if spec.launchers or "replicas=horovod" in own:
        workers, last, chosen = ["--workers", "2"], 1, own
    else:
        workers, last = [], 0
        chosen = tuple(f"{name}={value}" for name, value in spec.example.items())
    return workers + [word for each in chosen for word in ("-o", each)], last


class _Training:
    """``tfdist train`` in one folder."""

    def __init__(self, name: str, shards: Path, folder: Path):
        strategy, own = TRAININGS[name]
        options, self.rank = _processes(REGISTRY[strategy], own)
        self.shards, self.folder = shards, folder
        folder.parent.mkdir(exist_ok=True)
        self._error = folder.with_suffix(".stderr")
        self._printed = folder.with_suffix(".stdout")
        self._command = [
            *(sys.executable, "-m", "tfdist", "train", "--strategy", strategy, *options),
            *("--model", _MODEL, "--data", str(shards), "--output", str(folder), "--resume"),
            *("--epochs", "3", "--global-batch-size", "20", "--checkpoint-every", "3"),
            *("--stall-timeout", str(_STALL_TIMEOUT_S)),
        ]

    def start(self) -> None:
        with open(self._error, "w") as error, open(self._printed, "w") as printed:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=error,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )

    def start_into_second_epoch(self) -> None:
        self.start()
        deadline = time.monotonic() + _TIMEOUT_S
        while "epoch 1/" not in self._printed.read_text():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, "the first epoch does not end"
            time.sleep(0.05)
        time.sleep(_INTO_EPOCH_S)

    def wait(self) -> int:
        return self.process.wait(timeout=_TIMEOUT_S)

    def finish(self) -> int:
        self.start()
        return self.wait()

    def said(self) -> str:
        """The lines that tell the cause, without the last lines of a rank."""
        lines = self._error.read_text() + self._printed.read_text()
        return " ".join(line for line in lines.splitlines() if line.startswith("tfdist: "))

    def rank_process(self, rank: int) -> psutil.Process:
        for process in psutil.Process(self.process.pid).children(recursive=True):
            is_rank = process.cmdline()[1:3] == ["-m", "tfdist.runs.train_rank"]
            if is_rank and topology.from_environ(process.environ()).rank == rank:
                return process
        raise AssertionError(f"no rank {rank}")

    @property
    def model(self) -> Path:
        return self.folder / "model.keras"


# Faults ------------------------------------------------------------------------------------------
# Each strikes a training in its second epoch, and returns what mends it before it is resumed.


def _kill_first(training: _Training) -> None:
    training.rank_process(0).kill()


def _kill_last(training: _Training) -> None:
    training.rank_process(training.rank).kill()


def _stop(training: _Training) -> None:
    training.rank_process(training.rank).suspend()


def _damage_shard(training: _Training) -> Callable[[], Any]:
    shard = sorted(training.shards.glob("train-*"))[-1]
    sound = shard.read_bytes()
    damaged = bytearray(sound)
    damaged[len(sound) // 2] ^= 0xFF
    shard.write_bytes(damaged)
    return lambda: shard.write_bytes(sound)


def _damage_checkpoint(training: _Training) -> None:
    """Ctrl-C, and the newest checkpoint is cut short: the resumed training must notice."""
    training.process.send_signal(signal.SIGINT)
    training.wait()
    newest = max(training.folder.glob("checkpoints/*.data-*"), key=lambda p: p.stat().st_mtime)
    newest.write_bytes(newest.read_bytes()[:-300])
    training.start()


def _fill_disk(training: _Training) -> None:
    """No file of rank 0 may grow beyond 1500 bytes, which a checkpoint does."""
    pid = training.rank_process(0).pid
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1500, hard))


FAULTS: dict[str, Callable[[_Training], Callable[[], Any] | None]] = {
    "kill of rank 0": _kill_first,
    "kill of the last rank": _kill_last,
    f"SIGSTOP, deadline {_STALL_TIMEOUT_S} s": _stop,
    "Ctrl-C": lambda training: training.process.send_signal(signal.SIGINT),
    "damaged shard": _damage_shard,
    "full disk": _fill_disk,
    "damaged checkpoint": _damage_checkpoint,
}


def _measure(
    name: str, fault: str, shards: Path, folder: Path, unbroken: _Training
) -> dict[str, Any]:
    strike = FAULTS[fault]
    training = _Training(name, shards, folder)
    training.start_into_second_epoch()
    begun = time.monotonic()
    mend = strike(training)
    code = training.wait()
    # A damaged checkpoint hurts nobody until a training resumes from it.
    seconds = None if strike is _damage_checkpoint else time.monotonic() - begun
    said = training.said()
    if mend is not None:
        mend()
    if code != 0:
        assert training.finish() == 0, training.said()
    difference = saved_weights.largest_difference(training.model, unbroken.model)
    is_asynchronous = REGISTRY[TRAININGS[name][0]].is_asynchronous
    return {
        "strategy": name,
        "fault": fault,
        "exit_code": code,
        "seconds": None if seconds is None else round(seconds, 2),
        "difference": difference,
        "weights_equal": None if is_asynchronous else difference <= _TOLERANCE,
        "said": said,
    }


def _write_shards(folder: Path) -> Path:
    from tfdist.records.writing.writer import write

    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 250)
    x = (rng.normal(size=(250, 8)) + y[:, None]).astype(np.float32)
    write((x, y), folder, split="train=20,validation=4,test=1", num_shards=2)
    return folder
