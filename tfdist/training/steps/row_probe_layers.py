"""Layers that see the rows of a batch together: of parts of a batch they make other rows.

A layer is tried on the inputs that it gets from a whole batch and on the same inputs in parts. The
layers behind it get what the whole batch made in any case, so that each is judged by itself and
none for what stands before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat import is_keras
from tfdist.keras.layers import called_in, held_by, layers_in, replaced
from tfdist.keras.seeds import seeds_in
from tfdist.keras.tensors import all_raw, uncast
from tfdist.training.engine.binding import held_of
from tfdist.training.layers.losses import own_functions

# What a layer calls that is given the rows of all replicas.
ASKS_ALL = {"all_gather", "all_reduce", "allgather", "allreduce", "_allgather", "_allreduce"}
# Of the largest output. Another order of summation is 1e-6 of it in float32; what is computed in
# 16 bits is rounded more coarsely on the way.
_TOLERANCE = 1e-3
_OF_16_BITS = {"bfloat16": 0.05, "float16": 0.01}


@dataclass(frozen=True)
class Parted:
    """A layer whose outputs of the same rows are others when the batch is divided.

    Attributes:
        name: the layer's.
        difference: the largest of its outputs, as a part of the largest output.
    """

    name: str
    difference: float


def own_layers(model: tf.keras.Model) -> list[tf.keras.layers.Layer]:
    """Returns the layers of ``model``, itself among them, that a user has written.

    Not those that ask all replicas themselves.
    """
    return [layer for layer in layers_in(model) if _is_own(layer)]


def tolerance_of(model: tf.keras.Model) -> float:
    """Returns what values of the same rows may differ by, as a part of the largest."""
    computed_in = {getattr(layer, "compute_dtype", None) for layer in layers_in(model)}
    return max([_TOLERANCE, *(_OF_16_BITS[each] for each in computed_in & set(_OF_16_BITS))])


def _is_own(layer: Any) -> bool:
    if isinstance(layer, tf.keras.layers.Lambda):
        return True
    if is_keras(type(layer).__module__):
        return False
    used = own_functions(layer, tf.keras.layers.Layer)
    return "call" in used and not any(ASKS_ALL & names for names in used.values())


def parted(
    model: tf.keras.Model,
    x: Any,
    parts: Sequence[slice],
    tried: Sequence[tf.keras.layers.Layer],
) -> list[Parted]:
    """Returns those of ``tried`` that see rows together, in the order in which they are called.

    Layers that draw random numbers are left out: what they give differs each time.

    Args:
        model: built; its state stays as it is.
        x: a batch as the model takes it, tensors [rows, ...].
        parts: of its rows, each row in one of them.
        tried: layers of ``model``; they run as in training, the others as in inference.
    """
    if not tried:
        return []
    walk = Walk(model, tried)
    walk.run(x, walk.record)
    walk.run(x, walk.compare_to(slice(None)))
    draws = set(walk.differences)
    walk.differences.clear()
    for part in parts:
        of_part = tf.nest.map_structure(lambda tensor, part=part: tensor[part], x)
        walk.run(of_part, walk.compare_to(part))
    return [
        Parted(layer.name, walk.differences[id(layer)])
        for layer in walk.in_order
        if id(layer) in walk.differences and id(layer) not in draws
    ]


class Walk:
    """Runs a model, with a hand on the call of each of its layers."""

    def __init__(self, model: tf.keras.Model, tried: Sequence[tf.keras.layers.Layer]):
        self._model = model
        self._tried = {id(layer) for layer in tried}
        self._outputs: dict[tuple[int, int], Any] = {}
        self._calls: dict[int, int] = {}
        self._tolerance = tolerance_of(model)
        self.in_order: list[tf.keras.layers.Layer] = []
        self.differences: dict[int, float] = {}

    def run(self, x: Any, taken: Callable[[Any, int, Any], Any]) -> Any:
        """Calls the model; what a layer gives goes through ``taken(layer, call, outputs)``."""
        with state_kept(self._model), self.during(taken):
            return self._model(x, training=False)

    @contextlib.contextmanager
    def during(self, taken: Callable[[Any, int, Any], Any]) -> Iterator[None]:
        """Encloses calls of the model, or of layers in it, which may move its state.

        Args:
            taken: of ``run``.
        """
        self._calls.clear()
        with self._calls_replaced(taken):
            yield

    def record(self, layer: Any, call: int, outputs: Any) -> Any:
        self._outputs[id(layer), call] = outputs
        if all(layer is not known for known in self.in_order):
            self.in_order.append(layer)
        return outputs

    def compare_to(self, part: slice) -> Callable[[Any, int, Any], Any]:
        """Returns what compares outputs with the recorded ones of ``part``, and gives these on."""

        def compare(layer: Any, call: int, outputs: Any) -> Any:
            whole = self._outputs[id(layer), call]
            tf.nest.assert_same_structure(whole, outputs)
            flat = list(zip(tf.nest.flatten(whole), tf.nest.flatten(outputs), strict=True))
            if id(layer) in self._tried:
                worst = max((difference(a, b, part) for a, b in flat), default=0.0)
                if worst > self._tolerance:
                    self.differences[id(layer)] = max(worst, self.differences.get(id(layer), 0.0))
            given = [a[part] if _has_rows(a, b, part) else b for a, b in flat]
            return tf.nest.pack_sequence_as(outputs, given)

        return compare

    @contextlib.contextmanager
    def _calls_replaced(self, taken: Callable[[Any, int, Any], Any]) -> Iterator[None]:
        with contextlib.ExitStack() as meanwhile:
            for layer in called_in(self._model):
                call = self._replaced(layer, layer.call, taken)
                meanwhile.enter_context(replaced(layer, call=call))
            yield

    def _replaced(
        self, layer: Any, call: Callable, taken: Callable[[Any, int, Any], Any]
    ) -> Callable:
        def called(*args: Any, **options: Any) -> Any:
            number = self._calls.get(id(layer), 0)
            self._calls[id(layer)] = number + 1
            if options.get("training") is not None:
                options["training"] = id(layer) in self._tried
            return taken(layer, number, call(*args, **options))

        return called


@contextlib.contextmanager
def state_kept(model: tf.keras.Model, *, trained: bool = False) -> Iterator[None]:
    """Gives statistics, counters and seeds back what they were; ``trained``: weights, too."""
    state = [*(model.weights if trained else model.non_trainable_weights), *seeds_in(model)]
    for layer in layers_in(model):
        state += held_by(layer, tf.Variable)
        state += [generator.state for generator in held_by(layer, tf.random.Generator)]
    state = all_raw(held_of(model, state))  # What replicas divide is changed by no call.
    left_out = set() if trained else {id(v) for v in all_raw(model.trainable_weights)}
    found = {id(v): v for v in state if isinstance(v, tf.Variable) and id(v) not in left_out}
    kept = [own for variable in found.values() for own in _on_replicas(variable)]
    before = [variable.numpy() for variable in kept]
    try:
        yield
    finally:
        for variable, value in zip(kept, before, strict=True):
            variable.assign(value)


def _on_replicas(variable: tf.Variable) -> Sequence[tf.Variable]:
    """Returns the variables that replicas in this process have: as one, all of them exchange it."""
    variable = uncast(variable)
    return variable.values if isinstance(variable, tf.distribute.DistributedValues) else [variable]


def _has_rows(whole: Any, of_part: Any, part: slice) -> bool:
    """Whether the first dimension of outputs counts the rows of a batch."""
    if not (tf.is_tensor(whole) and tf.is_tensor(of_part) and whole.shape.rank):
        return False
    return whole[part].shape == of_part.shape


def difference(whole: Any, of_part: Any, part: slice) -> float:
    if not _has_rows(whole, of_part, part) or not whole.dtype.is_floating:
        return 0.0
    whole, of_part = (np.asarray(tensor, np.float64) for tensor in (whole[part], of_part))
    largest = np.max(np.abs(whole), initial=1e-6)
    return float(np.max(np.abs(whole - of_part), initial=0.0) / largest)
