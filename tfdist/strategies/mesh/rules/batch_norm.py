"""BatchNormalization on a mesh. Ioffe and Szegedy 2015, arXiv:1502.03167, Algorithm 1.

Gradients are written out: a model has dozens of these layers, and on each device TensorFlow's own
make twice as many operations to be traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from tfdist.keras.layers import keeps_unbiased_variance
from tfdist.strategies.mesh.context import Context, last_is_split, sizes_of_row
from tfdist.strategies.mesh.operations import BATCH, MODEL
from tfdist.strategies.mesh.registry import UnsupportedLayerError, register_layer
from tfdist.strategies.mesh.rules.dense import scale_and_offset

L = tf.keras.layers


@register_layer(L.BatchNormalization)
def batch_normalization(context: Context, layer: Any, x: Any, mask: Any = None) -> Any:
    """Statistics of the global batch, without its padding."""
    if mask is not None and not keeps_unbiased_variance(layer):  # Keras' fused code ignores it too.
        raise UnsupportedLayerError(layer, "it follows a mask: use LayerNormalization")
    x = context.as_numbers(x)
    rank = len(x.shape.dims)
    axis = layer.axis if isinstance(layer.axis, int) else list(layer.axis)
    if axis not in (rank - 1, -1, [rank - 1], [-1]) or getattr(layer, "renorm", False):
        raise UnsupportedLayerError(
            layer, "it normalizes another axis than the last, or has renorm=True"
        )
    axes = (MODEL if last_is_split(x) else None,)
    moving = [context.weight(v, axes) for v in (layer.moving_mean, layer.moving_variance)]
    weights = [context.weight(v, axes) for v in (layer.gamma, layer.beta) if v is not None]
    dtype = tf.as_dtype(layer.moving_mean.dtype)

    def normalize(x: Any, mean: Any, variance: Any, *weights: Any) -> tf.Tensor:
        gamma, beta = scale_and_offset(layer, weights)
        y = tf.nn.batch_normalization(tf.cast(x, dtype), mean, variance, beta, gamma, layer.epsilon)
        return tf.cast(y, x.dtype)

    if not context.training or not layer.trainable:
        if id(layer.moving_mean) in context.updates:  # Another call of this step has moved them.
            moving = [
                context.local(tf.stop_gradient, [moved], moved.shape.dims)
                for moved in _now(context, layer, moving)
            ]
        return context.local(normalize, [x, *moving, *weights], x.shape.dims, name=layer.name)

    is_whole = not context.is_divided and context.ranks is None
    if keeps_unbiased_variance(layer) and rank == 4 and is_whole and dtype == tf.float32:
        return _by_kernel(context, layer, x, moving, weights)

    positions = math.prod(sizes_of_row(x)[:-1])
    count = tf.constant(float(context.num_rows * positions), dtype)
    if context.ranks is not None:
        count = tf.cast(context.ranks.told[1] * positions, dtype)
    mask = context.row_mask(dtype)
    per_channel = [context.dimension(2), moving[0].shape.dims[0]]
    total = context.local(
        _sums,
        [x, moving[0], *([] if mask is None else [mask])],
        per_channel,
        dtype=dtype,
        name=layer.name,
        partial_over=[BATCH],
        with_back=True,
    )
    if context.ranks is not None:
        total = context.local(
            lambda total: (
                context.ranks.sum(total),
                lambda upstream: [context.ranks.sum(upstream)],
            ),
            [total],
            per_channel,
            name=layer.name,
            with_back=True,
        )
    moments = context.local(
        lambda total, center: _moments(total, center, count),
        [total, moving[0]],
        per_channel,
        name=layer.name,
        with_back=True,
    )

    y = context.local(
        lambda x, moments, *own: _normalized(
            x, moments, *scale_and_offset(layer, own), layer.epsilon
        ),
        [x, moments, *weights],
        x.shape.dims,
        name=layer.name,
        with_back=True,
    )
    # Keras' fused kernel keeps the unbiased variance; its unfused code the biased one.
    unbias = (
        count / tf.maximum(count - 1, 1) if keeps_unbiased_variance(layer) else tf.ones([], dtype)
    )

    dims = moving[0].shape.dims
    old_mean, old_variance = _now(context, layer, moving)
    mean = context.local(
        lambda old, moments: _moved(layer, old, moments[0]), [old_mean, moments], dims
    )
    variance = context.local(
        lambda old, moments: _moved(layer, old, moments[1] * unbias), [old_variance, moments], dims
    )
    _keep(context, layer, mean, variance)
    return y


def _now(context: Context, layer: Any, moving: Sequence[Any]) -> list[Any]:
    """Returns the moving mean and variance as an earlier call of the layer has left them.

    moving: as they were before the step, split as this call has them.
    """
    kept = (layer.moving_mean, layer.moving_variance)
    return [
        context.with_last(context.updates[id(v)][1], split=last_is_split(before))
        if id(v) in context.updates
        else before
        for v, before in zip(kept, moving, strict=True)
    ]


def _keep(context: Context, layer: Any, mean: Any, variance: Any) -> None:
    for v, value in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
        is_split = context.layout.settled[id(v)][-1] is not None
        context.updates[id(v)] = (v, context.with_last(value, split=is_split))


def _moved(layer: Any, old: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
    return old - (old - new) * (1.0 - layer.momentum)


def _by_kernel(
    context: Context, layer: Any, x: Any, moving: Sequence[Any], weights: Sequence[Any]
) -> Any:
    """Each device holds the whole batch: the kernel that Keras uses, for the channels it holds."""
    is_first = id(layer.moving_mean) not in context.updates
    options = {"epsilon": layer.epsilon, "data_format": "NHWC", "is_training": True}

    def normalize(x: Any, mean: Any, variance: Any, *weights: Any) -> Any:
        gamma, beta = scale_and_offset(layer, weights)
        gamma = tf.ones_like(mean) if gamma is None else gamma
        beta = tf.zeros_like(mean) if beta is None else beta
        none = tf.zeros([0], mean.dtype)
        made = tf.raw_ops.FusedBatchNormV3(
            x=x, scale=gamma, offset=beta, mean=none, variance=none, **options
        )

        def back(upstream: tf.Tensor) -> list[tf.Tensor | None]:
            of = tf.raw_ops.FusedBatchNormGradV3(
                y_backprop=upstream,
                x=x,
                scale=gamma,
                reserve_space_1=made.reserve_space_1,
                reserve_space_2=made.reserve_space_2,
                reserve_space_3=made.reserve_space_3,
                **options,
            )
            of_gamma = [of.scale_backprop] if layer.gamma is not None else []
            of_beta = [of.offset_backprop] if layer.beta is not None else []
            return [of.x_backprop, None, None, *of_gamma, *of_beta]

        new_mean, new_variance = made.batch_mean, made.batch_variance  # That is the unbiased one.
        if is_first:
            new_mean = _moved(layer, mean, new_mean)
            new_variance = _moved(layer, variance, new_variance)
        return (made.y, new_mean, new_variance), back

    kept = moving[0].shape.dims, moving[0].dtype
    y, mean, variance = context.local(
        normalize,
        [x, *moving, *weights],
        x.shape.dims,
        name=layer.name,
        with_back=True,
        beside=[kept, kept],
    )
    if not is_first:
        news = zip(_now(context, layer, moving), (mean, variance), strict=True)
        mean, variance = (
            context.local(partial(_moved, layer), [old, new], kept[0]) for old, new in news
        )
    _keep(context, layer, mean, variance)
    return y


#: A value, and the function from its gradient to those of what it was made of.
_Differentiable = tuple[tf.Tensor, Callable[[tf.Tensor], list[tf.Tensor | None]]]


def _sums(x: tf.Tensor, center: tf.Tensor, mask: tf.Tensor | None = None) -> _Differentiable:
    """Returns [2, channels]: the sums of deviations from the moving mean, and of their squares.

    Around the moving mean E[d^2] - E[d]^2 cancels little. mask: [rows], 0 for padding.
    """
    given, rank = x.dtype, x.shape.rank
    real = None if mask is None else tf.reshape(mask, [-1] + [1] * (rank - 1))
    deviation = tf.cast(x, center.dtype) - center
    if real is not None:
        deviation *= real
    over = list(range(rank - 1))
    total = tf.stack([tf.reduce_sum(deviation, over), tf.reduce_sum(deviation * deviation, over)])

    def back(upstream: tf.Tensor) -> list[tf.Tensor | None]:
        of_sum, of_squares = tf.unstack(upstream)
        of_x = of_sum + (of_squares + of_squares) * deviation
        if real is not None:
            of_x *= real
        return [tf.cast(of_x, given), None, *([] if mask is None else [None])]

    return total, back


def _moments(total: tf.Tensor, center: tf.Tensor, count: tf.Tensor) -> _Differentiable:
    """Returns [2, channels], mean and biased variance. total: the ``_sums`` of all devices."""
    deviation, of_squares = tf.unstack(total / count)
    variance = tf.nn.relu(of_squares - deviation * deviation)

    def back(upstream: tf.Tensor) -> list[tf.Tensor | None]:
        of_mean, of_variance = tf.unstack(upstream)
        of_squares = tf.raw_ops.ReluGrad(gradients=of_variance, features=variance)
        of_deviation = of_mean - (deviation + deviation) * of_squares
        return [tf.stack([of_deviation, of_squares]) / count, None]

    return tf.stack([deviation + center, variance]), back


def _normalized(
    x: tf.Tensor,
    moments: tf.Tensor,
    gamma: tf.Tensor | None,
    beta: tf.Tensor | None,
    epsilon: float,
) -> _Differentiable:
    """Returns ``x`` normalized. gamma, beta: None where the layer has none."""
    given = x.dtype
    x = tf.cast(x, moments.dtype)
    mean, variance = tf.unstack(moments)
    inverse = tf.math.rsqrt(variance + epsilon)
    factor = inverse if gamma is None else inverse * gamma
    offset = -mean * factor if beta is None else beta - mean * factor

    def back(upstream: tf.Tensor) -> list[tf.Tensor | None]:
        over = list(range(x.shape.rank - 1))
        upstream = tf.cast(upstream, x.dtype)
        of_offset = tf.reduce_sum(upstream, over)
        of_factor = tf.reduce_sum(upstream * x, over) - mean * of_offset
        of_variance = -0.5 * of_factor * factor * (inverse * inverse)
        of_x = tf.cast(upstream * factor, given)
        of_gamma = [] if gamma is None else [of_factor * inverse]
        of_beta = [] if beta is None else [of_offset]
        return [of_x, tf.stack([-factor * of_offset, of_variance]), *of_gamma, *of_beta]

    return tf.cast(x * factor + offset, given), back
