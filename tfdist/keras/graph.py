"""The graph that a model is of its layers, and the tensors that go in and out of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.compat import keras_source
from tfdist.keras.version import IS_KERAS_3

#: Whether a call in the graph of a model can be fixed to inference: a model of Keras 3 tells all
#: layers whether it is in training.
CAN_FIX_TRAINING = not IS_KERAS_3


def has_graph(model: Any) -> bool:
    """Whether ``model`` is a Functional or Sequential model that knows its graph of layers."""
    if IS_KERAS_3:
        kinds = tf.keras.Sequential, _functional()
        graph = _graph_in(model)
        return isinstance(graph, kinds[1]) and any(type(model).call is kind.call for kind in kinds)
    return bool(getattr(model, "_is_graph_network", False))


def opens(layer: Any) -> bool:
    """Whether ``layer`` is a model that does what its graph says and no more.

    Functional has no public name. A subclass may do more in its call.
    """
    return type(layer) in (tf.keras.Sequential, _functional()) and has_graph(layer)


def _functional() -> type:
    name = "models.functional" if IS_KERAS_3 else "engine.functional"
    return keras_source(name).Functional


class _Node(NamedTuple):
    """A call in the graph of a model of Keras 3, by the names of Keras 2."""

    layer: Any
    keras_inputs: list[Any]
    outputs: Any
    call_args: tuple[Any, ...]
    call_kwargs: dict[str, Any]


def _graph_in(model: tf.keras.Model) -> Any:
    """Returns what has the graph of a model of Keras 3: a Sequential one keeps another in it."""
    return getattr(model, "_functional", None) or model


def nodes_of(model: tf.keras.Model) -> list[Any]:
    """Returns the calls of layers in the graph of ``model``, in an order in which they can run.

    A node has ``layer``, ``outputs``, ``keras_inputs``, ``call_args`` and ``call_kwargs``.
    """
    nodes = _raw_nodes_of(model)
    if not IS_KERAS_3:
        return nodes
    return [
        _Node(
            n.operation,
            n.input_tensors,
            n.outputs[0] if len(n.outputs) == 1 else n.outputs,
            n.arguments.args,
            n.arguments.kwargs,
        )
        for n in nodes
    ]


def _raw_nodes_of(model: tf.keras.Model) -> list[Any]:
    by_depth = _graph_in(model)._nodes_by_depth
    depths = sorted(by_depth, reverse=True)
    return [node for depth in depths for node in by_depth[depth] if not node.is_input]


def run_in_order(model: tf.keras.Model, outputs: Sequence[Any], place_of: dict[int, int]) -> None:
    """Has a Functional model that was made of a part of another one call layers in its order.

    Keras orders the calls anew, from the outputs on.

    Args:
        outputs: those that it was made with.
        place_of: id of a symbolic tensor of the other model -> the place of the call that makes it.
    """
    places: dict[int, int] = {}
    pairs = list(zip(model.outputs, outputs, strict=True))
    while pairs:
        own, others = (_maker(tensor) for tensor in pairs.pop())
        if own.is_input or id(own) in places:
            continue
        places[id(own)] = place_of[id(tf.nest.flatten(others.outputs)[0])]
        name = "input_tensors" if IS_KERAS_3 else "keras_inputs"
        pairs += zip(getattr(own, name), getattr(others, name), strict=True)
    by_depth = model._nodes_by_depth
    inputs = [node for nodes in by_depth.values() for node in nodes if node.is_input]
    calls = sorted(_raw_nodes_of(model), key=lambda node: places[id(node)])
    in_order = enumerate([inputs, *([node] for node in calls)])
    # Set so, Keras 3 does not look for layers in it.
    vars(model)["_nodes_by_depth"] = {len(calls) - place: nodes for place, nodes in in_order}


def hand_on_masks(model: tf.keras.Model) -> None:
    """Has a Functional model of Keras 3 leave the masks of its outputs to its layers; it would warn
    of every mask that it is given."""
    if IS_KERAS_3:
        model.supports_masking = True
        model.compute_mask = lambda inputs, previous_mask: None


def _maker(tensor: Any) -> Any:
    history = tensor._keras_history
    layer = history.operation if IS_KERAS_3 else history.layer
    return layer._inbound_nodes[history.node_index]


def arguments_of_call(node: Any, values: dict[int, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the arguments of a call in a graph, and those given by name.

    Args:
        values: id of a symbolic tensor -> what stands in its place.
    """
    return tf.nest.map_structure(
        lambda value: values.get(id(value), value), (list(node.call_args), dict(node.call_kwargs))
    )


