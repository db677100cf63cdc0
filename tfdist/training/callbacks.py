"""Callbacks that every fit of tfdist gets, and the rule which of the user's run where."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

# Writers of files: several processes would write the same one.
_CHIEF_ONLY = (
    tf.keras.callbacks.ModelCheckpoint,
    tf.keras.callbacks.BackupAndRestore,
    tf.keras.callbacks.CSVLogger,
    tf.keras.callbacks.TensorBoard,
    tf.keras.callbacks.ProgbarLogger,
)


def for_process(callbacks: Iterable[Any] | None, is_chief: bool) -> list[Any]:
    """Returns the callbacks that run on this process: writers of files only on the chief.

    All others run everywhere. They see the metrics of the whole job, so they decide alike.
    """
    return [c for c in callbacks or () if is_chief or not isinstance(c, _CHIEF_ONLY)]


class ContinuedCallbacks(tf.keras.callbacks.CallbackList):
    """One list of callbacks over two calls of Keras' fit, which see it as one training."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._begun = False
        self.is_last_fit = True

    def on_train_begin(self, logs: dict | None = None) -> None:
        if not self._begun:
            self._begun = True
            super().on_train_begin(logs)

    def on_train_end(self, logs: dict | None = None) -> None:
        if self.is_last_fit:
            super().on_train_end(logs)
