"""Dense layers, embeddings, LayerNormalization, dropout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.keras.layers import replaced
from tfdist.keras.tensors import CASTS_ROWS
from tfdist.strategies.mesh.context import Context, last_is_split
from tfdist.strategies.mesh.operations import MODEL
from tfdist.strategies.mesh.registry import UnsupportedLayerError, register_layer
from tfdist.strategies.mesh.rules.reshaping import activate, check, is_elementwise

L = tf.keras.layers

#: With as many rows as each device has of a divided batch, a product with the transposed kernel
#: takes a CPU 1.05 to 4.6 times as long as its transpose: it reorders the whole kernel first, each
#: device again. With fewer rows TensorFlow has another way, and with more it no longer matters.
_FEW_ROWS = range(16, 257)


@register_layer(L.Dense)
def dense(context: Context, layer: Any, x: Any) -> Any:
    """Columns are split where the input is whole, rows where it is split already."""
    check(layer, layer.activation)
    x = context.as_numbers(x)
    axes = context.layout.asked_for(layer.kernel)
    if axes is None:
        by_columns = context.layout.can_split(layer.units)
        rows = last_is_split(x)
        axes = (MODEL if rows else None, MODEL if by_columns and not rows else None)
    x = context.with_last(x, split=axes[0] is not None)
    inputs = [x, context.weight(layer.kernel, axes)]
    output = [*x.shape.dims[:-1], context.dimension(layer.units, split=axes[1] is not None)]
    return product_and_bias(context, layer, inputs, output, axes, _times)


def _times(x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    # As Keras: one large product. A batched one is slow, its kernel's gradient most of all.
    y = _product(tf.reshape(x, [-1, x.shape[-1]]), kernel)
    return tf.reshape(y, [*x.shape[:-1], kernel.shape[-1]])


@tf.custom_gradient
def _product(x: tf.Tensor, kernel: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """x: [rows, n]; kernel: [n, m]."""

    def back(dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        if dy.shape[0] in _FEW_ROWS:
            dx = tf.transpose(tf.matmul(kernel, dy, transpose_b=True))
        else:
            dx = tf.matmul(dy, kernel, transpose_b=True)
        return dx, tf.matmul(x, dy, transpose_a=True)

    return tf.matmul(x, kernel), back


def product_and_bias(
    context: Context, layer: Any, inputs: list[Any], output: list[Any], axes: Any, product: Any
) -> Any:
    """Multiplies, adds the bias, activates; ``axes`` are those of the kernel's last two."""
    by_rows = axes[-2] is not None and context.model > 1
    bias = [context.weight(layer.bias, (axes[-1],))] if layer.use_bias else []
    fused = layer.activation if is_elementwise(layer.activation) else None

    def finish(y: tf.Tensor, *bias: tf.Tensor) -> tf.Tensor:
        y = tf.nn.bias_add(y, bias[0]) if bias else y
        return y if fused is None else fused(y)

    if by_rows:  # The devices' products add up; what is not linear comes after that.
        y = context.local(product, inputs, output, name=layer.name, partial_over=[MODEL])
        y = context.local(finish, [y, *bias], output, name=layer.name)
    else:
        y = context.local(
            lambda x, kernel, *bias: finish(product(x, kernel), *bias),
            [*inputs, *bias],
            output,
            name=layer.name,
        )
    return y if fused is not None else activate(context, layer, layer.activation, y)


@register_layer(L.TimeDistributed)
def time_distributed(context: Context, layer: Any, x: Any, mask: Any = None) -> Any:
    """A Dense has no use for the mask."""
    if type(layer.layer) is not L.Dense:
        raise UnsupportedLayerError(layer, "it is not around a Dense")
    if layer.layer.compute_dtype != layer.compute_dtype:
        raise UnsupportedLayerError(layer, "its layer computes in another precision")
    return dense(context, layer.layer, x)


