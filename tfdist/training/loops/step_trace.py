"""Traces of some steps by TensorFlow's profiler, and of chosen ones with marks of its own."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist.errors import OptionError, cannot_write
from tfdist.keras.steps import steps_per_execution
from tfdist.traces import places
from tfdist.training.engine.binding import binding_of
from tfdist.training.engine.collective import Collective

# The first steps trace the model and fill buffers.
_FIRST, _STEPS = 10, 5


class Profile(tf.keras.callbacks.Callback):
    """Traces steps 11 to 15 of the first epoch of a fit; of a shorter one its last steps.

    Args:
        folder: where TensorBoard's Profile page looks, in ``plugins/profile``.
        steps: that callbacks are told of in an epoch.
    """

    def __init__(self, folder: str, steps: int):
        super().__init__()
        self._folder = folder
        self._first = max(0, min(_FIRST, steps - _STEPS))
        self._last = min(self._first + _STEPS, steps) - 1
        self._is_over = self._is_on = False

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        if batch >= self._first and not (self._is_on or self._is_over):
            start_profiler(self._folder)
            self._is_on = True

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if batch >= self._last:
            self._stop()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self._stop()

    def on_train_end(self, logs: dict | None = None) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._is_on:
            self._is_on, self._is_over = False, True
            tf.profiler.experimental.stop()


class StepTrace(tf.keras.callbacks.Callback):
    """Among the callbacks of every rank: traces steps of the first epoch of a fit.

    Keras marks the steps of its own loop alone, and an execution of several as one: so each
    execution is marked here, and how many steps it had is noted beside the trace. The profiler
    starts one execution earlier, where there is one: ranks do not start it at the same time.

    Args:
        folder: returns where TensorBoard's page Profile looks, in ``plugins/profile``.
        steps: first and last, counted from 1.
        strategy: its name, for the notes.
        writing: returns what encloses the writing of a file.
    """

    def __init__(
        self,
        folder: Callable[[], Path],
        steps: tuple[int, int],
        strategy: str,
        writing: Callable[[], contextlib.AbstractContextManager],
    ):
        super().__init__()
        self._folder = folder
        self._first, self._last = steps
        self._strategy = strategy
        self._writing = writing
        self._mark: Any = None
        self._begun = 1
        self._executions: list[tuple[int, int]] = []
        self._temporary: tempfile.TemporaryDirectory | None = None
        self._length = 1
        self._is_over = False

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._length = steps_per_execution(self.model)

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        step = self._begun = batch + 1
        # A resumed epoch may begin after the last one.
        if self._is_over or (self._temporary is None and step > self._last):
            return
        # The coming execution has as many steps as the one before it.
        if self._temporary is None and step + self._length >= self._first:
            self._start()
        if self._temporary is not None and step + self._length > self._first:
            self._mark = tf.profiler.experimental.Trace(
                "train", step_num=batch, tfdist_step=step, _r=1
            )
            self._mark.__enter__()

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self._length = batch + 2 - self._begun
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None
            self._executions.append((self._begun, batch + 1))
        if batch + 1 >= self._last and self._executions:
            self._stop()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        is_first = not self._is_over
        self._stop()
        self._is_over = True
        if is_first and not self._executions and self._job.is_chief:
            asked = f"{self._first} to {self._last}"
            print(f"tfdist: no step was traced: this epoch had none of {asked}", flush=True)

    def on_train_end(self, logs: dict | None = None) -> None:
        self._stop()

    def _start(self) -> None:
        run = places.run_of(self._folder())
        try:
            run.mkdir(parents=True, exist_ok=True)
            # One that was killed had this rank's name: a rank traces once at a time.
            unfinished = places.unfinished_of(self._job.process)
            places.remove_unfinished(self._folder(), unfinished)
            self._temporary = tempfile.TemporaryDirectory(dir=run, prefix=unfinished)
        except OSError as error:
            raise cannot_write(run, error) from error
        try:
            start_profiler(self._temporary.name)
        except OptionError:
            self._is_over = True
            self._temporary.cleanup()
            raise

    def _stop(self) -> None:
        if self._temporary is None or self._is_over:
            return
        self._is_over = True
        try:
            with self._writing(), self._temporary as temporary:
                tf.profiler.experimental.stop()
                if self._executions:
                    self._keep(Path(temporary))
        except (OSError, tf.errors.OpError) as error:
            raise cannot_write(places.run_of(self._folder()), error) from error

    def _keep(self, temporary: Path) -> None:
        job, config = self._job, tf.config
        (made,) = temporary.rglob("*.xplane.pb")
        run = temporary.parent
        notes = {
            "strategy": self._strategy,
            "horovod_timeline": self._timeline() if job.process == 0 else None,
            "devices": len(
                config.list_logical_devices("GPU") or config.list_logical_devices("CPU")
            ),
            "rank": job.process,
            "ranks": job.num_processes,
            "host": socket.gethostname(),
            "executions": self._executions,
            "layers": sorted({layer.name for layer in _layers(self.model)}),
        }
        (temporary / "notes").write_text(json.dumps(notes) + "\n")
        os.replace(made, places.events_of(run, job.process))
        os.replace(temporary / "notes", places.notes_of(run, job.process))

    @property
    def _job(self) -> Collective:
        return binding_of(self.model, "StepTrace").collective

    def _timeline(self) -> str | None:
        """Returns where Horovod itself writes what it does, if it does."""
        path = os.environ.get("HOROVOD_TIMELINE")
        return os.path.abspath(path) if path and self._strategy == "horovod" else None


def _layers(model: Any) -> list[Any]:
    """Returns the layers of a model and of models within it."""
    found = []
    for layer in getattr(model, "layers", []):
        found += [layer, *_layers(layer)]
    return found


def start_profiler(folder: str) -> None:
    """Starts TensorFlow's profiler. Raises OptionError: it runs already."""
    try:
        tf.profiler.experimental.start(folder)
    except tf.errors.AlreadyExistsError:
        raise OptionError(
            "profile must trace alone, as a process has one profiler",
            received="one that runs already, such as that of TensorBoard(profile_batch=...)",
            mend="Leave profile_batch out, or profile",
        ) from None
