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
from typing import Any

import tensorflow as tf

from tfdist.errors import ModelError
from tfdist.training.collective import Collective
from tfdist.training.nested import layers_in

# The step that is being traced. Replicas of one process are traced in threads of their own, which
# take turns.
_step = threading.local()


@contextlib.contextmanager
def shared_step(*, is_real: tf.Tensor) -> Iterator[None]:
    """Encloses the forward pass of one step on one replica.

    Args:
        is_real: bool [], False when the rows of this replica are padding, which the statistics
            leave out.
    """
    _step.is_real = is_real
    _step.num_calls = 0
    try:
        yield
    finally:
        del _step.is_real, _step.num_calls


def layers_of(model: tf.keras.Model) -> list[tf.keras.layers.BatchNormalization]:
    """Returns the BatchNormalization layers of ``model``, those of nested models included."""
    kind = tf.keras.layers.BatchNormalization
    return [layer for layer in layers_in(model) if isinstance(layer, kind)]


def synchronize(model: tf.keras.Model, collective: Collective) -> None:
    """Makes every BatchNormalization layer of ``model`` use the statistics of the global batch."""
    for layer in layers_of(model):
        layer.call = _Synchronized(layer, collective).as_method()


class _Synchronized:
    """Replaces ``layer.call``: in a shared train step it reduces, anywhere else nothing changes."""

    def __init__(self, layer: tf.keras.layers.BatchNormalization, collective: Collective):
        self._layer = layer
        self._collective = collective
        self._call_alone = layer.call

    def as_method(self) -> Callable:
        """Returns a method of the layer: Keras' writer of SavedModels traces nothing else."""

        def call(_layer: Any, inputs: tf.Tensor, training: Any = None, mask: Any = None) -> Any:
            if not self._layer.trainable:
                training = False
            if training is True and hasattr(_step, "is_real"):
                if mask is not None and not self._layer.fused:  # Keras' fused code ignores it too.
                    raise ModelError(
                        "BatchNormalization after a mask cannot be shared by several replicas",
                        received=f"layer '{self._layer.name}' with a mask",
                        mend="Use LayerNormalization, or strategy 'single'",
                    )
                return self._train(inputs)
            return self._call_alone(inputs, training=training, mask=mask)

        return types.MethodType(call, self._layer)

    def _train(self, inputs: tf.Tensor) -> tf.Tensor:
        local = local_sums(self._layer, inputs)
        local = tf.where(_step.is_real, local, tf.zeros_like(local))
        # One reduction for all three: latency is what costs.
        total = self._collective.sum(local, f"batch_norm.{_step.num_calls}")
        _step.num_calls += 1
        output = normalized(self._layer, inputs, total)
        move_statistics(self._layer, total)
        return output


def local_sums(layer: tf.keras.layers.BatchNormalization, inputs: tf.Tensor) -> tf.Tensor:
    """Returns what parts of a batch add up to its statistics: float [2 * channels + 1].

    The sums of deviations from the moving mean, of their squares, and the count. Around the moving
    mean E[d^2] - E[d]^2 cancels little.
    """
    shape, reduced = _axes(layer, inputs)
    x = tf.cast(inputs, layer.moving_mean.dtype)
    deviation = x - _center(layer, shape)
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
    layer: tf.keras.layers.BatchNormalization, inputs: tf.Tensor, total: tf.Tensor
) -> tf.Tensor:
    """Returns what ``layer`` makes of ``inputs`` with the statistics in ``total``.

    Args:
        total: the ``local_sums`` of all parts of the batch, added up.
    """
    shape, _ = _axes(layer, inputs)
    mean_deviation, variance, _ = _statistics(layer, total)
    output = tf.nn.batch_normalization(
        tf.cast(inputs, layer.moving_mean.dtype),
        tf.reshape(mean_deviation, shape) + _center(layer, shape),
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
        moving.assign_sub((moving - tf.stop_gradient(value)) * (1.0 - layer.momentum))


def _statistics(
    layer: tf.keras.layers.BatchNormalization, total: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    size = tf.size(layer.moving_mean)
    count = tf.stop_gradient(total[-1])
    mean_deviation = total[:size] / count
    variance = tf.nn.relu(total[size : 2 * size] / count - tf.square(mean_deviation))
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


def _center(layer: tf.keras.layers.BatchNormalization, shape: Any) -> tf.Tensor:
    return tf.reshape(tf.stop_gradient(tf.convert_to_tensor(layer.moving_mean)), shape)
