"""Layers that each device computes whole for its rows: recurrent ones, and rarer convolutions.

Their weights are whole on each device, and Keras' own ``call`` runs with them.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.keras.layers import layers_in, sizes_after_all, weights_in
from tfdist.strategies.mesh.context import Context, sizes_of_row
from tfdist.strategies.mesh.registry import (
    UnsupportedLayerError,
    check_channels_last,
    register_layer,
)
from tfdist.training.layers.randomness import drawing_layers

L = tf.keras.layers

#: Each gives one tensor of one, row by row.
_OF_ONE = (
    L.AveragePooling3D,
    L.Conv1DTranspose,
    L.Conv2DTranspose,
    L.Conv3D,
    L.Conv3DTranspose,
    L.Cropping1D,
    L.Cropping2D,
    L.Cropping3D,
    L.DepthwiseConv1D,
    L.GlobalAveragePooling3D,
    L.GlobalMaxPooling3D,
    L.GroupNormalization,
    L.MaxPooling3D,
    L.Normalization,
    L.PReLU,
    L.Resizing,
    L.CenterCrop,
    L.SeparableConv1D,
    L.SeparableConv2D,
    L.UnitNormalization,
    L.UpSampling1D,
    L.UpSampling3D,
    L.ZeroPadding3D,
)
_RECURRENT = (
    L.Bidirectional,
    L.ConvLSTM1D,
    L.ConvLSTM2D,
    L.GRU,
    L.LSTM,
    L.RNN,
    L.SimpleRNN,
)
_CELLS = (L.GRUCell, L.LSTMCell, L.SimpleRNNCell, L.StackedRNNCells)


@register_layer(*_OF_ONE)
def of_one(context: Context, layer: Any, x: Any) -> Any:
    _check(context, layer)
    axes = getattr(layer, "axis", None)
    if isinstance(layer, L.UnitNormalization) and 0 in [
        axis % len(x.shape.dims) for axis in tf.nest.flatten(axes)
    ]:
        raise UnsupportedLayerError(layer, "it normalizes over the rows of the batch")
    return _run(context, layer, [x], lambda _: {})


@register_layer(*_RECURRENT)
def recurrent(
    context: Context, layer: Any, x: Any, mask: Any = None, initial_state: Any = None
) -> Any:
    """x: [batch, time, ...]; mask: [batch, time]; states as Keras' own call takes them."""
    _check(context, layer)
    for part in layers_in(layer):
        if getattr(part, "stateful", False):
            raise UnsupportedLayerError(layer, "it keeps a state from batch to batch")
        cells = getattr(part, "cell", None)
        if type(part) is L.RNN and not all(type(cell) in _CELLS for cell in layers_in(cells)):
            raise UnsupportedLayerError(layer, "its cell is none of Keras' own")
    # Keras hands states over beside the input, where they come from other layers.
    x, *states = [*x, initial_state] if isinstance(x, (list, tuple)) else [x, initial_state]
    states = [state for state in tf.nest.flatten(states) if state is not None]
    masks = [] if mask is None else [mask]

    def options(given: list[tf.Tensor]) -> dict[str, Any]:
        named = {"mask": given.pop(0)} if masks else {}
        return {**named, "initial_state": given} if states else named

    return _run(context, layer, [x, *masks, *states], options)


def _check(context: Context, layer: Any) -> None:
    check_channels_last(layer)
    inner = [part for part in layers_in(layer) if part is not layer]
    if any(part.compute_dtype != layer.compute_dtype for part in inner):
        raise UnsupportedLayerError(layer, "a layer inside of it computes in another precision")
    if context.training and drawing_layers(layer):
        raise UnsupportedLayerError(
            layer, "it draws random numbers: use Dropout before or after it"
        )


# How they run -----------------------------------------------------------------------------------


def _run(context: Context, layer: Any, inputs: list[Any], options: Any) -> Any:
    """Returns what ``layer.call`` makes of ``inputs``: a tensor, or a list of them.

    Args:
        options: the slices of all inputs but the first -> further arguments of the call.
    """
    inputs = [context.whole(x) for x in inputs]
    variables = weights_in(layer)
    weights = [context.weight(variable) for variable in variables]
    shapes = sizes_after_all(layer, sizes_of_row(inputs[0]))
    training = {}
    if "training" in inspect.signature(layer.call).parameters:
        training = {"training": context.training}

    def run(*slices: tf.Tensor) -> tf.Tensor:
        x, *more = slices[: len(inputs)]
        tensors = dict(zip(map(id, variables), slices[len(inputs) :], strict=True))
        with _weights_as(layer, tensors):
            made = tf.nest.flatten(layer.call(x, **options(more), **training))
        if len(made) == 1:
            return made[0]
        return tf.concat([tf.reshape(each, [tf.shape(x)[0], -1]) for each in made], 1)

    counts = [math.prod(shape) for shape in shapes]
    sizes = shapes[0] if len(shapes) == 1 else [sum(counts)]
    dtype = context.compute_dtype
    y = context.local(
        run, [*inputs, *weights], context.dimensions(sizes), dtype=dtype, name=layer.name
    )
    if len(shapes) == 1:
        return y
    ends = list(itertools.accumulate(counts))
    return [
        context.local(
            lambda y, begin=end - count, end=end, shape=shape: tf.reshape(
                y[:, begin:end], [-1, *shape]
            ),
            [y],
            context.dimensions(shape),
            name=layer.name,
        )
        for shape, count, end in zip(shapes, counts, ends, strict=True)
    ]


@contextlib.contextmanager
def _weights_as(layer: Any, tensors: dict[int, tf.Tensor]) -> Iterator[None]:
    """Lets a layer, and those inside of it, read ``tensors`` in place of the weights of these ids.

    Not by ``setattr``, with which Keras would forget the weights.
    """
    found = [
        (vars(part), name, value)
        for part in layers_in(layer)
        for name, value in vars(part).items()
        if id(value) in tensors
    ]
    for attributes, name, value in found:
        attributes[name] = tensors[id(value)]
    try:
        yield
    finally:
        for attributes, name, value in found:
            attributes[name] = value
