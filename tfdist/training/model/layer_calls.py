"""A Keras model as a row of layer calls, which can be cut between any two."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from tfdist.errors import ModelError, in_one_line
from tfdist.keras.graph import (
    CAN_FIX_TRAINING,
    hand_on_masks,
    has_graph,
    input_names,
    nodes_of,
    opens,
    run_in_order,
)
from tfdist.keras.layers import layers_in, trained_in, variables_in

# Weight, gradient, and two slots of an optimizer such as Adam.
_COPIES_OF_WEIGHTS = 4


@dataclass(frozen=True)
class Call:
    """One call of a layer.

    Attributes:
        layer: it may be called at several places of a model.
        inputs, outputs: symbolic tensors, as in ``model.inputs``.
        infers: whether the call is fixed to inference, ``layer(x, training=False)``.
        path: names of the nested models that the call stands in, then that of its layer.
    """

    layer: tf.keras.layers.Layer
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    infers: bool
    path: tuple[str, ...]

    @property
    def name(self) -> str:
        """The path as a user writes it: "backbone/conv1"."""
        return "/".join(self.path)

    def is_called(self, name: str) -> bool:
        """Whether a user means this call, or a nested model that it stands in, by ``name``."""
        names = {"/".join(self.path[:end]) for end in range(1, len(self.path) + 1)}
        return name in names or name == self.path[-1]

    @property
    def flops(self) -> float:
        """An estimate of the operations of one row forward: products of weights, and elements."""
        produced = sum(_elements(tensor) for tensor in self.outputs)
        if isinstance(self.layer, tf.keras.layers.Embedding):
            return produced
        positions = max(
            math.prod(_sizes(tensor)[:-1]) if len(_sizes(tensor)) > 1 else 1
            for tensor in self.outputs
        )
        matrices = [w for w in variables_in(self.layer) if w.shape.rank >= 2]
        return 2.0 * positions * sum(_count(w) for w in matrices) + produced

    @property
    def weight_bytes(self) -> int:
        return sum(_count(w) * w.dtype.size for w in variables_in(self.layer))

    @property
    def row_bytes(self) -> int:
        """Bytes of what the call produces from one row, kept for the way back."""
        return sum(map(_bytes, self.outputs))

    @property
    def state_bytes(self) -> int:
        """Bytes of weights with their gradients and slots."""
        trained = sum(_count(w) * w.dtype.size for w in trained_in(self.layer))
        return self.weight_bytes + trained * (_COPIES_OF_WEIGHTS - 1)

    def memory_bytes(self, rows: int) -> int:
        return self.state_bytes + self.row_bytes * rows


def _count(variable: tf.Variable) -> int:
    """Returns the elements of a variable; one of unknown shape, as of Discretization, has few."""
    return variable.shape.num_elements() or 0


def _sizes(tensor: Any) -> list[int]:
    return [size or 1 for size in tensor.shape[1:]]


def _elements(tensor: Any) -> int:
    return math.prod(_sizes(tensor))


def _bytes(tensor: Any) -> int:
    return _elements(tensor) * tf.as_dtype(tensor.dtype).size


@dataclass(frozen=True)
class Graph:
    """The layer calls of a model in an order that runs; nested models are taken apart.

    Attributes:
        inputs, outputs: symbolic tensors, in the order of the model's.
    """

    calls: tuple[Call, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]

    @property
    def names(self) -> list[str]:
        return [call.name for call in self.calls]

    def with_first(self, numbers: Sequence[int]) -> Graph:
        """Returns the same calls with those of ``numbers``, which read no others, before them."""
        rest = [number for number in range(len(self.calls)) if number not in set(numbers)]
        return replace(self, calls=tuple(self.calls[number] for number in (*numbers, *rest)))


def model_of(
    calls: Sequence[Call], inputs: Sequence[Any], outputs: Sequence[Any]
) -> tf.keras.Model:
    """Returns a model of these calls, which it makes in this order.

    The order is seen where a layer is called at several places, as its statistics move each time.
    """
    try:
        model = tf.keras.Model(list(inputs), list(outputs))
    except ValueError as error:  # Keras 3 takes a second call of the first layer for the input.
        raise ModelError(
            "a part of a model must not begin with a layer that is called in it once more",
            received=f"Keras says: {in_one_line(error)}",
            mend="Make a layer for each call, or cut the model elsewhere",
        ) from error
    hand_on_masks(model)
    parts = [id(part) for call in calls for part in layers_in(call.layer)]
    if len(set(parts)) < len(parts):
        place_of = {id(t): place for place, call in enumerate(calls) for t in call.outputs}
        run_in_order(model, outputs, place_of)
    return model


def graph_of(model: tf.keras.Model, *, needed_by: str, otherwise: str) -> Graph:
    """Returns the calls of a Functional or Sequential model.

    Args:
        needed_by: what needs them, for people.
        otherwise: what to do with other models.

    Raises:
        ModelError: the model is of another kind.
    """
    if not has_graph(model):
        raise ModelError(
            f"{needed_by} must have a Functional or Sequential model, since it cuts between layers",
            received=f"model '{model.name}' of class {type(model).__name__}",
            mend=f"Write it as keras.Model(inputs, outputs), or {otherwise}",
        )
    calls: list[Call] = []
    tensors = {id(tensor): tensor for tensor in model.inputs}
    _collect(model, tensors, (), None, calls)
    outputs = tuple(tensors[id(tensor)] for tensor in model.outputs)
    return Graph(tuple(calls), tuple(model.inputs), outputs)


def _collect(
    model: tf.keras.Model,
    tensors: dict[int, Any],
    path: tuple[str, ...],
    training: bool | None,
    calls: list[Call],
) -> None:
    """Appends the calls of ``model`` to ``calls``.

    Args:
        tensors: id of a symbolic tensor of ``model`` -> that tensor in the outermost model; its
            inputs are known, the others are added.
        training: to which the call of ``model`` is fixed, if it is.
    """
    for node in nodes_of(model):
        mapped = [tensors[id(tensor)] for tensor in node.keras_inputs]
        own_training = _training_of(node)
        own_training = training if own_training is None else own_training
        produced = tf.nest.flatten(node.outputs)
        if _opens(node, mapped):
            inner = {id(t): m for t, m in zip(node.layer.inputs, mapped, strict=True)}
            _collect(node.layer, inner, (*path, node.layer.name), own_training, calls)
            outputs = [inner[id(tensor)] for tensor in node.layer.outputs]
        else:
            outputs = produced
            if path or any(t is not m for t, m in zip(node.keras_inputs, mapped, strict=True)):
                outputs = _called_again(node, tensors, own_training)
            calls.append(
                Call(
                    layer=node.layer,
                    inputs=tuple(mapped),
                    outputs=tuple(outputs),
                    infers=own_training is False,
                    path=(*path, node.layer.name),
                )
            )
        tensors.update({id(t): m for t, m in zip(produced, outputs, strict=True)})


def _opens(node: Any, given: list[Any]) -> bool:
    """Whether the called layer is a model whose layers can be called one by one instead."""
    more = {**node.call_kwargs, "training": None}
    if not opens(node.layer) or any(value is not None for value in tf.nest.flatten(more)):
        return False
    inputs = node.layer.inputs
    # Keras casts and reshapes what does not fit; inner layers alone would not.
    return len(inputs) == len(given) and all(
        wanted.dtype == tensor.dtype and len(wanted.shape) == len(tensor.shape)
        for wanted, tensor in zip(inputs, given, strict=True)
    )


def _called_again(node: Any, tensors: dict[int, Any], training: bool | None) -> list[Any]:
    """Calls the layer of ``node`` in the outermost model; returns the outputs."""
    args, options = tf.nest.map_structure(
        lambda value: tensors.get(id(value), value), (node.call_args, node.call_kwargs)
    )
    if training is not None and "training" in inspect.signature(node.layer.call).parameters:
        places = arguments_of(node.layer)[: len(args)]
        if "training" in places:
            place = places.index("training")
            args = (*args[:place], training, *args[place + 1 :])
        else:  # By its name: RNNs take others by place than their call, Keras 3 tensors alone.
            options = {**options, "training": training}
    return tf.nest.flatten(node.layer(*args, **options))


def _training_of(node: Any) -> Any:
    """Returns to what a call is fixed: ``layer(x, training=False)``, or ``layer(x, False)``."""
    if not CAN_FIX_TRAINING:
        return None
    if len(node.call_args) < 2:
        return node.call_kwargs.get("training")
    names = arguments_of(node.layer)
    return {**dict(zip(names, node.call_args, strict=False)), **node.call_kwargs}.get("training")


def arguments_of(layer: Any) -> list[str]:
    """Returns the arguments of a layer that have places of their own: no "*tensors"."""
    known = inspect.signature(layer.call).parameters.values()
    return [each.name for each in known if each.kind is each.POSITIONAL_OR_KEYWORD]


def normalizes(call: Call) -> bool:
    """Whether ``call`` is a BatchNormalization that takes its statistics from the batch."""
    is_norm = isinstance(call.layer, tf.keras.layers.BatchNormalization)
    return is_norm and call.layer.trainable and not call.infers


def crossing_bytes(calls: Sequence[Call], cut: int) -> int:
    """Returns the bytes of one row that cross a cut before call number ``cut``."""
    before = {id(t): t for call in calls[:cut] for t in call.outputs}
    needed = {id(t) for call in calls[cut:] for t in call.inputs}
    return sum(_bytes(t) for key, t in before.items() if key in needed)


def inputs_of(model: tf.keras.Model, x: Any) -> list[tf.Tensor]:
    """Returns the features in the order and the types of the model's inputs."""
    flat = (
        [x[name] for name in input_names(model)] if isinstance(x, Mapping) else tf.nest.flatten(x)
    )
    fitted = []
    for tensor, wanted in zip(flat, model.inputs, strict=True):
        given = tf.cast(tensor, wanted.dtype)
        if given.shape.rank == len(wanted.shape) - 1:  # As Keras does with a column of numbers.
            given = tf.expand_dims(given, -1)
        fitted.append(given)
    return fitted
