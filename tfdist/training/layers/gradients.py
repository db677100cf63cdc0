"""Sums of gradients over microbatches, and the losses that layers add."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from tfdist.training.layers.shared_embedding_rows import added_up


class Sums:
    """Gradients of variables, added up as they come. Sparse ones stay sparse.

    Args:
        tables: of these not: see ``shared_embedding_rows``.
    """

    def __init__(self, tables: Collection[Any] = ()) -> None:
        self._tables = tables
        self._sums: dict[Any, Any] = {}

    def add(self, variables: Sequence[tf.Variable], gradients: Sequence[Any]) -> list[Any]:
        """Adds one gradient for each variable, None for none; returns the new sums."""
        sums = []
        gradients = added_up(gradients, variables, self._tables)
        for variable, gradient in zip(variables, gradients, strict=True):
            if gradient is not None:
                key = variable.ref()
                self._sums[key] = added(self._sums.get(key), gradient)
                sums.append(self._sums[key])
        return sums

    def of(self, variable: tf.Variable) -> Any | None:
        return self._sums.get(variable.ref())


def added(one: Any, other: Any) -> Any:
    """Returns the sum of two gradients, either of which may be None."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, tf.IndexedSlices) and isinstance(other, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([one.values, other.values], 0),
            tf.concat([one.indices, other.indices], 0),
            other.dense_shape,
        )
    return tf.convert_to_tensor(one) + tf.convert_to_tensor(other)


def when_known(gradients: Sequence[Any]) -> contextlib.AbstractContextManager:
    """Returns a context whose operations run after ``gradients`` are there.

    Operations that do not wait would run side by side, and keep their activations all at once.
    """
    return tf.control_dependencies(
        [
            gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
            for gradient in gradients
            if gradient is not None
        ]
    )


def identity(gradient: Any) -> Any:
    """Returns what is ``gradient`` and waits for what operations made here wait for."""
    return changed(gradient, tf.identity)


def changed(gradient: Any, change: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    """Returns ``change`` of a gradient; of one of look-ups that of its rows, at their places."""
    if isinstance(gradient, tf.IndexedSlices):
        values = change(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return change(tf.convert_to_tensor(gradient))


def all_at_once(gradients: Sequence[Any]) -> list[Any]:
    """Returns gradients of a second pass none of which is there before all of them are.

    Else a weight could be updated before the second pass has read it. TensorFlow orders the two,
    but where a path of data leads from one to the other its dependency optimizer drops that order,
    and what prunes the graph then drops the path, which led through an IdentityN (2.16 to 2.21).
    """
    with when_known(gradients):
        return [None if gradient is None else identity(gradient) for gradient in gradients]


def with_gradient(
    value: tf.Tensor, *, of: tf.Tensor, back: Callable[[tf.Tensor], tf.Tensor]
) -> tf.Tensor:
    """Returns ``value``, whose gradient with respect to ``of`` is ``back`` of its own gradient.

    TensorFlow walks the graph from what a custom gradient returns back to what it was given, in
    search of variables. Here ``value`` itself is given, so the walk ends at once.
    """

    @tf.custom_gradient
    def link(_: tf.Tensor, value: tf.Tensor) -> Any:
        return tf.identity(value), lambda gradient: (back(gradient), None)

    return link(of, tf.stop_gradient(value))


def activity_losses(model: tf.keras.Model) -> list[tf.Tensor]:
    """Returns the losses that the last forward pass of ``model`` added.

    Those of weights are computed anew whenever ``losses`` is read.
    """
    return [once for once, again in zip(model.losses, model.losses, strict=True) if once is again]
