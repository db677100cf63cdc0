"""What ranks tell of steps and epochs: that they go on, and what each epoch has led to."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tfdist.compat import import_tensorflow
from tfdist.launch.events import emit

tf = import_tensorflow()


def numbers(logs: Mapping[str, Any] | None) -> dict[str, float]:
    """Returns the numbers of Keras' ``logs``; a metric's of several values: name_0, name_1, ..."""
    found = {}
    for name, value in (logs or {}).items():
        values = np.ravel(value)
        names = [name] if values.size == 1 else [f"{name}_{n}" for n in range(values.size)]
        found |= dict(zip(names, map(float, values), strict=True))
    return found


class Alive(tf.keras.callbacks.Callback):
    """Tells the command now and then that steps go on.

    Args:
        event: of the steps that are done, counted from 1.
        between_s: seconds between two events, at least.
    """

    def __init__(self, event: Callable[[int], dict[str, Any]], between_s: float = 1.0):
        super().__init__()
        self._event, self._between_s = event, between_s
        self._told_at = 0.0

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if (now := time.monotonic()) - self._told_at >= self._between_s:
            self._told_at = now
            emit(self._event(batch + 1))

    on_test_batch_end = on_predict_batch_end = on_train_batch_end


class EpochRows(tf.keras.callbacks.Callback):
    """Keeps the numbers of each epoch, its seconds without those of its validation, its speed.

    Args:
        records: that an epoch computes on.
        stop_on_nan: whether to end a training whose loss is no finite number any more.

    Attributes:
        new_rows: one for each epoch.
        diverged: the last row, where it ended the training.
    """

    def __init__(self, records: int, *, stop_on_nan: bool):
        super().__init__()
        self._records = records
        self._stop_on_nan = stop_on_nan
        self.new_rows: list[dict[str, float]] = []
        self.diverged: dict[str, float] | None = None

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._begun_at = self._trained_at = time.perf_counter()
        self._batches = 0
        self._steps = self.params["steps"]  # A batch that grows makes them fewer.

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self._trained_at = time.perf_counter()
        self._batches = batch + 1

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        seconds = self._trained_at - self._begun_at
        row = {
            "epoch": epoch + 1,
            **numbers(logs),
            "seconds": round(seconds, 4),
            "samples_per_s": round(self.speed(), 1),
            **self.more(self._batches, seconds),
        }
        self.new_rows.append(row)
        self.keep(row)
        loss = row.get("loss", 0.0)
        if self._stop_on_nan and not math.isfinite(loss):  # The whole job's: all processes stop.
            self.diverged = row
            self.model.stop_training = True

    def speed(self) -> float:
        """Returns the records of a second of this epoch."""
        trained = self._records * self._batches / self._steps
        return trained / (self._trained_at - self._begun_at)

    def step_ms(self) -> float:
        """Returns the milliseconds of a step of this epoch."""
        return round(1000 * (self._trained_at - self._begun_at) / max(1, self._batches), 2)

    def more(self, batches: int, seconds: float) -> dict[str, float]:
        """Returns what else a row has, of an epoch of so many batches and seconds."""
        return {}

    def keep(self, row: dict[str, float]) -> None:
        """Tells and writes a row."""
        raise NotImplementedError
