"""A user's own step on one replica, while it is traced: what its parts exchange with others."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfdist.keras import step_context
from tfdist.training.engine.collective import Collective
from tfdist.training.layers.gradients import identity, with_gradient

#: How numbers of replicas make up that of the global batch where it is not their mean by rows:
#: name -> function of all of them and an axis, and the number that changes nothing.
JOINS: dict[str, tuple[Callable[..., Any], float]] = {
    "sum": (tf.reduce_sum, 0.0),
    "maximum": (tf.reduce_max, -math.inf),
    "minimum": (tf.reduce_min, math.inf),
}


@dataclass
class RunningStep:
    """A user's step on one replica, while it is traced.

    Attributes:
        part: of the global batch that the replica has, float [].
        share: rows of the replica and of the global batch, int64 [2].
        results: metric -> the name of what it has been asked for.
        loss_weights: metric of a loss -> what it counts with among the batches of all replicas,
            float []; without, Keras counts rows.
        settled: tensor -> "fixed" of what all replicas have alike, as they have exchanged it, or
            "mean" of what is one over rows though the graph does not show it.
        losses: what gradients of weights were asked of.
        gradients: these, by their ids.
    """

    collective: Collective
    part: tf.Tensor
    share: tf.Tensor
    results: dict[int, str] = field(default_factory=dict)
    loss_weights: dict[int, tf.Tensor] = field(default_factory=dict)
    settled: dict[int, str] = field(default_factory=dict)
    losses: list[Any] = field(default_factory=list)
    gradients: set[int] = field(default_factory=set)
    kept: list[Any] = field(default_factory=list)  # So that no other tensor gets its id.
    _num_names: int = 0
    _last: list[tf.Tensor] = field(default_factory=list)
    _around: tuple[tf.Tensor, tf.Tensor] | None = None

    def name(self, what: str) -> str:
        """Returns a name that no other exchange of the step has, the same on all replicas."""
        self._num_names += 1
        return f"own_step.{self._num_names}.{what}"

    def sum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Returns the sum of ``tensor`` over all replicas; differentiable.

        A loss of the user's own is weighted by its replica's part when the gradients are there, so
        what comes back from other replicas is weighted by theirs on the way.
        """

        def back(gradient: tf.Tensor) -> tf.Tensor:
            part = tf.cast(self.part, gradient.dtype)
            weighted = tf.math.multiply_no_nan(gradient, part)
            return tf.math.divide_no_nan(self._sum(weighted, self.name("back")), part)

        return self.settle(with_gradient(self._sum(tensor, name), of=tensor, back=back), "fixed")

    def settle(self, tensor: tf.Tensor, kind: str) -> tf.Tensor:
        """Notes what ``tensor`` is, as ``settled`` has it; returns it."""
        self.settled[id(tensor)] = kind
        self.kept.append(tensor)
        return tensor

    def rows_around(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the rows of the global batch before and after those of this replica, int32 []."""
        if self._around is None:
            rows, place = self._of_each(tf.cast(self.share[0], tf.float32), "rows"), self._place()
            counts = tf.cast(tf.round(rows), tf.int32)
            self._around = (tf.reduce_sum(counts[:place]), tf.reduce_sum(counts[place + 1 :]))
        return self._around

    def joined(self, number: tf.Tensor, join: str) -> tf.Tensor:
        """Returns what the numbers of all replicas make up, each in one shape, as JOINS says."""
        of_all, nothing = JOINS[join]
        own = tf.where(self.share[0] > 0, number, tf.constant(nothing, number.dtype))
        return of_all(self._of_each(own, join), 0)

    def _place(self) -> tf.Tensor:
        """Returns the number of this replica among all, int32 []."""
        context = tf.distribute.get_replica_context()
        counts_all = context.num_replicas_in_sync == self.collective.num_replicas
        place = context.replica_id_in_sync_group if counts_all else self.collective.process
        return tf.cast(place, tf.int32)

    def _of_each(self, number: tf.Tensor, what: str) -> tf.Tensor:
        """Returns the numbers of all replicas, [num_replicas, ...]."""
        mine = tf.range(self.collective.num_replicas) == self._place()
        mine = tf.reshape(mine, [-1, *[1] * number.shape.rank])
        return self._sum(tf.where(mine, number, tf.zeros_like(number)), self.name(what))

    def apply(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Adds up weighted ``gradients`` over the replicas; ``optimizer`` updates ``variables``."""
        name = self.name("gradient")
        with self._in_order():
            gradients = [None if g is None else identity(g) for g in gradients]
        with step_context.within(own_step=None):
            self.collective.apply(optimizer, gradients, variables, name=name)
        if self.collective.num_processes > 1:
            self._last = [tf.convert_to_tensor(variable) for variable in variables]

    def _sum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        with self._in_order():
            tensor = tf.identity(tf.stop_gradient(tensor))
        total = self.collective.sum(tensor, name)
        self._last = [total]
        return total

    def _in_order(self) -> contextlib.AbstractContextManager:
        """Has what follows wait for the last exchange.

        TensorFlow's collectives wait for ever where two workers begin two of them in other orders.
        """
        if tf.executing_eagerly():
            return contextlib.nullcontext()
        graph = tf.compat.v1.get_default_graph()
        return tf.control_dependencies([last for last in self._last if last.graph is graph])


def running_step() -> RunningStep | None:
    """Returns the user's step that this thread is in; None outside, and within its optimizers."""
    return step_context.current().own_step
