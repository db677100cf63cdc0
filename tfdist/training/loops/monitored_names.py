"""Whether the numbers are there that a training is to watch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import OptionError, unknown_choice
from tfdist.training.steps.custom_steps import own_steps


class Watched(tf.keras.callbacks.Callback):
    """Refuses a training whose watched numbers there are not, in its first step if possible.

    Keras' own callbacks warn after each epoch, and never do what they are for.

    Args:
        monitors: option -> name of a number of an epoch.
        may_gain: whether callbacks of the user's own may add numbers when an epoch ends.
    """

    def __init__(self, monitors: Mapping[str, str], *, may_gain: bool):
        super().__init__()
        self._monitors = monitors
        self._has_looked = may_gain

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        # What a test step of the user's own returns is known after the first validation.
        if self._has_looked or not isinstance(logs, Mapping) or own_steps(self.model):
            return
        self._has_looked = True
        of_validation = {f"val_{name}": value for name, value in logs.items()}
        self._check({**logs, **of_validation, "learning_rate": 0.0})

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._check(logs or {})

    def _check(self, known: Mapping[str, Any]) -> None:
        for option, monitor in self._monitors.items():
            if monitor not in known:
                raise unknown_choice(f"number that {option} watches", monitor, list(known))
            if (values := math.prod(np.shape(known[monitor]))) != 1:
                raise OptionError(
                    f"{option} must watch one number",
                    received=f"'{monitor}', a metric of {values} values",
                    mend="Watch another, or compile a metric that is their mean",
                )
