"""Callbacks that every fit of tfdist gets, and the rule which of the user's run where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import OptionError
from tfdist.training.collective import Collective

# Writers of files: several processes would write the same one.
_CHIEF_ONLY = (tf.keras.callbacks.CSVLogger, tf.keras.callbacks.ProgbarLogger)
# These read the model too. Where all must read it together, Keras has all but the chief write
# into a folder that it removes.
_READERS = (tf.keras.callbacks.ModelCheckpoint, tf.keras.callbacks.TensorBoard)


def for_process(callbacks: Sequence[Any], collective: Collective) -> list[Any]:
    """Returns the callbacks that run on this process: writers of files only on the chief.

    All others run everywhere. They see the metrics of the whole job, so they decide alike.

    Raises:
        OptionError: a callback that cannot know where in its data a fit goes on.
    """
    for callback in callbacks:
        if isinstance(callback, tf.keras.callbacks.BackupAndRestore):
            raise OptionError(
                "a fit on a dataset of a strategy goes on from tfdist's checkpoints",
                received="the callback BackupAndRestore",
                mend="Give tfdist.Checkpoints(folder, resume=True) instead",
            )
    if collective.is_chief:
        return list(callbacks)
    left_out = _CHIEF_ONLY if collective.reads_together else (*_CHIEF_ONLY, *_READERS)
    return [c for c in callbacks if not isinstance(c, left_out)]


class JobCallbacks(tf.keras.callbacks.CallbackList):
    """The callbacks of one training of the whole job.

    Two calls of Keras' fit, the rest of a broken epoch and the epochs after it, are one training
    to them. In a job of several processes a callback that stops the training within an epoch
    (TerminateOnNaN, a limit of time) stops it at the epoch's end: the others cannot know before.
    """

    def __init__(self, callbacks: list[Any], collective: Collective, **options: Any):
        super().__init__(callbacks, **options)
        self._collective = collective
        self._begun = False
        self._stop_wanted = False
        self.is_last_fit = True

    def on_train_begin(self, logs: dict | None = None) -> None:
        if not self._begun:
            self._begun = True
            super().on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        super().on_train_batch_end(batch, logs)
        if self._collective.num_processes > 1 and self.model.stop_training:
            self._stop_wanted = True
            self.model.stop_training = False

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        wanted = self._stop_wanted or self.model.stop_training
        self.model.stop_training = any(self._collective.gather(wanted))

    def on_train_end(self, logs: dict | None = None) -> None:
        if self.is_last_fit or self.model.stop_training:
            super().on_train_end(logs)
