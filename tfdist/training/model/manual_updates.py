"""Notices a training by hand: gradients that are applied outside of the steps of tfdist.

A loop with a ``tf.GradientTape`` trains what it is given on one device, or on each rank another
model, without a word. That may be meant, so it is a warning.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import ModelError, notice
from tfdist.keras.optimizers import APPLIES
from tfdist.training.engine.binding import Binding, held_of
from tfdist.training.engine.collective import Collective

_running = 0


@contextlib.contextmanager
def training() -> Iterator[None]:
    """Encloses a fit or a step of tfdist, whatever it calls."""
    global _running
    _running += 1
    try:
        yield
    finally:
        _running -= 1


class Watch:
    """Warns once for each model whose optimizer is applied by hand.

    Args:
        consequence: what that means on this strategy; an error where it cannot be.
    """

    def __init__(self, binding: Binding, consequence: str | ModelError):
        self._binding = binding
        self._consequence = consequence
        self._has_warned = False

    def over(self, optimizer: Any) -> None:
        """Watches ``optimizer`` from now on."""
        if APPLIES[0] not in vars(optimizer):
            for method in APPLIES:
                self._over(optimizer, method)

    def _over(self, optimizer: Any, method: str) -> None:
        watch = self

        @tf.autograph.experimental.do_not_convert
        def apply(self: Any, *args: Any, **options: Any) -> Any:
            watch.notice()
            return getattr(type(self), method)(self, *args, **options)

        # Bound, so that a copy of the optimizer applies its own.
        self._binding.put(optimizer, {method: types.MethodType(apply, optimizer)})

    def notice(self) -> None:
        if _running or self._has_warned:
            return
        if isinstance(self._consequence, ModelError):
            raise self._consequence
        self._has_warned = True
        if self._binding.collective.is_chief:
            notice(
                "warning: gradients must be applied by model.fit or model.train_on_batch "
                "to be distributed, but model.optimizer.apply_gradients was called outside of "
                f"them: {self._consequence}. Give the body of the loop to strategy.run, or move "
                "what is special about it into a loss, a layer or a callback",
            )


def warn_of_other_weights(model: tf.keras.Model, collective: Collective) -> None:
    """Warns where a model is saved whose weights are not the same on all processes.

    So they are after a training by hand with an optimizer that is not the model's. Weights that
    processes divide cannot be.
    """
    if collective.num_processes == 1:
        return
    trained = held_of(model, model.trainable_variables)
    values = (variable.numpy().astype(np.float64) for variable in trained)
    told = collective.gather([(float(value.sum()), float(abs(value).sum())) for value in values])
    others = [
        rank for rank, sums in enumerate(told) if not np.allclose(sums, told[0], 1e-3, 1e-5, True)
    ]
    if others and collective.is_chief:
        notice(
            "warning: all ranks must hold the same weights when a model is saved, but "
            f"found others on rank {others[0]} than on rank 0, whose are saved. Weights stay "
            "alike where model.fit trains them",
        )
