"""How long the steps of a fit wait for their batches."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist import keras
from tfdist.training.engine.binding import Binding

# Of an epoch, so many steps are looked at, and at most one in this many: to look at one takes as
# long as a hundredth of a step does that is small.
_LOOKED_AT = 16
_APART = 16


class DataWait(tf.keras.callbacks.Callback):
    """Among the callbacks of a fit: measures how long its steps wait for their batches.

    tf.data itself tells how long it took until a batch was there, so nothing that is computed
    changes. Where nothing else stands between its prefetch and the step, that is what the step has
    waited. Where TensorFlow fetches batches onto devices ahead of the steps, whoever fetches may
    wait while a step still computes: there a clock in the step tells when its batch was there, and
    the lesser of both counts. What only the clock in the step sees is its start, and what only
    tf.data sees was computed meanwhile. An engine that hands batches out tells by ``note``.

    Where an execution has several steps, it is not measured.
    """

    def __init__(self) -> None:
        super().__init__()
        self._asked: tf.Variable | None = None
        self._told = (0.0, 0.0)
        self._noted = _Mean()
        self._step: Callable | None = None
        self._in_steps = _Mean()
        self._replicas = 1
        self._steps_apart = 1
        self._begun: float | None = None
        self._has_traced = False

    def take(self) -> float | None:
        """Returns the seconds that a step has waited on average since the last call.

        None where that is not measured, or no step was looked at.
        """
        noted, in_steps, in_data = self._noted.take(), self._in_steps.take(), self._of_data()
        if noted is not None or self._step is None:
            return in_data if noted is None else noted
        return None if in_data is None or in_steps is None else min(in_data, in_steps)

    def note(self, seconds: float) -> None:
        """Adds what a step has waited, where the engine knows."""
        self._noted.add(seconds)

    def _of_data(self) -> float | None:
        """Returns the seconds until the batch of a step was there, for whoever asked for it."""
        if self._asked is None:
            return None
        told = float(self._waited.numpy()), float(self._count.numpy())
        (waited, count), (waited_before, count_before) = told, self._told
        self._told = told
        if count == count_before:
            return None
        return (waited - waited_before) / (count - count_before) * self._replicas

    # In the data --------------------------------------------------------------------------------

    def watched(
        self, batches: tf.data.Dataset, steps_per_epoch: int, replicas: int = 1
    ) -> tf.data.Dataset:
        """Returns the same batches, some of which note how long it took until they were there.

        Args:
            replicas: that take a batch each for one step.
        """
        if self._asked is None:
            self._asked, self._waited, self._count = (_clock() for _ in range(3))
        self._replicas = replicas
        apart = self._steps_apart = max(1, min(_APART, steps_per_epoch // _LOOKED_AT))
        while math.gcd(apart, replicas) > 1:  # The first replica's comes with those of the others.
            apart -= 1
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

    # In the steps -------------------------------------------------------------------------------

    def watch_steps(self, binding: Binding) -> None:
        """Has the train step of a model tell when its batch was there, on the last replica."""
        model = binding.model
        if self._step is not None and self._step is vars(model).get("train_step"):
            return
        take_step, there = model.train_step, _clock()

        @functools.wraps(take_step)
        def step(data: Any) -> Any:
            with tf.control_dependencies(tf.nest.flatten(data, expand_composites=True)):
                there.assign(tf.timestamp(), read_value=False)
            return take_step(data)

        binding.put(model, {"train_step": step})
        keras.steps.forget_functions(model)
        self._step, self._there = step, there

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        # The first step is traced before it begins.
        is_looked_at = self._has_traced and batch % self._steps_apart == self._steps_apart // 2
        self._begun = time.time() if self._step is not None and is_looked_at else None

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self._has_traced = True
        if self._begun is not None:
            self._in_steps.add(max(0.0, float(self._there.numpy()) - self._begun))


class _Mean:
    """The mean of the numbers since it was last asked for; None of none."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, number: float) -> None:
        self._sum, self._count = self._sum + number, self._count + 1

    def take(self) -> float | None:
        mean = self._sum / self._count if self._count else None
        self._sum, self._count = 0.0, 0
        return mean


def _clock() -> tf.Variable:
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(0.0, dtype=tf.float64, trainable=False)


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
