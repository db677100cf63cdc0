"""BatchNormalization whose statistics cover the global batch, not one replica's share of it.

The layer itself stays the user's own: only its ``call`` is replaced on the instance, so the model
keeps its class, its weights and its file format.

Ioffe and Szegedy 2015, arXiv:1502.03167, Algorithm 1, with the mini-batch of all replicas.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.errors import ModelError
from tfdist.training.collective import Collective
from tfdist.training.nested import layers_in

# The forward pass that is being traced. Replicas of one process are traced in threads of their
# own, which take turns.
_running = threading.local()


@dataclass(frozen=True)
class _Used:
    """What a layer has normalized with: the moving mean of then, and the sums around it."""

    name: str
    center: tf.Tensor
    total: tf.Tensor


class _Pass:
    """A forward pass of a train step.

    Attributes:
        is_real: bool [], False when the rows are padding.
        name: of this pass; the same on all replicas.
        kept: what the layers have used, in the order of their calls, if it is needed once more.
        known: that, in a pass that repeats the first; else None.
    """

    def __init__(self, is_real: tf.Tensor, name: str, known: Iterator[Any] | None = None):
        self.is_real, self.name, self.known = is_real, name, known
        self.num_calls = 0
        self.kept: list[_Used] | None = None


@contextlib.contextmanager
def shared_step(*, is_real: tf.Tensor, microbatch: int = 0) -> Iterator[None]:
    """Encloses the forward pass of one microbatch on one replica.

    Args:
        is_real: bool [], False when the rows of this replica are padding, which the statistics
            leave out.
        microbatch: its number in the step.
    """
    with _run(_Pass(is_real, f"batch_norm.{microbatch}")):
        yield


@contextlib.contextmanager
def _run(one: _Pass) -> Iterator[None]:
    before = getattr(_running, "now", None)
    _running.now = one
    try:
        yield
    finally:
        _running.now = before


class Repeatable:
    """A part of a forward pass that is computed once more, with the statistics of the first time.

    They are then neither summed over replicas nor moved into the moving ones a second time.
    """

    def __init__(self) -> None:
        self._first: _Pass | None = None
        self._kept: list[_Used] = []

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        self._first = getattr(_running, "now", None)
        if self._first is None:
            yield
            return
        self._first.kept = self._kept
        try:
            yield
        finally:
            self._first.kept = None

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        if self._first is None:
            yield
            return
        with _run(_Pass(self._first.is_real, self._first.name, iter(self._kept))):
            yield


def layers_of(model: tf.keras.Model) -> list[tf.keras.layers.BatchNormalization]:
    """Returns the BatchNormalization layers of ``model``, those of nested models included."""
    kind = tf.keras.layers.BatchNormalization
    return [layer for layer in layers_in(model) if isinstance(layer, kind)]


def install(model: tf.keras.Model, collective: Collective, *, synchronized: bool) -> None:
    """Makes every BatchNormalization layer of ``model`` follow the shared train step.

    Args:
        synchronized: whether the statistics are those of the microbatches of all replicas
            together. Otherwise each replica has its own; layers made with ``synchronized=True``
            have those of all even then.
    """
    for layer in layers_of(model):
        layer.call = _Shared(layer, collective, synchronized or _asks_for_all(layer)).as_method()


def _asks_for_all(layer: tf.keras.layers.BatchNormalization) -> bool:
    return bool(getattr(layer, "synchronized", False))


class _Shared:
    """Replaces ``layer.call``: in a shared train step it reduces, anywhere else nothing changes."""

    def __init__(
        self,
        layer: tf.keras.layers.BatchNormalization,
        collective: Collective,
        synchronized: bool,
    ):
        self._layer = layer
        self._collective = collective
        self._synchronized = synchronized
        self._call_alone = layer.call

    def as_method(self) -> Callable:
        """Returns a method of the layer: Keras' writer of SavedModels traces nothing else."""

        def call(_layer: Any, inputs: tf.Tensor, training: Any = None, mask: Any = None) -> Any:
            if not self._layer.trainable:
                training = False
            if training is True and getattr(_running, "now", None) is not None:
                if mask is not None and not self._layer.fused:  # Keras' fused code ignores it too.
                    raise ModelError(
                        "BatchNormalization must not follow a mask where a batch is divided among "
                        "replicas or microbatches",
                        received=f"layer '{self._layer.name}' with a mask",
                        mend="Use LayerNormalization, or strategy 'single'",
                    )
                return self._train(inputs)
            return self._call_alone(inputs, training=training, mask=mask)

        return types.MethodType(call, self._layer)

    def _train(self, inputs: tf.Tensor) -> tf.Tensor:
        now, layer = _running.now, self._layer
        used = None if now.known is None else next(now.known)
        center = tf.identity(layer.moving_mean) if used is None else used.center
        local = local_sums(layer, inputs, center)
        local = tf.where(now.is_real, local, tf.zeros_like(local))
        if used is not None:
            return normalized(layer, inputs, self._as_known(local, used), center)
        name = f"{now.name}.{now.num_calls}"
        now.num_calls += 1
        # One reduction for all three: latency is what costs.
        total = self._collective.sum(local, name) if self._synchronized else local
        if now.kept is not None:
            now.kept.append(_Used(name, center, total))
        output = normalized(layer, inputs, total, center)
        move_statistics(layer, total)
        return output

    def _as_known(self, local: tf.Tensor, used: _Used) -> tf.Tensor:
        """Returns the total, differentiable as the sum of all replicas' ``local`` that it is."""

        def back(gradient: tf.Tensor) -> tf.Tensor:
            if not self._synchronized:
                return gradient
            return self._collective.sum(gradient, f"{used.name}.again")

        return tf.custom_gradient(lambda _: (tf.identity(used.total), back))(local)


