"""How long the steps of a fit wait for their batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# Of an epoch, so many steps are looked at, and at most one in this many: to look at one takes as
# long as a hundredth of a step does that is small.
_LOOKED_AT = 16
_APART = 16


class DataWait(tf.keras.callbacks.Callback):
    """Among the callbacks of a fit: measures how long its steps wait for their batches.

    That is told by tf.data itself, between whose prefetch and the step nothing else stands, so
    nothing that is computed changes. Where an engine fetches batches ahead of its steps, onto
    devices, or an execution has several steps, it is not measured.
    """

    def __init__(self) -> None:
        super().__init__()
        self._asked: tf.Variable | None = None
        self._told = (0.0, 0.0)

    def take(self) -> float | None:
        """Returns the seconds that a step has waited on average since the last call.

        None where that is not measured, or no step was looked at.
        """
        if self._asked is None:
            return None
        told = float(self._waited.numpy()), float(self._count.numpy())
        (waited, count), (waited_before, count_before) = told, self._told
        self._told = told
        return None if count == count_before else (waited - waited_before) / (count - count_before)

    def watched(self, batches: tf.data.Dataset, steps_per_epoch: int) -> tf.data.Dataset:
        """Returns the same batches, some of which note how long it took until they were there."""
        if self._asked is None:
            with tf.init_scope(), tf.device("CPU:0"):
                self._asked, self._waited, self._count = (
                    tf.Variable(0.0, dtype=tf.float64, trainable=False) for _ in range(3)
                )
        apart = max(1, min(_APART, steps_per_epoch // _LOOKED_AT))
        # The parts of a zip are asked one after the other, by the step. What looks at the clock is
        # a dataset too, called for one step in several; and to drop it is no work to tf.data.
        before, after = (_called_each(look, apart) for look in (self._look, self._look_again))
        return (
            tf.data.Dataset.zip((before, batches, after))
            .map(lambda before, batch, after: batch)
            .with_options(batches.options())
        )

    def _look(self) -> None:
        self._asked.assign(tf.timestamp(), read_value=False)

    def _look_again(self) -> None:
        self._waited.assign_add(tf.timestamp() - self._asked, read_value=False)
        self._count.assign_add(1.0, read_value=False)


def _called_each(look: Callable[[], None], apart: int) -> tf.data.Dataset:
    """Returns endless elements of no content; one in ``apart`` calls ``look`` when it is asked for.

    Not the first, unless all do: before that files are opened and buffers filled.
    """
    nothing = tf.data.Dataset.from_tensors(False)

    def some(_: tf.Tensor) -> tf.data.Dataset:
        look()
        return nothing.repeat(apart)

    looking = tf.data.Dataset.from_tensors(False).repeat().flat_map(some)
    # A known length spares Keras the search for the end of the data.
    looking = looking.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    return nothing.repeat(apart // 2).concatenate(looking)


def among(callbacks: Sequence[Any]) -> DataWait | None:
    """Returns the ``DataWait`` among callbacks; None when there is none."""
    return next((callback for callback in callbacks if isinstance(callback, DataWait)), None)
