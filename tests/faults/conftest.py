"""One training that is broken again and again, and what must hold each time."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tfdist import topology
from tfdist.cli import saved_weights
from tfdist.records.writing.writer import write
from tfdist.training.checkpoints import checkpoint_files

EPOCHS, STEPS = 3, 10  # of 20 records
RESULTS = {
    *(".tfdist-run", "config.json", "curves.png", "history.csv", "resources.csv"),
    *("metrics.json", "model.keras"),
}


@pytest.fixture
def rng() -> random.Random:
    """Draws the steps at which faults strike; FAULTS_SEED repeats what failed."""
    seed = os.environ.get("FAULTS_SEED", str(random.SystemRandom().randrange(10**6)))
    print(f"FAULTS_SEED={seed}")
    return random.Random(seed)


@pytest.fixture(scope="session")
def model() -> str:
    return f"{Path(__file__).with_name('models.py')}:model_fn"


@pytest.fixture(scope="session")
def records() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 250)
    return (rng.normal(size=(250, 8)) + y[:, None]).astype(np.float32), y


def _write_shards(records: tuple[np.ndarray, np.ndarray], folder: Path) -> Path:
    write(records, folder, split="train=20,validation=4,test=1", num_shards=2)
    return folder


@pytest.fixture
def shards(records, traces, tmp_path) -> Path:
    """200 records to train on; each process of a job has the path, and so the token, in it."""
    return _write_shards(records, tmp_path / traces.token)


def ranks_among(processes: list[psutil.Process]) -> dict[int, psutil.Process]:
    """Returns rank -> its own process, of those that have begun."""
    begun = [p for p in processes if p.cmdline()[1:3] == ["-m", "tfdist.runs.train_rank"]]
    return {topology.from_environ(p.environ()).rank: p for p in begun}


@pytest.fixture
def ranks_of():
    """Returns the ranks that a process has started."""
    return lambda process: ranks_among(psutil.Process(process.pid).children(recursive=True))


class Training:
    """``tfdist train`` in one folder, as often as it takes; it always resumes."""

    def __init__(self, model: str, shards: Path, folder: Path, traces, options: tuple[str, ...]):
        self.folder = folder
        self._traces = traces
        #: Programs of the job that were seen to listen on more than the loopback interface.
        self.open_to_all: set[str] = set()
        self._error = folder.with_name("stderr")
        self._command = [
            *(sys.executable, "-m", "tfdist", "train", "--resume", "--model", model),
            *("--data", str(shards), "--output", str(folder), "--epochs", str(EPOCHS)),
            *("--global-batch-size", "20", "--checkpoint-every", "3", *options),
        ]

    # Ways to run it ------------------------------------------------------------------------------

    def run(
        self,
        code: int,
        words: list[str] = (),
        options: tuple[str, ...] = (),
        stdout: str | None = None,
        **mishap,
    ) -> str:
        """Runs it to its end; returns what it printed."""
        with self._popen(mishap, options, stdout) as process:
            printed, _ = process.communicate(timeout=150)
        self._check(process.returncode, code, words)
        return printed or ""

    def interrupted(self, place: str, number: signal.Signals, **mishap) -> None:
        """Sends it a signal when it is at ``place``, on rank 0."""
        with self._popen({"place": place, **mishap}) as process:
            if place == "import":
                self._wait_for_rank()
            else:
                assert any(line.endswith(f"at {place}\n") for line in process.stdout), self.error
                self.open_to_all |= self._traces.listening_on_all()
            process.send_signal(number)
            process.stdout.read()
            process.wait(timeout=60)
        if number is signal.SIGKILL:
            self._traces.wait_for(0)
            return
        words = {signal.SIGINT: "interrupted", signal.SIGTERM: "ended by SIGTERM"}[number]
        self._check(process.returncode, 128 + number, [words])

    def lost(self, killed: int, *, place: str = "epoch", **mishap) -> None:
        """Kills one of its ranks when a rank, else rank 0, is at ``place``."""
        with self._popen({"place": place, **mishap}) as process:
            assert any(line.endswith(f"at {place}\n") for line in process.stdout), self.error
            ranks_among(self._traces.alive())[killed].kill()
            process.stdout.read()
            process.wait(timeout=60)
        self._check(process.returncode, 137, [f"rank {killed} ended with exit code 137 (SIGKILL)"])

    def _popen(
        self, mishap: dict, options: tuple[str, ...] = (), stdout: str | None = None
    ) -> subprocess.Popen:
        environ = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
        if mishap:
            environ["MISHAP"] = json.dumps({"rank": 0, "after": 0, **mishap})
        with open(self._error, "w") as error:
            return subprocess.Popen(
                [*self._command, *options],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if stdout is None else open(stdout, "w"),
                stderr=error,
                text=True,
            )

    def _wait_for_rank(self) -> None:
        """Until a rank's own process has begun; the import of TensorFlow takes it seconds."""
        deadline = time.monotonic() + 60
        while not ranks_among(self._traces.alive()):
            assert time.monotonic() < deadline, self.error
            time.sleep(0.05)

    # What must hold ------------------------------------------------------------------------------

    @property
    def error(self) -> str:
        return self._error.read_text()

    def _check(self, found: int, code: int, words: list[str]) -> None:
        """No process, no half-written file, the right exit code, one clear line."""
        assert self._traces.alive() == []
        assert found == code, self.error
        # Keras warns of callbacks that write checkpoints; click ends a terminal's line with ^C; the
        # last lines of a rank that was killed have its number before them; of SIGTERM there is word
        # at once where ranks take their time.
        lines = [
            line
            for line in self.error.splitlines()
            if line and "is slow compared" not in line and line[0] != "["
            if not line.endswith("to write what they keep")
        ]
        assert [line[:8] for line in lines] == ["tfdist: "] * (1 if code else 0), self.error
        for word in words:
            assert word in self.error
        if self.folder.exists():
            names = {path.name for path in self.folder.iterdir()}
            assert names <= {*RESULTS, "checkpoints"}, names
            self.checkpoints()

    def checkpoints(self) -> list[int]:
        """Returns the steps of the checkpoints, which must all be whole."""
        names = {path.name for path in (self.folder / "checkpoints").glob("*")}
        names -= {"checkpoint", ".tfdist-lock"}
        whole = checkpoint_files.whole(names)
        assert names == {part for parts in whole.values() for part in parts}
        return [int(name.removeprefix("ckpt-")) for name in whole]

    def weights(self) -> dict[str, np.ndarray]:
        """Returns weights and optimizer slots of the model's file."""
        return saved_weights.read(self.folder / "model.keras")


@pytest.fixture
def training(model, shards, traces, tmp_path):
    def make(*options: str) -> Training:
        return Training(model, shards, tmp_path / "run", traces, options)

    return make


@pytest.fixture(scope="session")
def unbroken(model, records, tmp_path_factory):
    """Returns the weights of a training that met with nothing, on one process or on two.

    Two read the records in another order than one; which engine connects them makes no difference.
    """

    @functools.cache
    def weights(processes: int) -> dict[str, np.ndarray]:
        folder = tmp_path_factory.mktemp("unbroken")
        shards = _write_shards(records, folder / "shards")
        several = ("--strategy", "horovod", "--workers", str(processes))
        where = several if processes > 1 else ("--strategy", "single")
        training = Training(model, shards, folder / "run", None, where)
        with training._popen({}) as process:
            process.communicate(timeout=150)
        assert process.returncode == 0, training.error
        return training.weights()

    return weights
