"""The host's weights while their slices are the truth: what reads them, and what writes them.

A callback may read a weight of the layer, and set it. Who reads one that steps have trained since
brings its slices together; what is written goes to the slices. A ``tf.function`` is heard of when
it is traced, and not when it runs: the weights that it uses are carried at each step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import tensorflow as tf

from tfdist import keras
from tfdist.strategies.mesh.state import SlicedState
from tfdist.training.engine.binding import Binding
from tfdist.training.memory.emptied_variable import listen


class HostWeights:
    """
    Args:
        are_behind: whether the slices are the truth.
    """

    def __init__(self, model: tf.keras.Model, state: SlicedState, are_behind: Callable[[], bool]):
        self._weights = list(model.weights)
        self._state = state
        self._are_behind = are_behind
        #: Of functions: those that read a weight may run at any time, and so may those that write.
        self._traced_reads: dict[int, tf.Variable] = {}
        self._traced_writes: dict[int, tf.Variable] = {}
        #: While the model is written: no callback runs what is traced then.
        self.traces_are_ours = False

    def heard_by(self, binding: Binding) -> None:
        for variable in self._weights:
            listen(
                binding,
                keras.tensors.uncast(variable),
                before_read=partial(self._bring, variable),
                after_write=partial(self._take, variable),
            )

    def to_slices(self) -> None:
        """Gives the slices what functions may have written."""
        for variable in self._traced_writes.values():
            if id(variable) not in self._state.behind:
                self._state.scatter_weight(variable)

    def fall_behind(self) -> None:
        """After the slices have changed: functions alone find the host's weights up to date."""
        self._state.behind.update(map(id, self._weights))
        self.to_functions()

    def to_functions(self) -> None:
        for variable in (self._traced_reads | self._traced_writes).values():
            self._state.gather_weight(variable)

    def _is_traced(self) -> bool:
        """Whether a function is traced that may run at any time."""
        if self.traces_are_ours or not tf.inside_function():
            return False
        # A layer is called on a symbol: nothing runs.
        return getattr(tf.compat.v1.get_default_graph(), "name", "") != "keras_graph"

    def _bring(self, variable: tf.Variable) -> None:
        if self._is_traced():
            self._traced_reads[id(variable)] = variable
        if self._are_behind():
            with tf.init_scope():
                self._state.gather_weight(variable)

    def _take(self, variable: tf.Variable) -> None:
        if self._is_traced():
            self._traced_writes[id(variable)] = variable
        elif not tf.inside_function() and self._are_behind():
            self._state.scatter_weight(variable)
