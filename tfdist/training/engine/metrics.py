"""Metrics of the whole job, from the state that each process has gathered.

A metric's variables are counts and sums, so adding them over processes gives the state that one
process would have after seeing every record. That holds for means as for AUC or MeanIoU; a mean
of results, weighted or not, does not.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import CheckpointError
from tfdist.keras import step_context
from tfdist.keras.layers import replaced
from tfdist.keras.tensors import all_raw, as_numpy
from tfdist.training.engine.collective import Collective


def state_of(model: tf.keras.Model) -> list[tf.Variable]:
    """Returns the variables of all metrics, the loss included, in a fixed order."""
    return all_raw(variable for metric in model.metrics for variable in metric.variables)


def is_finite(value: Any) -> bool:
    """Whether a result is finite: a number, or several of a step of the user's own."""
    return all(bool(np.isfinite(each).all()) for each in tf.nest.flatten(value))


class MergedResults:
    """``model.get_metrics_result``: between steps, the results of all processes together.

    Inside a traced step the results stay this process's own, for the progress bar: a reduction in
    each step would cost more than it tells.
    """

    def __init__(self, model: tf.keras.Model, collective: Collective):
        self._model = model
        self._collective = collective
        self._local_results = model.get_metrics_result
        #: State of steps that this process has not seen: those before a resumed fit's first.
        self.carried: Any | None = None
        #: What the last results were called.
        self.names: list[str] = []

    def carrying(self, state: Any | None) -> contextlib.AbstractContextManager[None]:
        """Encloses the rest of a broken epoch; with None, what has metrics of its own in it."""
        return replaced(self, carried=state)

    def __call__(self) -> dict[str, Any]:
        if not tf.executing_eagerly() or step_context.current().part is not None:
            with self._collective.own_results(self._model):
                return self._local_results()
        variables = state_of(self._model)
        local = [variable.numpy() for variable in variables]
        self._assign(variables, self.merged_state())
        try:
            results = {name: as_numpy(value) for name, value in self._local_results().items()}
            self.names = list(results)
            return results
        finally:
            self._assign(variables, local)

    def check_carried(self) -> None:
        """Checks what is carried, once a step has made all metrics there are.

        Only numbers are kept of them: metrics that keep as many are taken for the same.

        Raises:
            CheckpointError: it is the state of other metrics.
        """
        if self.carried is None:
            return
        own = sum(variable.shape.num_elements() for variable in state_of(self._model))
        if own != self.carried.size:
            raise CheckpointError(
                "a fit that goes on within an epoch must have the metrics that this began with",
                received=f"some that keep {own} numbers, where they were {self.carried.size}",
                mend="Compile the model with those of before until the epoch has ended",
            )

    def merged_state(self) -> list[np.ndarray]:
        """Returns the state of all metrics added up over processes, and over a resumed epoch."""
        with self._collective.waiting("the metrics of all ranks"):
            merged = self._collective.merge([v.numpy() for v in state_of(self._model)])
        if self.carried is None:
            return merged
        ends = np.cumsum([array.size for array in merged])[:-1]
        carried = np.split(self.carried, ends)
        return [
            a + c.reshape(a.shape).astype(a.dtype) for a, c in zip(merged, carried, strict=True)
        ]

    def _assign(self, variables: list[tf.Variable], values: list[Any]) -> None:
        for variable, value in zip(variables, values, strict=True):
            if np.issubdtype(value.dtype, np.integer):
                self._assign_whole(variable, value)
            else:
                variable.assign(value)

    def _assign_whole(self, variable: tf.Variable, value: np.ndarray) -> None:
        """Assigns counts in whole numbers.

        TensorFlow gives each replica its part of a sum, and whole numbers lose what is left over.
        """
        strategy, collective = self._model.distribute_strategy, self._collective
        is_first = collective.is_chief or not collective.reads_together
        for replica, part in enumerate(strategy.experimental_local_results(variable)):
            has_all = is_first and replica == 0
            part.assign(value if has_all else np.zeros_like(value))
