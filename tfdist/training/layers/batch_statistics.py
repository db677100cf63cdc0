"""The statistics of a batch that is in parts, and what BatchNormalization makes of them.

Ioffe and Szegedy 2015, arXiv:1502.03167, Algorithm 1. Its gradients are written out: a model has
dozens of these layers, and TensorFlow's own make three times as many operations to be traced.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.keras.layers import keeps_unbiased_variance
from tfdist.keras.tensors import raw
from tfdist.training.model.precision import full_type

Layer = tf.keras.layers.BatchNormalization


def local_sums(
    layer: Layer,
    inputs: tf.Tensor,
    center: tf.Tensor | None = None,
    is_real: tf.Tensor | None = None,
) -> tf.Tensor:
    """Returns what parts of a batch add up to its statistics: float [2 * channels + 1].

    The sums of deviations from the moving mean, of their squares, and the count. Around the moving
    mean E[d^2] - E[d]^2 cancels little.

    Args:
        center: the moving mean when it is not the present one.
        is_real: bool [], False when the rows are padding, whose sums are zero; None: True.
    """
    axes = _Axes(layer, inputs)
    around = axes.wide(_center(layer, center))

    def real(sums: tf.Tensor) -> tf.Tensor:
        return sums if is_real is None else tf.where(is_real, sums, tf.zeros_like(sums))

    @tf.custom_gradient
    def sums(x: tf.Tensor) -> Any:
        deviation = x - around
        count = tf.cast(tf.size(x) // axes.channels, x.dtype)
        of_squares = axes.summed(tf.square(deviation))
        packed = tf.concat([axes.summed(deviation), of_squares, tf.reshape(count, [1])], 0)

        def back(upstream: tf.Tensor) -> tf.Tensor:
            of_sum, of_squares, _ = _split(real(upstream), axes.channels)
            return axes.wide(of_sum) + axes.wide(2 * of_squares) * deviation

        return real(packed), back

    return sums(tf.cast(inputs, _dtype(layer)))


def normalized(
    layer: Layer, inputs: tf.Tensor, total: tf.Tensor, center: tf.Tensor | None = None
) -> tf.Tensor:
    """Returns what ``layer`` makes of ``inputs`` with the statistics in ``total``.

    Args:
        total: the ``local_sums`` of all parts of the batch, added up.
        center: as in ``local_sums``.
    """
    axes = _Axes(layer, inputs)
    mean_deviation, variance, count = _moments(axes.channels, total)
    divisor = tf.maximum(count, 1)
    mean = mean_deviation + _center(layer, center)
    inverse = tf.math.rsqrt(variance + layer.epsilon)
    gamma = [_flat(layer.gamma)] if layer.scale else []
    beta = [_flat(layer.beta)] if layer.center else []
    factor = inverse * gamma[0] if gamma else inverse
    offset = beta[0] - mean * factor if beta else -mean * factor

    # All that gradients flow to is given, else TensorFlow would not know of it.
    @tf.custom_gradient
    def normalize(x: tf.Tensor, _: tf.Tensor, *__: tf.Tensor) -> Any:
        def back(upstream: tf.Tensor) -> Any:
            of_offset = axes.summed(upstream)
            of_factor = axes.summed(upstream * x) - mean * of_offset
            of_variance = tf.raw_ops.ReluGrad(
                gradients=-0.5 * of_factor * factor * tf.square(inverse), features=variance
            )
            of_mean_deviation = -factor * of_offset - 2 * mean_deviation * of_variance
            of_total = tf.concat(
                [of_mean_deviation / divisor, of_variance / divisor, tf.zeros([1], x.dtype)], 0
            )
            of_gamma = [of_factor * inverse] if gamma else []
            of_beta = [of_offset] if beta else []
            return [upstream * axes.wide(factor), of_total, *of_gamma, *of_beta]

        return x * axes.wide(factor) + axes.wide(offset), back

    x = tf.cast(inputs, _dtype(layer))
    return tf.cast(normalize(x, total, *gamma, *beta), inputs.dtype)


def move_statistics(layer: Layer, total: tf.Tensor) -> None:
    """Moves the layer's moving mean and variance towards the statistics in ``total``."""
    mean_deviation, variance, count = _moments(layer.moving_mean.shape.num_elements(), total)
    is_unbiased = keeps_unbiased_variance(layer)
    kept_variance = variance * count / tf.maximum(count - 1, 1) if is_unbiased else variance
    mean = mean_deviation + _center(layer)
    # Of a microbatch without rows on any replica there is nothing to move by.
    part = tf.where(count > 0, tf.cast(1.0 - layer.momentum, count.dtype), 0)
    for kept, value in ((layer.moving_mean, mean), (layer.moving_variance, kept_variance)):
        moving = raw(kept)
        off = tf.cast(moving, value.dtype) - tf.reshape(value, moving.shape)
        moving.assign_sub(tf.cast(off * part, moving.dtype))


def _moments(channels: int, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the mean deviation and the biased variance, both [channels], and the count []."""
    of_sum, of_squares, count = _split(total, channels)
    count = tf.stop_gradient(tf.reshape(count, []))
    divisor = tf.maximum(count, 1)
    mean_deviation = of_sum / divisor
    return mean_deviation, tf.nn.relu(of_squares / divisor - tf.square(mean_deviation)), count


def _split(sums: tf.Tensor, channels: int) -> list[tf.Tensor]:
    return tf.split(sums, [channels, channels, 1])


def _center(layer: Layer, given: tf.Tensor | None = None) -> tf.Tensor:
    moving_mean = tf.convert_to_tensor(layer.moving_mean) if given is None else given
    return tf.stop_gradient(_flat(moving_mean))


def _dtype(layer: Layer) -> tf.DType:
    """Returns what statistics are computed in, though Keras 3 may keep them in 16 bits."""
    return full_type(tf.as_dtype(layer.moving_mean.dtype))


def _flat(value: Any) -> tf.Tensor:
    value = tf.convert_to_tensor(value)
    value = tf.cast(value, full_type(value.dtype))
    return value if value.shape.rank == 1 else tf.reshape(value, [-1])


class _Axes:
    """Where the channels of a layer lie in its inputs.

    Attributes:
        channels: their number, over all axes that the layer keeps.
    """

    def __init__(self, layer: Layer, inputs: tf.Tensor):
        rank = inputs.shape.rank
        axes = [layer.axis] if isinstance(layer.axis, int) else list(layer.axis)
        kept = [axis % rank for axis in axes]
        self._shape = [inputs.shape[axis] if axis in kept else 1 for axis in range(rank)]
        self._summed = [axis for axis in range(rank) if axis not in kept]
        self._are_last = kept == [rank - 1]
        self.channels = layer.moving_mean.shape.num_elements()

    def summed(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the sums over all other axes: [channels]."""
        return _flat(tf.reduce_sum(x, self._summed))

    def wide(self, value: tf.Tensor) -> tf.Tensor:
        """Returns ``value``, [channels], in a shape that fits the inputs."""
        return value if self._are_last else tf.reshape(value, self._shape)
