"""Activations, reshapes and merges: layers without weights; which activations a device can apply to
the part it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.keras.layers import merged
from tfdist.strategies.mesh.context import Context, sizes_after, sizes_of_row
from tfdist.strategies.mesh.operators import aligned
from tfdist.strategies.mesh.registry import UnsupportedLayerError, register_layer

_keras = tf.keras.activations

#: Functions of each element by itself.
ELEMENTWISE = {
    *(
        getattr(_keras, name)
        for name in (
            *("elu", "exponential", "gelu", "hard_sigmoid", "linear", "mish", "relu", "selu"),
            *("sigmoid", "softplus", "softsign", "swish", "tanh"),
            # Of Keras 3.
            *("celu", "hard_shrink", "hard_tanh", "leaky_relu", "log_sigmoid", "relu6", "silu"),
            *("soft_shrink", "squareplus", "tanh_shrink"),
            *("hard_silu", "sparse_plus", "sparse_sigmoid", "threshold"),
        )
        if hasattr(_keras, name)
    ),
    tf.math.sigmoid,
    tf.math.softplus,
    tf.math.tanh,
    tf.nn.elu,
    tf.nn.gelu,
    tf.nn.leaky_relu,
    tf.nn.relu,
    tf.nn.relu6,
    tf.nn.selu,
    tf.nn.silu,
    tf.nn.softsign,
}
#: Functions along the last dimension, which is brought together for them.
_ALONG_LAST = {_keras.softmax, tf.nn.softmax, tf.nn.log_softmax} | (
    {_keras.log_softmax} if hasattr(_keras, "log_softmax") else set()
)


def check(layer: Any, function: Callable | None) -> None:
    """Raises UnsupportedLayerError for a function that is not known to be one of each row."""
    if function is None or function in ELEMENTWISE or function in _ALONG_LAST:
        return
    raise UnsupportedLayerError(
        layer,
        f"its activation {getattr(function, '__name__', function)!r} is none that a mesh knows",
    )


def is_elementwise(function: Callable | None) -> bool:
    return function is None or function in ELEMENTWISE


def activate(context: Context, layer: Any, function: Callable | None, x: Any) -> Any:
    """Returns ``function(x)`` on the mesh."""
    check(layer, function)
    if function is None or function is _keras.linear:
        return x
    if not is_elementwise(function):
        x = context.whole(x)
    return context.local(function, [x], x.shape.dims, name="activation")


L = tf.keras.layers


@register_layer(L.Activation)
def activation(context: Context, layer: Any, x: Any) -> Any:
    return activate(context, layer, layer.activation, x)


@register_layer(L.ELU, L.LeakyReLU, L.ReLU, L.Rescaling, L.ThresholdedReLU)
def elementwise(context: Context, layer: Any, x: Any) -> Any:
    """Layers of each element by itself: Keras' own call, on each device."""
    if isinstance(layer, L.Rescaling):
        for value in (layer.scale, layer.offset):
            if tf.convert_to_tensor(value).shape.rank:
                x = context.whole(x)
        x = context.cast(x, context.compute_dtype)
    return context.local(layer.call, [x], x.shape.dims, name=layer.name)


@register_layer(L.Flatten, L.Masking, L.Permute, L.RepeatVector, L.Reshape, L.Softmax)
def each_row(context: Context, layer: Any, x: Any, mask: Any = None) -> Any:
    """Layers of each row by itself, whose last dimension is brought together."""
    if isinstance(layer, L.Softmax):
        axes = layer.axis if isinstance(layer.axis, (tuple, list)) else [layer.axis]
        if any(axis % len(x.shape.dims) == 0 for axis in axes):
            raise UnsupportedLayerError(layer, "it is a softmax over the batch")
    x = context.whole(x)
    masks = [] if mask is None else [context.whole(mask)]  # Only Softmax is given one.
    output = context.dimensions(sizes_after(layer, x))
    return context.local(layer.call, [x, *masks], output, name=layer.name)


@register_layer(L.Add, L.Average, L.Maximum, L.Minimum, L.Multiply, L.Subtract)
def merge(context: Context, layer: Any, inputs: Any) -> Any:
    ranks = {len(x.shape.dims) for x in inputs}
    if len(ranks) > 1:
        raise UnsupportedLayerError(layer, "its inputs have different numbers of dimensions")
    tensors, output = aligned(context, list(inputs))
    return context.local(
        lambda *slices: merged(layer, list(slices)), tensors, output, name=layer.name
    )


@register_layer(L.Concatenate)
def concatenate(context: Context, layer: Any, inputs: Any) -> Any:
    axis = layer.axis % len(inputs[0].shape.dims)
    if axis == 0:
        raise UnsupportedLayerError(layer, "it joins along the batch")
    tensors = [context.whole(x) for x in inputs]
    sizes = sizes_of_row(tensors[0])
    sizes[axis - 1] = sum(x.shape.dims[axis].size for x in tensors)
    output = context.dimensions(sizes)
    return context.local(lambda *parts: tf.concat(parts, axis), tensors, output, name=layer.name)
