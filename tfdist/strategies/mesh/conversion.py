"""Walks the graph of a Keras model and converts it, layer by layer."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import keras
from tfdist.compat import is_keras
from tfdist.keras.layers import layers_in
from tfdist.keras.tensors import is_variable
from tfdist.strategies.mesh import masks
from tfdist.strategies.mesh.context import Context, has_batch, last_is_split, sizes_of_row
from tfdist.strategies.mesh.operations import mtf, without_log
from tfdist.strategies.mesh.operators import convert_operator
from tfdist.strategies.mesh.registry import UnsupportedLayerError, refuse_random_numbers, rule_of
from tfdist.training.layers.randomness import drawing_layers, unseeded

# Where the functional form of a composite layer is kept: (training, shapes, ...) -> model. A trace
# within a step would read weights, which brings them to the host: see ``HostWeights``.
_TRACES = "_tfdist_mesh_traces"


def convert(
    model: tf.keras.Model,
    context: Context,
    inputs: list[Any],
    *,
    fixes_training: bool = keras.graph.CAN_FIX_TRAINING,
) -> list[Any]:
    """Returns the outputs of ``model`` on the mesh, flat, for flat ``inputs`` on the mesh.

    Args:
        fixes_training: whether a call with ``training=False`` is one in inference.

    Raises:
        UnsupportedLayerError: a layer that has no conversion.
    """
    # The traversal of Keras' own Functional._run_internal_graph.
    if not keras.graph.has_graph(model):
        raise _without_graph(model)
    values: dict[int, Any] = {}

    def put(symbols: Any, results: Any) -> None:
        symbols, results = tf.nest.flatten(symbols), tf.nest.flatten(results)
        assert len(symbols) == len(results), (symbols, results)
        for symbol, result in zip(symbols, results, strict=True):
            values[id(symbol)] = result

    put(model.inputs, inputs)
    for node in keras.graph.nodes_of(model):
        arguments, options = keras.graph.arguments_of_call(node, values)
        put(node.outputs, _call(context, node, arguments, options, fixes_training=fixes_training))
    return [values[id(symbol)] for symbol in tf.nest.flatten(model.outputs)]


def _without_graph(model: tf.keras.Model) -> UnsupportedLayerError:
    return UnsupportedLayerError(
        model,
        "it is a model of a class of its own, without a graph of layers that could be divided",
        "Make it a Functional model, or train on mirrored, horovod or multi_worker, which take it "
        "as it is; shard='optimizer' and precision= save memory there",
    )


def _call(
    context: Context, node: Any, arguments: Any, options: dict[str, Any], *, fixes_training: bool
) -> Any:
    layer = node.layer
    if keras.graph.is_operator(layer):
        return convert_operator(context, layer, node, arguments, options)
    arguments, options, mask = masks.apart(layer, arguments, options)
    options = {name: value for name, value in options.items() if value is not None}
    training = options.pop("training", None)
    if not fixes_training:
        training = None
    given = arguments
    before = context.training
    if training and not context.training and _is_other_in_training(layer):
        raise UnsupportedLayerError(
            layer,
            "it is called with training=True, which holds in evaluate and predict, too",
            "Leave training=True out of its call, or train on mirrored, horovod or multi_worker",
        )
    if training is not None:
        context.training = context.training and bool(training)
    with context.computing_as(layer):
        if keras.layers.casts_inputs(layer):
            arguments = tf.nest.map_structure(lambda x: _autocast(context, x), arguments)
        result = _call_layer(context, layer, arguments, options, mask)
        masks.of_outputs(context, layer, given, result, mask)
    _add_activity_loss(context, layer, result)
    context.training = before
    return result


def _is_other_in_training(layer: Any) -> bool:
    parts = layers_in(layer)
    normalizes = any(isinstance(part, tf.keras.layers.BatchNormalization) for part in parts)
    is_own = any(not is_keras(type(part).__module__) for part in parts)
    return normalizes or is_own or bool(drawing_layers(layer))


def _autocast(context: Context, value: Any) -> Any:
    if isinstance(value, mtf.Tensor) and value.dtype.is_floating:
        cast = context.cast(value, context.compute_dtype)
        if value in context.masks:
            context.masks[cast] = context.masks[value]
        return cast
    return value


def _call_layer(
    context: Context, layer: Any, arguments: Any, options: dict[str, Any], mask: Any
) -> Any:
    rule = rule_of(layer)
    has_graph = keras.graph.has_graph(layer)
    is_own = rule is None and not has_graph
    if is_own and isinstance(mask, mtf.Tensor) and masks.is_next(layer, arguments):
        return _call_composite(context, layer, [*arguments, mask], options)  # It reads the mask.
    is_ended = mask is None
    mask = masks.for_call(context, layer, arguments, options, mask)
    if rule is not None and "mask" in inspect.signature(rule).parameters:
        options = {**options, **({} if mask is None else {"mask": mask})}
    elif mask is not None:
        raise UnsupportedLayerError(layer, "it is called with a mask")
    if rule is not None:
        inner = layers_in(layer)[1:]
        if any(getattr(part, "activity_regularizer", None) is not None for part in inner):
            raise UnsupportedLayerError(layer, "a layer inside of it has an activity regularizer")
        if changed := next(filter(None, map(keras.layers.changed_kernel, layers_in(layer))), None):
            raise UnsupportedLayerError(layer, f"it has {changed}")
        arguments = tf.nest.map_structure(lambda x: _on_mesh(context, layer, x), arguments)
        return rule(context, layer, *arguments, **options)
    if has_graph:
        inputs = keras.graph.flat_inputs(layer, arguments[0])
        if is_ended:  # What its layers are given has no mask.
            inputs = [context.local(tf.identity, [x], x.shape.dims) for x in inputs]
        outputs = convert(layer, context, inputs)
        return tf.nest.pack_sequence_as(keras.graph.nested_outputs(layer), outputs)
    return _call_composite(context, layer, arguments, options)


#: Layers that keep the dimensions of their input, so it may be one without a batch (positions).
_ALSO_WITHOUT_BATCH = (
    tf.keras.layers.Activation,
    tf.keras.layers.Dense,
    tf.keras.layers.Dropout,
    tf.keras.layers.Embedding,
    tf.keras.layers.LayerNormalization,
)


def _on_mesh(context: Context, layer: Any, value: Any) -> Any:
    if isinstance(value, tf.Tensor):
        value = context.constant(value)
    lacks_batch = isinstance(value, mtf.Tensor) and not has_batch(value)
    if lacks_batch and not isinstance(layer, _ALSO_WITHOUT_BATCH):
        raise UnsupportedLayerError(layer, "it is called on a tensor without a batch")
    return value


# Composite layers -------------------------------------------------------------------------------


def _call_composite(context: Context, layer: Any, arguments: Any, options: dict[str, Any]) -> Any:
    """Converts a layer of the user's by the layers and operators that its ``call`` uses."""
    module = type(layer).__module__
    # Layers that models of the zoo bring along are made of others, like a user's.
    is_own = is_keras(module) and ".applications." not in module
    is_own = is_own or module.startswith("tensorflow.")
    if isinstance(layer, tf.keras.Model):
        raise _without_graph(layer)
    if is_own or isinstance(layer, tf.keras.layers.RNN):
        raise UnsupportedLayerError(layer, "it has no conversion")
    tensors = tf.nest.flatten(arguments)
    others = tf.nest.flatten(options)
    is_known = tensors and all(isinstance(value, mtf.Tensor) for value in tensors)
    if not is_known or any(isinstance(value, mtf.Tensor) for value in others):
        raise UnsupportedLayerError(
            layer, "its call takes something else than tensors of the model"
        )
    model, constants = _trace(context, layer, arguments, options)
    weights = [context.weight(variable) for variable in _own_weights(layer).values()]
    constants = [context.constant(value) for value in constants]
    inputs = [*tensors, *weights, *constants]
    outputs = convert(model, context, inputs, fixes_training=True)  # As its call runs there.
    return tf.nest.pack_sequence_as(keras.graph.nested_outputs(model), outputs)


