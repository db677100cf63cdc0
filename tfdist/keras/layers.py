"""Layers, what they keep, and the graph that a model is of them."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.compat import keras_source
from tfdist.keras import step_context
from tfdist.keras.tensors import all_raw
from tfdist.keras.version import IS_KERAS_3

#: Whether a layer's variable can say how replicas share it.
CAN_SAY_AGGREGATION = not IS_KERAS_3


def layers_in(layer: tf.keras.layers.Layer) -> list[tf.keras.layers.Layer]:
    """Returns ``layer`` and all layers inside of it or of a model, at any depth.

    ``layer.submodules`` would fail on recurrent layers with dropout, whose cache of masks it
    cannot walk through; Keras' own walk has no public name. An operation of Keras 3 has none.
    """
    return list(layer._flatten_layers()) if isinstance(layer, tf.keras.layers.Layer) else []


def called_in(model: tf.keras.Model) -> list[Any]:
    """Returns the layers in ``model``, and what Keras 3 calls between them, as keras.ops.mean."""
    layers = layers_in(model)
    between = [item for layer in layers for item in getattr(layer, "operations", ())]
    return list({id(item): item for item in (*layers, *between)}.values())


def variables_in(layer: tf.keras.layers.Layer) -> list[tf.Variable]:
    """Returns the weights of ``layer`` that are variables.

    Keras counts a vocabulary among the weights of a lookup layer: a table, which has no shape.
    Keras 3 wraps its variables into its own, which no engine knows, and its operations have none.
    """
    weights = all_raw(getattr(layer, "weights", ()))
    return [weight for weight in weights if isinstance(weight, tf.Variable)]


def held_by(layer: tf.keras.layers.Layer, kind: type) -> list[Any]:
    """Returns what of a kind a layer has for itself: Keras 3 knows of no tf.Variable there."""
    found = []
    for value in vars(layer).values():
        each = value.values() if isinstance(value, dict) else value
        items = each if isinstance(value, (dict, list, tuple)) else [value]
        found += [item for item in items if isinstance(item, kind)]
    return found


def vocabularies_in(model: tf.keras.Model) -> list[Any]:
    """Returns what holds the words that each lookup layer of ``model`` has adapted to.

    Each has ``get_tensors() -> [words]`` and ``set_weights([words])``. A vocabulary that a layer
    was given is none of them, nor are those of Keras 3.
    """
    others = (weight for weight in model.weights if not isinstance(weight, tf.Variable))
    return [weight for weight in others if hasattr(weight, "get_tensors")]


def is_built(model: tf.keras.Model) -> bool:
    """Whether the weights of ``model`` are there.

    Keras takes a model of submodels that is never called for not built, though all of them are;
    Keras 3 takes a model of its own class for built whose layers are not.
    """
    if model.built and (not IS_KERAS_3 or getattr(model, "inputs", None)):
        return True
    inner = layers_in(model)[1:]
    return bool(inner) and all(layer.built for layer in inner)


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
    outputs: list[Any]
    call_args: tuple[Any, ...]
    call_kwargs: dict[str, Any]


def _graph_in(model: tf.keras.Model) -> Any:
    """Returns what has the graph of a model of Keras 3: a Sequential one keeps another in it."""
    return getattr(model, "_functional", None) or model


def nodes_of(model: tf.keras.Model) -> list[Any]:
    """Returns the calls of layers in the graph of ``model``, in an order in which they can run.

    A node has ``layer``, ``outputs``, ``keras_inputs``, ``call_args`` and ``call_kwargs``, and in
    Keras 2 ``map_arguments``.
    """
    nodes = _raw_nodes_of(model)
    if not IS_KERAS_3:
        return nodes
    return [
        _Node(
            node.operation,
            node.input_tensors,
            node.outputs,
            node.arguments.args,
            node.arguments.kwargs,
        )
        for node in nodes
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


def _maker(tensor: Any) -> Any:
    history = tensor._keras_history
    layer = history.operation if IS_KERAS_3 else history.layer
    return layer._inbound_nodes[history.node_index]


def num_readers(model: tf.keras.Model, symbol: Any) -> int:
    """Returns how often the graph of ``model`` reads a symbolic tensor, its outputs included."""
    return model._tensor_usage_count[str(id(symbol))]


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
    return list(tf.nest.flatten(model._flatten_to_reference_inputs(x)))


def conformed_inputs(model: tf.keras.Model, x: Any) -> list[tf.Tensor]:
    """Returns ``x`` flat, cast and reshaped as Keras does before it calls the layers."""
    pairs = zip(flat_inputs(model, x), model.inputs, strict=True)
    return [model._conform_to_reference_input(tensor, symbol) for tensor, symbol in pairs]


def is_operator(layer: Any) -> bool:
    """Whether ``layer`` stands for an operation that a user wrote on symbolic tensors."""
    kinds = keras_source("layers.core.tf_op_layer")
    return isinstance(layer, (kinds.TFOpLambda, kinds.SlicingOpLambda))


def is_slicing(layer: Any) -> bool:
    """Whether that operation is a slice, as ``x[:, 0]``."""
    return isinstance(layer, keras_source("layers.core.tf_op_layer").SlicingOpLambda)


def takes_mask(layer: Any) -> bool:
    """Whether Keras hands the mask of its input to the ``call`` of ``layer``."""
    return layer._expects_mask_arg


def makes_mask(layer: Any) -> bool | None:
    """Whether ``layer`` makes the mask of its outputs itself; None: they have none.

    False: it hands on that of its input.
    """
    if not layer.supports_masking:
        return None
    return type(layer).compute_mask is not tf.keras.layers.Layer.compute_mask


def casts_inputs(layer: tf.keras.layers.Layer) -> bool:
    """Whether ``layer`` casts floating inputs to its compute dtype."""
    return layer._autocast


def random_generator(layer: tf.keras.layers.Layer) -> Any | None:
    """Returns the object that all random numbers of ``layer`` come from, None without one."""
    return getattr(layer, "_random_generator", None)


def num_added_losses(layer: tf.keras.layers.Layer) -> int:
    """Returns how many losses ``layer`` itself adds, those of regularizers included."""
    return len(layer._get_regularization_losses() if IS_KERAS_3 else layer._callable_losses)


def merged(layer: tf.keras.layers.Layer, inputs: list[tf.Tensor]) -> tf.Tensor:
    """Returns what a layer as Add or Maximum makes of inputs whose shapes are equal."""
    return layer._merge_function(inputs)


def causal_padding(layer: tf.keras.layers.Layer, x: tf.Tensor) -> list[list[int]]:
    """Returns what a Conv1D with ``padding="causal"`` gives to ``tf.pad`` before it convolves."""
    return layer._compute_causal_padding(x)


class Attention(NamedTuple):
    """The parts of a MultiHeadAttention.

    Attributes:
        projections: the layers that make query, key and value; kernels [features, heads, size].
        output: the layer after them; kernel [heads, size, features].
        num_heads: how many.
        key_dim: size of a head's query and key.
        use_bias: whether these layers have biases.
        dropout: rate at which attention is dropped.
        axes: of the input that attention is over; None for all between batch and features.
    """

    projections: tuple[Any, Any, Any]
    output: Any
    num_heads: int
    key_dim: int
    use_bias: bool
    dropout: float
    axes: tuple[int, ...] | None


def attention_of(layer: tf.keras.layers.MultiHeadAttention) -> Attention:
    """Returns the parts of ``layer``, which must have been called."""
    return Attention(
        projections=(layer._query_dense, layer._key_dense, layer._value_dense),
        output=layer._output_dense,
        num_heads=layer._num_heads,
        key_dim=layer._key_dim,
        use_bias=layer._use_bias,
        dropout=layer._dropout,
        axes=layer._attention_axes,
    )


def input_names(model: tf.keras.Model) -> list[str]:
    """Returns the names of the inputs, by which a dict of features is read; Keras 3 has no list."""
    return [symbol.name for symbol in model.inputs] if IS_KERAS_3 else list(model.input_names)


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


def keeps_unbiased_variance(layer: tf.keras.layers.BatchNormalization) -> bool:
    """Whether ``layer`` moves its variance by the unbiased one of a batch.

    Keras 2 does so in its fused kernel, which Keras 3 does not have.
    """
    return bool(getattr(layer, "fused", False))


def seeds_in(model: tf.keras.Model) -> list[tf.Variable]:
    """Returns what the random numbers of layers are drawn from, and counts them, in Keras 3."""
    return [generator.state.value for generator in _generators_in(model)]


def shared_seed() -> tf.Variable | None:
    """Returns what ``keras.random`` draws from where it is given no seed; None before it does."""
    if not IS_KERAS_3:
        return None
    state = keras_source("backend.common.global_state")
    generator = state.get_global_attribute("global_seed_generator")
    return None if generator is None else generator.state.value


#: What is to be put in the place of attributes: their owner, and the values by their names.
Replacement = tuple[Any, dict[str, Any]]


def draws_by_step(model: tf.keras.Model) -> list[Replacement]:
    """Has the layers of ``model`` draw the random numbers that a step tells them to draw."""
    return [
        (generator, {"next": _by_step(generator.next)})
        for generator in _generators_in(model)
        if "next" not in vars(generator)
    ]


def _generators_in(model: tf.keras.Model) -> list[Any]:
    if not IS_KERAS_3:
        return []
    return [generator for layer in layers_in(model) for generator in layer._seed_generators]


def _by_step(given: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    def next_seed(*args: Any, **options: Any) -> tf.Tensor:
        seeds, draw = step_context.current().seeds, functools.partial(given, *args, **options)
        return draw() if seeds is None else seeds(draw)

    return next_seed


def drawing_on(replica: Callable[[], Any]) -> contextlib.AbstractContextManager:
    """Returns what encloses a forward pass that draws other random numbers on each replica.

    The first draws what one device does. In Keras 3 the seeds are variables, which are the same on
    all replicas.
    """

    def seed_of(draw: Callable[[], tf.Tensor]) -> tf.Tensor:
        seed = draw()
        number = tf.cast(replica(), seed.dtype)
        return seed + tf.stack([number, tf.zeros_like(number)])

    return step_context.within(seeds=seed_of)


def keeping_seeds(kept: list[tf.Tensor]) -> contextlib.AbstractContextManager:
    """Returns what encloses a forward pass whose seeds are ``kept``, to be drawn once more."""
    given = step_context.current().seeds

    def seed_of(draw: Callable[[], tf.Tensor]) -> tf.Tensor:
        kept.append(draw() if given is None else given(draw))
        return kept[-1]

    return step_context.within(seeds=seed_of)


def losses_apart(model: tf.keras.Model) -> list[Replacement]:
    """Has the losses that layers add belong to the thread of the replica that added them.

    Keras 3 keeps them in a list of the layer, and empties that when a replica begins its forward
    pass. Replicas that wait for each other within it would take each other's for their own.
    """
    if not IS_KERAS_3:
        return []
    return [
        (layer, {"_losses": _OfThread()})
        for layer in layers_in(model)
        if not isinstance(layer._losses, _OfThread)
    ]


class _OfThread:
    """What Keras does with a list of losses, on one of each thread's own."""

    def __init__(self) -> None:
        self._kept = threading.local()

    def _own(self) -> list[Any]:
        if not hasattr(self._kept, "losses"):
            self._kept.losses = []
        return self._kept.losses

    def extend(self, losses: Iterable[Any]) -> None:
        self._own().extend(losses)

    def clear(self) -> None:
        self._own().clear()

    def __getitem__(self, place: Any) -> Any:
        return self._own()[place]
