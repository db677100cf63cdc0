"""A trace of some steps by TensorFlow's profiler."""

from __future__ import annotations

import tensorflow as tf

from tfdist.errors import OptionError

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
