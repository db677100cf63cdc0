"""The best model of a training, kept beside the last."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf


class BestModel(tf.keras.callbacks.Callback):
    """Writes the model after each epoch that is better than all before it.

    Every process has it: an engine may have to read the weights on all of them together.

    Args:
        monitor: the number of an epoch that decides.
        mode: "min" or "max": whether less or more of it is better.
        save: is called with the model, on every process.
        from_chief: see ``Strategy.from_chief``; processes that joined later know of no best.

    Attributes:
        best: that number of the best epoch; None before the first. Checkpoints keep it.
        best_epoch: counted from 1.
    """

    def __init__(
        self,
        monitor: str,
        mode: str,
        save: Callable[[tf.keras.Model], None],
        from_chief: Callable[[Any], Any],
    ):
        super().__init__()
        self._monitor = monitor
        self._sign = 1.0 if mode == "max" else -1.0
        self._save = save
        self._from_chief = from_chief
        self.best: float | None = None
        self.best_epoch: int | None = None

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        value = float(np.reshape((logs or {})[self._monitor], ()))  # F1Score of one output: [x].
        is_first = self.best is None and math.isfinite(value)
        is_better = is_first or (self.best is not None and self._sign * (value - self.best) > 0)
        if self._from_chief(is_better):
            self.best, self.best_epoch = value, epoch + 1
            self._save(self.model)