def nested_inputs(model: tf.keras.Model) -> Any:
    """Returns the symbolic inputs in the structure in which the model takes them."""
    return _graph_in(model)._inputs_struct if IS_KERAS_3 else model._nested_inputs


def nested_outputs(model: tf.keras.Model) -> Any:
    """Returns the symbolic outputs in the structure in which the model gives them."""
    if not IS_KERAS_3:
        return model._nested_outputs
    outputs = _graph_in(model)._outputs_struct
    is_one = isinstance(outputs, (list, tuple)) and len(outputs) == 1
    return outputs[0] if is_one else outputs


def flat_inputs(model: tf.keras.Model, x: Any) -> list[Any]:
    """Returns ``x``, in any structure that the model takes, in the order of ``model.inputs``."""
    if IS_KERAS_3:
        return [x[n] for n in input_names(model)] if isinstance(x, dict) else tf.nest.flatten(x)
    return list(tf.nest.flatten(model._flatten_to_reference_inputs(x)))


def conformed_inputs(model: tf.keras.Model, x: Any) -> list[tf.Tensor]:
    """Returns ``x`` flat, cast and reshaped as Keras does before it calls the layers."""
    if IS_KERAS_3:
        return list(_graph_in(model)._standardize_inputs(x))
    pairs = zip(flat_inputs(model, x), model.inputs, strict=True)
    return [model._conform_to_reference_input(tensor, symbol) for tensor, symbol in pairs]


def is_operator(layer: Any) -> bool:
    """Whether ``layer`` stands for an operation that a user wrote on symbolic tensors."""
    if IS_KERAS_3:
        return not isinstance(layer, tf.keras.layers.Layer)
    kinds = keras_source("layers.core.tf_op_layer")
    return isinstance(layer, (kinds.TFOpLambda, kinds.SlicingOpLambda))


def operation_of(layer: Any) -> tuple[str, Callable[..., Any], dict[str, Any]]:
    """Returns the name of that operation, its function, and settings that this does not take.

    Those of Keras 3 are named by their classes: "Mean", with the axis for a setting; one that is
    not Keras' own with its module.
    """
    if not IS_KERAS_3:
        return layer.symbol, layer.function, {}
    kind = type(layer)
    is_own = kind.__module__.startswith("keras.src.ops.")
    name = kind.__name__ if is_own else f"{kind.__module__}.{kind.__name__}"
    return name, layer.call, dict(vars(layer))


def is_slicing(layer: Any) -> bool:
    """Whether that operation is a slice, as ``x[:, 0]``."""
    if IS_KERAS_3:
        return operation_of(layer)[0] == "GetItem"
    return isinstance(layer, keras_source("layers.core.tf_op_layer").SlicingOpLambda)


def undense(symbol: Any) -> str | None:
    """Returns of which kind a symbolic tensor is that is sparse or ragged; None of a dense one."""
    if not IS_KERAS_3:
        kind = type(symbol.type_spec)
        return None if kind is tf.TensorSpec else kind.__name__
    return "sparse" if symbol.sparse else "ragged" if symbol.ragged else None


def input_names(model: tf.keras.Model) -> list[str]:
    """Returns the names of the inputs, by which a dict of features is read.

    Keras 3 has no list; inputs that a model was given as a dict are read by their keys.
    """
    if not IS_KERAS_3:
        return list(model.input_names)
    given = nested_inputs(model)
    keys = {id(symbol): key for key, symbol in given.items()} if isinstance(given, dict) else {}
    return [keys.get(id(symbol), symbol.name) for symbol in model.inputs]


def called_with(model: tf.keras.Model) -> list[Any] | None:
    """Returns specs of the arguments that a model of a class of its own was called with.

    None before its first call. Keras 3 takes all inputs for floating-point.
    """
    if not IS_KERAS_3:
        saved = model.save_spec()
        return None if saved is None else list(saved[0])
    if not model._called:
        return None
    specs = keras_source("export.export_utils").get_input_signature(model)
    return tf.nest.map_structure(lambda spec: tf.TensorSpec(spec.shape, spec.dtype), specs)


def output_names(model: tf.keras.Model) -> list[str]:
    """Returns the names of the outputs; none where a model has no graph."""
    return list(getattr(_graph_in(model), "output_names", None) or [])


def layer_of_scope(scope: str, names: Collection[str]) -> str | None:
    """Returns which of the layers called ``names`` a part of an operation's name is of.

    Keras 3 opens the scope of a layer twice for a call, so that TensorFlow numbers the second one.
    """
    plain = re.sub(r"_\d+$", "", scope) if IS_KERAS_3 else scope
    return next((name for name in (plain, scope) if name in names), None)
