"""Blocks of a model whose weights are gathered where they are used: ``shard="weights"``."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import ModelError
from tfdist.keras import step_context
from tfdist.training.engine.collective import Collective
from tfdist.training.layers.gradients import with_gradient
from tfdist.training.memory.emptied_variable import Elsewhere
from tfdist.training.memory.flat_parts import buckets


class Block:
    """The divided weights of one block, and how they come together.

    Attributes:
        name: for people.
        variables: whole ones, not cast.
        held: the same, once they are divided.
    """

    def __init__(self, name: str, number: int, variables: Sequence[Any], collective: Collective):
        self.name = name
        self.variables = list(variables)
        self.held: list[Elsewhere] = []
        self._number = number
        self._collective = collective
        self._calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def parts(self) -> list[tf.Tensor]:
        """Returns this replica's parts, [part_size] each."""
        return [held.part.read_value() for held in self.held]

    @contextlib.contextmanager
    def gathered(
        self,
        parts: Sequence[Any],
        name: str,
        after: Sequence[Any],
        reduced: list[list[tf.Tensor]] | None = None,
    ) -> Iterator[None]:
        """Encloses what reads the weights; they are dropped when it has read them.

        Args:
            parts: of this replica.
            name: of this pass through the block: the same on all replicas, and of no other.
            after: tensors that must be known before anything travels.
            reduced: what the blocks of a way back have got of their gradients; it grows.
        """
        reduced = [] if reduced is None else reduced
        wholes = self._gather(parts, f"{name}.{self._number}", after, reduced)
        if tf.executing_eagerly():
            with self._held(wholes):
                yield
            return
        pairs = zip(self.held, map(_alone, wholes), strict=True)
        now = _Gathered({id(held.variable): whole for held, whole in pairs})
        with step_context.within(gathered=now):
            yield
        if step_context.current().repeatable is not None and now.unread:
            missing = next(held for held in self.held if id(held.variable) in now.unread)
            raise ModelError(
                "each weight of a block that replicas divide (shard='weights') must be used in it",
                received=f"'{missing.variable.name}' of {self.name}, which nothing has read",
                mend="Give recompute the names of other layers, or use shard='optimizer'",
            )

    @contextlib.contextmanager
    def _held(self, wholes: Sequence[tf.Tensor]) -> Iterator[None]:
        try:
            for held, whole in zip(self.held, wholes, strict=True):
                held.hold(whole)
            yield
        finally:
            for held in self.held:
                held.drop()

    def in_passing(self, after: Sequence[Any]) -> contextlib.AbstractContextManager:
        """Returns the same for a pass that no gradients are asked of."""
        if tf.executing_eagerly():
            return self.gathered(self.parts(), "shard.now", ())
        graph = tf.compat.v1.get_default_graph()
        turn = self._calls[graph] = self._calls.get(graph, 0) + 1
        return self.gathered(self.parts(), f"shard.only.{turn}", after)

    def _gather(
        self,
        parts: Sequence[Any],
        name: str,
        after: Sequence[Any],
        reduced: list[list[tf.Tensor]],
    ) -> list[tf.Tensor]:
        """Returns the whole weights. Their gradients go to the parts of all replicas."""
        travelling = buckets([held.division for held in self.held], range(len(self.held)))

        @tf.custom_gradient
        def gather(*parts: tf.Tensor) -> Any:
            def back(*gradients: Any) -> list[tf.Tensor]:
                found = []
                for number, bucket in enumerate(travelling):
                    rows = bucket.rows([self.held[i].dense(gradients[i]) for i in bucket.indices])
                    row = self._collective.reduce_scatter(rows, f"{name}.gradient.{number}")
                    found.append(bucket.split(row))
                reduced.append(_in_order(found))
                return reduced[-1]

            with tf.control_dependencies(after):
                found = []
                for number, bucket in enumerate(travelling):
                    row = tf.concat([parts[index] for index in bucket.indices], 0)
                    rows = self._collective.all_gather(row, f"{name}.{number}")
                    found.append(bucket.wholes(rows))
            return _in_order(found), back

        return list(gather(*parts))


def _in_order(of_buckets: Sequence[Sequence[Any]]) -> list[Any]:
    """Returns what buckets, which follow the order of the weights, have of each."""
    return [one for of_bucket in of_buckets for one in of_bucket]


def _alone(tensor: tf.Tensor) -> tf.Tensor:
    """Returns ``tensor`` from a node of its own, where it may be the scale of a layer.

    Grappler fuses normalizations for oneDNN, and takes the first output of a node for any.
    """
    if tensor.shape.rank != 1:
        return tensor
    copy = tf.raw_ops.Snapshot(input=tf.stop_gradient(tensor))
    return with_gradient(copy, of=tensor, back=tf.identity)


class _Gathered:
    """The whole weights of the block that runs, by the ids of their variables."""

    def __init__(self, wholes: dict[int, tf.Tensor]):
        self._wholes = wholes
        self.unread = set(wholes)

    def read(self, variable: Any) -> tf.Tensor | None:
        self.unread.discard(id(variable))
        return self._wholes.get(id(variable))
