"""Operators between the tensors of a Keras model: ``x + y``, ``x[:, 0]``, ``tf.concat`` and such.

Keras records each as a layer of its own that holds the TensorFlow function. Each is converted only
where it is certain that it does not mix rows of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.keras.graph import is_slicing, operation_of
from tfdist.keras.tensors import is_variable
from tfdist.strategies.mesh.context import Context, has_batch, is_split, sizes_of_row
from tfdist.strategies.mesh.operations import MODEL, mtf
from tfdist.strategies.mesh.registry import UnsupportedLayerError, refuse_random_numbers

_ELEMENTWISE = {
    "__operators__.add", "__operators__.sub", "__operators__.mul", "__operators__.truediv",
    "__operators__.pow", "__operators__.neg", "__operators__.abs",
    "math.add", "math.subtract", "math.multiply", "math.divide", "math.truediv", "math.pow",
    "math.negative", "math.abs", "math.sqrt", "math.rsqrt", "math.square", "math.exp", "math.log",
    "math.tanh", "math.sigmoid", "math.softplus", "math.maximum", "math.minimum", "math.erf",
    "math.squared_difference", "nn.relu", "nn.gelu", "nn.elu", "nn.selu", "nn.silu", "nn.relu6",
    "nn.leaky_relu", "nn.softplus", "nn.tanh", "identity",
    # Masks, which a user makes of ids.
    "__operators__.eq", "__operators__.ne", "__operators__.lt", "__operators__.le",
    "__operators__.gt", "__operators__.ge", "math.equal", "math.not_equal", "math.less",
    "math.less_equal", "math.greater", "math.greater_equal", "math.logical_and",
    "math.logical_or", "math.logical_not", "__operators__.logical_and",
    "__operators__.logical_or", "__operators__.logical_not",
}  # fmt: skip
#: The operations of Keras 3 -> what they are called here.
_OF_KERAS_3 = {
    **{name: f"math.{symbol}" for name, symbol in {
        "Add": "add", "Subtract": "subtract", "Multiply": "multiply", "Divide": "divide",
        "TrueDivide": "truediv", "Power": "pow", "Negative": "negative", "Absolute": "abs",
        "Sqrt": "sqrt", "Rsqrt": "rsqrt", "Square": "square", "Exp": "exp", "Log": "log",
        "Tanh": "tanh", "Sigmoid": "sigmoid", "Softplus": "softplus", "Maximum": "maximum",
        "Minimum": "minimum", "Erf": "erf", "Equal": "equal", "NotEqual": "not_equal",
        "Less": "less", "LessEqual": "less_equal", "Greater": "greater",
        "GreaterEqual": "greater_equal", "LogicalAnd": "logical_and", "LogicalOr": "logical_or",
        "LogicalNot": "logical_not", "Mean": "reduce_mean", "Sum": "reduce_sum",
        "Max": "reduce_max", "Min": "reduce_min", "Any": "reduce_any",
    }.items()},
    **{name: f"nn.{name.lower()}" for name in ("Relu", "Gelu", "Elu", "Selu", "Silu", "Relu6")},
    "LeakyRelu": "nn.leaky_relu", "Softmax": "nn.softmax", "LogSoftmax": "nn.log_softmax",
    "Cast": "cast", "Concatenate": "concat", "ExpandDims": "expand_dims", "Reshape": "reshape",
    "Transpose": "transpose", "GetItem": "a slice",
}  # fmt: skip
_REDUCTIONS = {f"math.reduce_{name}" for name in ("mean", "sum", "max", "min", "any")}
_ALONG_AXIS = {"nn.softmax", "nn.log_softmax", "expand_dims"}
#: What gives each row of the batch its copy of a weight -> the name of its second argument.
_REPEATS = {"broadcast_to": "shape", "repeat": "repeats", "tile": "multiples"}


def convert_operator(
    context: Context, layer: Any, node: Any, arguments: Any, options: dict[str, Any]
) -> Any:
    """Returns what the operator gives: a tensor on the mesh, or a constant of constants."""
    flat = tf.nest.flatten((arguments, options))
    on_mesh = [value for value in flat if isinstance(value, mtf.Tensor)]
    name, function, settings = operation_of(layer)
    symbol = _OF_KERAS_3.get(name, name)
    if is_slicing(layer):
        spec = _argument(arguments, options, 1, "slice_spec")
        arguments, options = (arguments[0], _slices(spec)), {}
    if symbol.startswith("random.") and "stateless" not in symbol:
        refuse_random_numbers(layer)
    if not on_mesh:
        with tf.init_scope():  # Outside of the step's graph, so that its value stays known.
            return function(*arguments, **options)
    if symbol in ("shape", "compat.v1.shape"):
        with tf.init_scope():
            return tf.constant([d.size for d in on_mesh[0].shape.dims], tf.int32)
    if symbol in _ELEMENTWISE:
        return _elementwise(context, layer, node, arguments, options)
    if symbol == "cast":
        x, dtype = on_mesh[0], tf.as_dtype(_argument(arguments, settings | options, 1, "dtype"))
        return context.cast(x, dtype)
    if symbol in _REPEATS and not has_batch(on_mesh[0]):
        return _for_each_row(context, layer, arguments, options)
    if not all(has_batch(x) for x in on_mesh):
        raise UnsupportedLayerError(layer, f"it is {symbol} of a tensor without a batch (a weight)")
    made = node.outputs.shape if hasattr(node.outputs, "shape") else ()
    _check_keeps_rows(layer, symbol, arguments, settings | options, on_mesh[0], made)
    if any(_has_rows(value, context.batch.size) for value in flat):
        raise UnsupportedLayerError(layer, "one operand has a row for each record, but is constant")
    if symbol == "reshape":
        function, arguments, options = tf.reshape, (on_mesh[0], [-1, *made[1:]]), {}
    return _each_row(context, layer, function, node, arguments, options)


def _elementwise(
    context: Context, layer: Any, node: Any, arguments: Any, options: dict[str, Any]
) -> Any:
    structure = (list(arguments), dict(options))
    flat = tf.nest.flatten(structure)
    places = [i for i, value in enumerate(flat) if _is_operand(value)]
    batches = [x for x in flat if isinstance(x, mtf.Tensor) and has_batch(x)]
    rank = max(len(flat[i].shape) for i in places)
    if any(len(x.shape) < rank for x in batches):
        raise UnsupportedLayerError(layer, "its operands have different numbers of dimensions")
    others = [flat[i] for i in places if not isinstance(flat[i], mtf.Tensor)]
    if batches and any(len(x.shape) == rank and x.shape[0] != 1 for x in others):
        raise UnsupportedLayerError(layer, "one operand has a row for each record, but is constant")
    tensors, output = aligned(context, [flat[i] for i in places])
    run = _on_slices(operation_of(layer)[1], structure, places)
    return context.local(run, tensors, output, dtype=node.outputs.dtype, name=layer.name)


def _has_rows(value: Any, rows: int) -> bool:
    is_constant = isinstance(value, (tf.Tensor, np.ndarray)) and len(value.shape) > 1
    return is_constant and rows > 1 and value.shape[0] == rows


def _is_operand(value: Any) -> bool:
    if isinstance(value, mtf.Tensor) or is_variable(value):
        return True
    return hasattr(value, "shape") and len(value.shape) > 0


def _each_row(
    context: Context,
    layer: Any,
    function: Callable[..., Any],
    node: Any,
    arguments: Any,
    options: dict[str, Any],
) -> Any:
    structure = (list(arguments), dict(options))
    flat = tf.nest.flatten(structure)
    places = [i for i, value in enumerate(flat) if isinstance(value, mtf.Tensor)]
    tensors = [context.whole(flat[i]) for i in places]
    symbol = node.outputs
    if not hasattr(symbol, "shape") or None in symbol.shape[1:] or symbol.shape[0] is not None:
        raise UnsupportedLayerError(layer, "it does not give one tensor [batch, ...]")

    run = _on_slices(function, structure, places)
    output = context.dimensions(list(symbol.shape[1:]))
    return context.local(run, tensors, output, dtype=symbol.dtype, name=layer.name)


def _on_slices(
    function: Callable[..., Any], structure: Any, places: list[int]
) -> Callable[..., tf.Tensor]:
    """Returns an operator as a function of what stands in ``places`` of its flat arguments."""

    def run(*slices: tf.Tensor) -> tf.Tensor:
        values = tf.nest.flatten(structure)
        for place, tensor in zip(places, slices, strict=True):
            values[place] = tensor
        positional, named = tf.nest.pack_sequence_as(structure, values)
        return function(*positional, **named)

    return run


def _for_each_row(context: Context, layer: Any, arguments: Any, options: dict[str, Any]) -> Any:
    """Gives each row of the batch its copy of a weight [1, ...]: a class token."""
    x = context.whole(arguments[0])
    counts = _argument(arguments, options, 1, _REPEATS[layer.symbol])
    axis = _argument(arguments, options, 2, "axis") if layer.symbol == "repeat" else 0
    known = not any(isinstance(count, mtf.Tensor) for count in tf.nest.flatten(counts))
    rows, *others = np.ravel(counts).tolist() if known else [None]
    if x.shape.dims[0].size != 1 or rows != context.batch.size or axis != 0:
        raise UnsupportedLayerError(
            layer, f"it is {layer.symbol} of a weight, but not from 1 to tf.shape(x)[0] rows"
        )

    def one(x: tf.Tensor) -> tf.Tensor:
        return (x if layer.symbol == "repeat" else layer.function(x, [1, *others]))[0]

    with tf.init_scope():
        sizes = one(tf.zeros([d.size for d in x.shape.dims])).shape
    row = context.local(one, [x], context.dims_like(sizes, []), name=layer.name)
    return mtf.broadcast(row, mtf.Shape([context.batch, *row.shape.dims]))


def _check_keeps_rows(
    layer: Any, symbol: str, arguments: Any, options: dict[str, Any], x: Any, made: Any
) -> None:
    """Raises UnsupportedLayerError unless each row of the output comes from its own row.

    Args:
        made: shape of the output.
    """
    rank = len(x.shape.dims)
    if symbol in _REDUCTIONS:
        axis = _argument(arguments, options, 1, "axis")
        kept = axis is not None and all(a % rank for a in tf.nest.flatten(axis))
    elif symbol in _ALONG_AXIS:
        axis = _argument(arguments, options, 1, "axis")
        if axis is None and "axis" not in vars(layer):  # In Keras 3 it means all of them.
            axis = -1
        axes = tf.nest.flatten(axis)
        kept = axis is not None and all(a > 0 or -rank + 1 <= a < 0 for a in axes)
    elif symbol == "concat":
        kept = _argument(arguments, options, 1, "axis") % rank != 0
    elif symbol == "transpose":
        perm = _argument(arguments, options, 1, "axes" if "axes" in options else "perm")
        kept = perm is not None and next(iter(perm)) == 0
    elif symbol == "reshape":
        sizes = list(made[1:])  # One that is not known is refused as such.
        kept = None in sizes or math.prod(sizes_of_row(x)) == math.prod(sizes)
    elif is_slicing(layer):
        spec = _argument(arguments, options, 1, "slice_spec")
        first = spec[0] if isinstance(spec, (tuple, list)) else spec
        kept = first is Ellipsis or (isinstance(first, slice) and first == slice(None))
    else:
        raise UnsupportedLayerError(layer, f"its operator {symbol} is not known")
    if not kept:
        raise UnsupportedLayerError(layer, f"its {symbol} works over the rows of the batch")


def _slices(spec: Any) -> Any:
    """Returns the slices that Keras has written as dictionaries."""
    if isinstance(spec, dict):
        return slice(spec["start"], spec["stop"], spec["step"])
    return tuple(_slices(item) for item in spec) if isinstance(spec, (tuple, list)) else spec


def _argument(arguments: Any, options: dict[str, Any], place: int, name: str) -> Any:
    return (
        options[name] if name in options else (arguments[place] if len(arguments) > place else None)
    )


def aligned(context: Context, operands: list[Any]) -> tuple[list[Any], list[Any]]:
    """Returns operands whose slices broadcast as the whole tensors would, and the output's dims.

    Args:
        operands: tensors on the mesh, at least one of them a batch; weights (tf.Variable) and
            constants beside them.
    """
    on_mesh = [x for x in operands if isinstance(x, mtf.Tensor)]
    shapes = [_shape(x) for x in operands]
    rank = max(len(shape) for shape in shapes)
    sizes = [
        max(shape[-place] if place <= len(shape) else 1 for shape in shapes)
        for place in range(rank, 0, -1)
    ]
    # The last dimension stays split only where every operand is split alike, or repeats it.
    lasts = [x.shape.dims[-1] for x in on_mesh if x.shape.dims]
    keep = all(is_split(d) for d in lasts if d.size == sizes[-1])
    keep = keep and any(is_split(d) for d in lasts)
    if not keep:
        on_mesh = [context.whole(x) for x in on_mesh]
    if any(has_batch(x) for x in on_mesh):
        output = context.dimensions(sizes[1:], split_last=keep)
    else:
        output = context.dims_like(sizes, list(on_mesh[0].shape.dims))
    moved = iter(on_mesh)
    result = []
    for x in operands:
        if isinstance(x, mtf.Tensor):
            result.append(next(moved))
        elif is_variable(x):
            dims = context.dims_like(x.shape, output)
            axes = tuple(MODEL if is_split(d) else None for d in dims)
            result.append(context.weight(x, axes))
        else:
            result.append(context.constant(x, output))
    return result, output


def _shape(x: Any) -> list[int]:
    if isinstance(x, mtf.Tensor):
        return [dimension.size for dimension in x.shape.dims]
    return list(x.shape if is_variable(x) else tf.convert_to_tensor(x).shape)
