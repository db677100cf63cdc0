"""Activation functions: which of them a device can apply to the part it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.strategies.mesh.context import Context
from tfdist.strategies.mesh.registry import UnsupportedLayerError

_keras = tf.keras.activations

#: Functions of each element by itself.
ELEMENTWISE = {
    _keras.elu,
    _keras.exponential,
    _keras.gelu,
    _keras.hard_sigmoid,
    _keras.linear,
    _keras.mish,
    _keras.relu,
    _keras.selu,
    _keras.sigmoid,
    _keras.softplus,
    _keras.softsign,
    _keras.swish,
    _keras.tanh,
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
_ALONG_LAST = {_keras.softmax, tf.nn.softmax, tf.nn.log_softmax}


def check(layer: Any, function: Callable | None) -> None:
    """Raises UnsupportedLayerError for a function that is not known to be one of each row."""
    if function is None or function in ELEMENTWISE or function in _ALONG_LAST:
        return
    raise UnsupportedLayerError(
        layer,
        f"its activation {getattr(function, '__name__', function)!r} is not one of Keras' own",
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