class _OnConstants:
    """A sublayer that may be called on a constant: its weights then stay in the graph.

    Keras would run it at once, and ``tf.range(n)`` of positions would leave a constant table.
    """

    def __init__(self, layer: Any, found: list[tuple[Any, Any]]):
        self._layer = layer
        self._found = found

    def __call__(self, inputs: Any, *args: Any, **options: Any) -> Any:
        if isinstance(inputs, (tf.Tensor, np.ndarray)):
            value = tf.convert_to_tensor(inputs)
            inputs = tf.keras.Input(batch_shape=value.shape, dtype=value.dtype)
            self._found.append((inputs, value))
        return self._layer(inputs, *args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _own_layers(layer: Any) -> dict[str, Any]:
    """Returns the layers with weights that are attributes of the layer itself: name -> layer."""
    return {
        name: sublayer
        for name, sublayer in vars(layer).items()
        if isinstance(sublayer, tf.keras.layers.Layer) and sublayer.weights
    }


def _own_weights(layer: Any) -> dict[str, tf.Variable]:
    """Returns the weights that are attributes of the layer itself: name -> weight."""
    return {name: v for name, v in vars(layer).items() if is_variable(v)}


def _refuse_added(layer: Any) -> Callable:
    def refuse(*_: Any, **__: Any) -> None:
        raise UnsupportedLayerError(layer, "its call adds a loss or a metric")

    return refuse


def _trace(
    context: Context, layer: Any, arguments: Any, options: dict[str, Any]
) -> tuple[tf.keras.Model, list[tf.Tensor]]:
    """Returns ``layer.call`` as a functional model over the layer's own sublayers and weights.

    Its inputs are those of the layer, then its weights, then the constants that are returned too.
    """
    traces = layer.__dict__.setdefault(_TRACES, {})
    flat = tf.nest.flatten(arguments)
    shapes = tuple(tuple(sizes_of_row(x)) for x in flat)
    # Its settings may be others when the next step is traced; "_self_" are TensorFlow's own.
    settings = {
        name: value
        for name, value in vars(layer).items()
        if isinstance(value, (bool, int, float, str)) and not name.startswith("_self_")
    }
    dtypes = tuple(x.dtype for x in flat)
    key = (context.training, shapes, dtypes, repr(options), repr(settings))
    if key not in traces:
        options = dict(options)
        if "training" in inspect.signature(layer.call).parameters:
            options["training"] = context.training
        own = _own_weights(layer)
        sublayers = _own_layers(layer)
        found: list[tuple[Any, Any]] = []
        try:
            with tf.init_scope():  # Symbols are Keras' own: they belong to no graph.
                symbols = [
                    tf.keras.Input(shape, dtype=x.dtype)
                    for shape, x in zip(shapes, flat, strict=True)
                ]
                # An operator would take a weight's value for a constant; a symbol it follows.
                weights = {
                    name: tf.keras.Input(batch_shape=v.shape, dtype=context.dtype_of(v))
                    for name, v in own.items()
                }
                refused = dict.fromkeys(("add_loss", "add_metric"), _refuse_added(layer))
                wrapped = {name: _OnConstants(s, found) for name, s in sublayers.items()}
                vars(layer).update(weights | refused | wrapped)
                given = tf.nest.pack_sequence_as(arguments, symbols)
                call = functools.partial(layer.call, *given, **options)
                if _draws(call):
                    refuse_random_numbers(layer)
                found.clear()
                outputs = call()
                inputs = [*symbols, *weights.values(), *(symbol for symbol, _ in found)]
                with without_log():  # Weights have no batch: their first dimensions differ.
                    model = tf.keras.Model(inputs, outputs)
        except UnsupportedLayerError:
            raise
        except Exception as error:  # Whatever a user's own code raises on symbols.
            lines = str(error).strip().splitlines() or [repr(error)]
            raise UnsupportedLayerError(
                layer, f"its call does not work on Keras' symbolic tensors: {' '.join(lines[:3])}"
            ) from error
        finally:
            for name in ("add_loss", "add_metric"):
                vars(layer).pop(name, None)
            vars(layer).update(own | sublayers)
        traces[key] = model, [value for _, value in found]
    return traces[key]


def _draws(call: Callable[[], Any]) -> bool:
    """Whether a call draws numbers beside its symbols: when it is traced, once for all steps."""

    def run() -> None:
        call()

    try:
        graph = tf.function(run, autograph=False).get_concrete_function().graph
    except Exception:  # What works eagerly alone tells nothing.
        return False
    return bool(unseeded(graph, graph.get_operations()))


# Regularizers of activations --------------------------------------------------------------------


def _add_activity_loss(context: Context, layer: Any, outputs: Any) -> None:
    regularizer = getattr(layer, "activity_regularizer", None)
    if regularizer is None:
        return
    if type(regularizer) not in SEPARABLE_REGULARIZERS:
        raise UnsupportedLayerError(layer, "its activity regularizer is none of L1, L2 and L1L2")
    for y in tf.nest.flatten(outputs):
        context.losses.append(_mean_over_rows(context, regularizer, y))


#: Sums over elements: the parts of the devices add up.
SEPARABLE_REGULARIZERS = (
    tf.keras.regularizers.L1,
    tf.keras.regularizers.L2,
    tf.keras.regularizers.L1L2,
)


def _mean_over_rows(context: Context, regularizer: Any, y: Any) -> Any:
    by_rows = has_batch(y)  # Else all devices hold the same: positions, which are Keras' rows.
    mask = context.row_mask(y.dtype) if by_rows else None
    # Of padding alone there is nothing to divide.
    rows = float(max(1, context.num_rows) if by_rows else y.shape.dims[0].size)

    def penalty(y: tf.Tensor, *mask: tf.Tensor) -> tf.Tensor:
        if mask:
            y *= tf.reshape(mask[0], [-1] + [1] * (y.shape.rank - 1))
        return tf.reshape(regularizer(y) / rows, [1])

    axes = [axis for axis, divides in (("batch", by_rows), ("model", last_is_split(y))) if divides]
    inputs = [y] if mask is None else [y, mask]
    return context.local(penalty, inputs, [context.dimension(1)], partial_over=axes)