def average_statistics(model: tf.keras.Model, collective: Collective) -> None:
    """Gives all replicas the mean of the moving statistics that each has moved by itself."""
    moving = [
        variable
        for layer in layers_of(model)
        if layer.trainable and not _asks_for_all(layer)
        for variable in (layer.moving_mean, layer.moving_variance)
    ]
    if not moving:
        return
    dtype = moving[0].dtype
    flat = [tf.reshape(tf.cast(tf.convert_to_tensor(v), dtype), [-1]) for v in moving]
    mean = collective.sum(tf.concat(flat, 0), "batch_norm.moving") / collective.num_replicas
    pieces = tf.split(mean, [v.shape.num_elements() for v in moving])
    for variable, piece in zip(moving, pieces, strict=True):
        variable.assign(tf.cast(tf.reshape(piece, variable.shape), variable.dtype))


def local_sums(
    layer: tf.keras.layers.BatchNormalization, inputs: tf.Tensor, center: tf.Tensor | None = None
) -> tf.Tensor:
    """Returns what parts of a batch add up to its statistics: float [2 * channels + 1].

    The sums of deviations from the moving mean, of their squares, and the count. Around the moving
    mean E[d^2] - E[d]^2 cancels little.

    Args:
        center: the moving mean when it is not the present one.
    """
    shape, reduced = _axes(layer, inputs)
    x = tf.cast(inputs, layer.moving_mean.dtype)
    deviation = x - _center(layer, shape, center)
    count = tf.cast(tf.size(x) // tf.size(layer.moving_mean), x.dtype)
    return tf.concat(
        [
            tf.reshape(tf.reduce_sum(deviation, reduced), [-1]),
            tf.reshape(tf.reduce_sum(tf.square(deviation), reduced), [-1]),
            tf.reshape(count, [1]),
        ],
        axis=0,
    )


def normalized(
    layer: tf.keras.layers.BatchNormalization,
    inputs: tf.Tensor,
    total: tf.Tensor,
    center: tf.Tensor | None = None,
) -> tf.Tensor:
    """Returns what ``layer`` makes of ``inputs`` with the statistics in ``total``.

    Args:
        total: the ``local_sums`` of all parts of the batch, added up.
        center: as in ``local_sums``.
    """
    shape, _ = _axes(layer, inputs)
    mean_deviation, variance, _ = _statistics(layer, total)
    output = tf.nn.batch_normalization(
        tf.cast(inputs, layer.moving_mean.dtype),
        tf.reshape(mean_deviation, shape) + _center(layer, shape, center),
        tf.reshape(variance, shape),
        tf.reshape(layer.beta, shape) if layer.center else None,
        tf.reshape(layer.gamma, shape) if layer.scale else None,
        layer.epsilon,
    )
    return tf.cast(output, inputs.dtype)


def move_statistics(layer: tf.keras.layers.BatchNormalization, total: tf.Tensor) -> None:
    """Moves the layer's moving mean and variance towards the statistics in ``total``."""
    mean_deviation, variance, count = _statistics(layer, total)
    # Keras' fused kernel keeps the unbiased variance; its unfused code the biased one.
    kept_variance = variance * count / tf.maximum(count - 1, 1) if layer.fused else variance
    shape = layer.moving_mean.shape
    mean = tf.reshape(mean_deviation, shape) + _center(layer, shape)
    for moving, value in (
        (layer.moving_mean, mean),
        (layer.moving_variance, tf.reshape(kept_variance, shape)),
    ):
        # Of a microbatch without rows on any replica there is nothing to move by.
        part = tf.where(count > 0, tf.cast(1.0 - layer.momentum, value.dtype), 0)
        moving.assign_sub((moving - tf.stop_gradient(value)) * part)


def _statistics(
    layer: tf.keras.layers.BatchNormalization, total: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    size = tf.size(layer.moving_mean)
    count = tf.stop_gradient(total[-1])
    divisor = tf.maximum(count, 1)
    mean_deviation = total[:size] / divisor
    variance = tf.nn.relu(total[size : 2 * size] / divisor - tf.square(mean_deviation))
    return mean_deviation, variance, count


def _axes(
    layer: tf.keras.layers.BatchNormalization, inputs: tf.Tensor
) -> tuple[list[int], list[int]]:
    """Returns the shape of the statistics in terms of ``inputs``, and the axes that they sum."""
    axes = [layer.axis] if isinstance(layer.axis, int) else list(layer.axis)
    rank = inputs.shape.rank
    kept = [axis % rank for axis in axes]
    shape = [inputs.shape[axis] if axis in kept else 1 for axis in range(rank)]
    return shape, [axis for axis in range(rank) if axis not in kept]


def _center(
    layer: tf.keras.layers.BatchNormalization, shape: Any, given: tf.Tensor | None = None
) -> tf.Tensor:
    moving_mean = tf.convert_to_tensor(layer.moving_mean) if given is None else given
    return tf.reshape(tf.stop_gradient(moving_mean), shape)