@register_layer(L.Embedding)
def embedding(context: Context, layer: Any, ids: Any) -> Any:
    """The vocabulary is split: each device looks up the ids it holds, and the rest are zeros."""
    axes = context.layout.asked_for(layer.embeddings)
    if axes is None:
        axes = (MODEL if context.layout.can_split(layer.input_dim) else None, None)
    by_vocabulary = axes[0] is not None and context.model > 1
    read_as = tf.as_dtype(layer.embeddings.dtype) if CASTS_ROWS else context.compute_dtype
    with replaced(context, compute_dtype=read_as):
        table = context.weight(layer.embeddings, axes)
    output = [*ids.shape.dims, context.dimension(layer.output_dim, split=axes[1] is not None)]
    own_rows = layer.input_dim // context.model

    def look_up(table: tf.Tensor, ids: tf.Tensor, place: Any = None) -> tf.Tensor:
        if ids.dtype not in (tf.int32, tf.int64):  # As in Keras.
            ids = tf.cast(ids, tf.int32)
        if not by_vocabulary:
            return tf.gather(table, ids)
        if place == 0:  # The others on the model axis have the same ids.
            ids = _in_vocabulary(ids, layer)
        own = ids - tf.cast(place, ids.dtype) * own_rows
        is_own = (own >= 0) & (own < own_rows)
        found = tf.gather(table, tf.where(is_own, own, 0))
        return tf.where(is_own[..., None], found, tf.zeros([], table.dtype))

    found = context.local(
        look_up,
        [table, ids],
        output,
        name=layer.name,
        partial_over=[MODEL] if by_vocabulary else [],
        model_coordinate=by_vocabulary,
    )
    context.looked_up(layer.embeddings, found)
    return context.cast(found, context.compute_dtype)


def _in_vocabulary(ids: tf.Tensor, layer: Any) -> tf.Tensor:
    """Returns ids of which no device would say itself that none of them holds their rows."""
    lowest, highest = tf.reduce_min(ids), tf.reduce_max(ids)
    found = tf.strings.as_string(tf.where(lowest < 0, lowest, highest))
    # TensorFlow's own words: ``data_errors.explain_value_error`` knows them.
    told = tf.strings.join(["indices = ", found, f" is not in [0, {layer.input_dim})"])
    are_held = tf.debugging.Assert((lowest >= 0) & (highest < layer.input_dim), [told])
    with tf.control_dependencies([are_held]):
        return tf.identity(ids)


@register_layer(L.Dropout)
def dropout(context: Context, layer: Any, x: Any) -> Any:
    if layer.seed is not None:
        raise UnsupportedLayerError(
            layer, "it has a seed of its own, which belongs into tf.keras.utils.set_random_seed"
        )
    if not context.training or not layer.rate:
        return x
    number = context.next_random()
    dims = x.shape.dims
    repeated = [i for i, size in enumerate(layer.noise_shape or []) if size == 1 < dims[i].size]
    if 0 in repeated:
        raise UnsupportedLayerError(layer, "its noise_shape gives all rows the same noise")
    # Devices that hold parts of what the same noise is for draw the same.
    drawn = dims[:-1] if len(dims) - 1 in repeated else dims

    def drop(x: tf.Tensor, slice_number: Any) -> tf.Tensor:
        seed = context.random_seed(slice_number, number)
        shape = [1 if i in repeated else size for i, size in enumerate(x.shape)]
        return drop_out(x, layer.rate, seed, shape)

    return context.local(drop, [x], dims, name=layer.name, slice_number_of=drawn)


def drop_out(x: tf.Tensor, rate: float, seed: tf.Tensor, shape: Any = None) -> tf.Tensor:
    keep = tf.random.stateless_uniform(tf.shape(x) if shape is None else shape, seed) >= rate
    return tf.where(keep, x / tf.cast(1 - rate, x.dtype), tf.zeros([], x.dtype))


@register_layer(L.LayerNormalization)
def layer_normalization(context: Context, layer: Any, x: Any) -> Any:
    rank = len(x.shape.dims)
    given = layer.axis if isinstance(layer.axis, (list, tuple)) else [layer.axis]
    axes = sorted(axis % rank for axis in given)
    if 0 in axes or axes != list(range(axes[0], rank)):
        raise UnsupportedLayerError(layer, "it normalizes other dimensions than the last")
    if getattr(layer, "rms_scaling", False):  # Of Keras 3.
        raise UnsupportedLayerError(layer, "it has rms_scaling=True")
    x = context.whole(x)
    weights = [context.weight(v) for v in (layer.gamma, layer.beta) if v is not None]

    def normalize(x: tf.Tensor, *weights: tf.Tensor) -> tf.Tensor:
        wide = tf.cast(x, layer.variable_dtype)
        mean, variance = tf.nn.moments(wide, axes, keepdims=True)
        gamma, beta = scale_and_offset(layer, weights)
        y = tf.nn.batch_normalization(wide, mean, variance, beta, gamma, layer.epsilon)
        return tf.cast(y, x.dtype)

    return context.local(normalize, [x, *weights], x.shape.dims, name=layer.name)


def scale_and_offset(layer: Any, weights: Sequence[Any]) -> tuple[Any | None, Any | None]:
    """Returns gamma and beta of the weights that a layer has of both, None where it has none."""
    left = iter(weights)
    return tuple(None if own is None else next(left) for own in (layer.gamma, layer.beta))
