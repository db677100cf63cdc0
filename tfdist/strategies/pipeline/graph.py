"""A Keras model as a row of layer calls, which a pipeline can cut between any two."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.errors import ModelError

# Weight, gradient, and two slots of an optimizer such as Adam.
_COPIES_OF_WEIGHTS = 4


@dataclass(frozen=True)
class Call:
    """One call of a layer.

    Attributes:
        layer: it may be called at several places of a model.
        inputs, outputs: symbolic tensors, as in ``model.inputs``.
        infers: whether the call is fixed to inference, ``layer(x, training=False)``.
    """

    layer: tf.keras.layers.Layer
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    infers: bool

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
        matrices = [weight for weight in self.layer.weights if weight.shape.rank >= 2]
        return 2.0 * positions * sum(math.prod(w.shape) for w in matrices) + produced

    @property
    def weight_bytes(self) -> int:
        return sum(math.prod(w.shape) * w.dtype.size for w in self.layer.weights)

    @property
    def row_bytes(self) -> int:
        """Bytes of what the call produces from one row, kept for the way back."""
        return sum(_elements(tensor) * tensor.dtype.size for tensor in self.outputs)

    def memory_bytes(self, rows: int) -> int:
        return self.weight_bytes * _COPIES_OF_WEIGHTS + self.row_bytes * rows


def _sizes(tensor: Any) -> list[int]:
    return [size or 1 for size in tensor.shape[1:]]


def _elements(tensor: Any) -> int:
    return math.prod(_sizes(tensor))


def calls_of(model: tf.keras.Model) -> list[Call]:
    """Returns the calls of a Functional or Sequential model's layers, in an order that runs.

    Raises:
        ModelError: the model is of another kind, or holds what no stage can run by itself.
    """
    # Keras has no public reader of the graph of layers.
    by_depth = getattr(model, "_nodes_by_depth", None)
    if not by_depth:
        raise ModelError(
            "a pipeline needs a Functional or Sequential model: it cuts between layers",
            received=f"model '{model.name}' of class {type(model).__name__}",
            mend="Write it as keras.Model(inputs, outputs), or use strategy 'mirrored'",
        )
    calls = []
    for depth in sorted(by_depth, reverse=True):
        for node in by_depth[depth]:
            if node.is_input:
                continue
            calls.append(
                Call(
                    layer=node.layer,
                    inputs=tuple(node.keras_inputs),
                    outputs=tuple(tf.nest.flatten(node.outputs)),
                    infers=node.call_kwargs.get("training") is False,
                )
            )
    return calls


def normalizes(call: Call) -> bool:
    """Whether ``call`` is a BatchNormalization that takes its statistics from the batch."""
    is_norm = isinstance(call.layer, tf.keras.layers.BatchNormalization)
    return is_norm and call.layer.trainable and not call.infers


def crossing_bytes(calls: list[Call], cut: int) -> int:
    """Returns the bytes of one row that cross a cut before call number ``cut``."""
    before = {id(t): t for call in calls[:cut] for t in call.outputs}
    needed = {id(t) for call in calls[cut:] for t in call.inputs}
    return sum(_elements(t) * t.dtype.size for key, t in before.items() if key in needed)
