"""What a user's own layers keep from step to step beside their weights, as a running mean.

So may a model, whose compute_loss moves it.

Each replica moves it by its own rows. A state that is a mean over rows is made that of the global
batch after each step: the replicas' states, each by its rows. Which states are such is tried on a
few made-up rows before the first step, as in ``row_probe``. BatchNormalization is Keras' own, and
has its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import ModelError
from tfdist.keras.layers import CAN_SAY_AGGREGATION, held_by, layers_in
from tfdist.keras.tensors import raw
from tfdist.training.engine.metrics import state_of
from tfdist.training.steps.row_probe_layers import Walk, own_layers, state_kept

# Of the largest change. Another order of summation is 1e-6 of it.
_TOLERANCE = 1e-3


@dataclass(frozen=True, eq=False)
class Moved:
    """A variable of a layer that a step of training moves.

    Attributes:
        layer: the name of the layer.
        variable: what it moves.
        is_alike: whether all rows move it alike, as a count of steps.
        is_mean: whether a batch moves it by the mean of what its parts would, each by its rows.
        in_evaluation: whether evaluate and predict move it, too.
    """

    layer: str
    variable: tf.Variable
    is_alike: bool
    is_mean: bool
    in_evaluation: bool = False

    @property
    def is_distributed(self) -> bool:
        """Whether the variable is one of TensorFlow's strategies, which writes it on replicas."""
        return isinstance(self.variable, tf.distribute.DistributedValues)

    @property
    def is_merged(self) -> bool:
        """Whether the replicas' states become one state after each step."""
        if self.is_alike or not self.variable.dtype.is_floating:
            return False
        kinds = tf.VariableAggregation
        is_local = self.variable.synchronization == tf.VariableSynchronization.ON_READ
        is_one = self.variable.aggregation in (kinds.MEAN, kinds.ONLY_FIRST_REPLICA)
        return not self.is_distributed or (is_local and is_one)

    def beside(self, other: Moved) -> Moved:
        """Returns what holds on the rows of both: ``other`` is the same variable on other rows."""
        return replace(
            self,
            is_alike=self.is_alike and other.is_alike,
            is_mean=self.is_mean and other.is_mean,
            in_evaluation=self.in_evaluation or other.in_evaluation,
        )

    def __str__(self) -> str:
        name = self.variable.name.split(":")[0].rpartition("/")[2]
        return f"'{name}' of layer '{self.layer}'"


def found(
    model: tf.keras.Model,
    x: Any,
    parts: Sequence[slice],
    lose: Callable[[slice, Any, bool], None] = lambda rows, outputs, training: None,
) -> list[Moved]:
    """Returns what the user's own layers in ``model`` move; its state stays as it is.

    Args:
        x: a batch as the model takes it, tensors [rows, ...].
        parts: of its rows, each row in one of them.
        lose: given rows of it, what the model makes of them, and whether it trains, does what a
            loss of the user's own does with them.
    """
    owned = _owned(model)
    if not any(owned.values()):
        return []
    walk = Walk(model, [layer for layer in own_layers(model) if owned[id(layer)]])

    def values() -> dict[Any, np.ndarray]:
        return {v.ref(): v.numpy() for variables in owned.values() for v in variables}

    def after(rows: slice, walk: Walk = walk, *, training: bool = True) -> dict[Any, np.ndarray]:
        part = tf.nest.map_structure(lambda tensor: tensor[rows], x)
        with state_kept(model):
            with walk.during(lambda layer, call, outputs: outputs):
                outputs = model(part, training=False)
            lose(rows, outputs, training)
            return values()

    before = values()
    whole, again = after(slice(None)), after(slice(None))
    evaluated = after(slice(None), Walk(model, []), training=False)
    of_parts = [after(part) for part in parts]
    sizes = [part.indices(len(tf.nest.flatten(x)[0])) for part in parts]
    rows = [stop - start for start, stop, _ in sizes]
    moved = []
    for layer in own_layers(model):
        for variable in owned[id(layer)]:
            ref = variable.ref()
            if np.array_equal(whole[ref], before[ref]):
                continue
            if not np.isfinite(whole[ref]).all():
                continue  # Of rows that are none for it, as negative ones for a logarithm.
            draws = not np.array_equal(whole[ref], again[ref])
            each = [part[ref] - before[ref] for part in of_parts]
            change = whole[ref] - before[ref]
            is_alike = not draws and all(_equal(one, change) for one in each)
            is_mean = draws or _equal(np.average(each, axis=0, weights=rows), change)
            is_mean = is_mean and variable.dtype.is_floating
            in_evaluation = not np.array_equal(evaluated[ref], before[ref])
            moved.append(Moved(layer.name, variable, is_alike, is_mean, in_evaluation))
    return moved


def _owned(model: tf.keras.Model) -> dict[int, list[tf.Variable]]:
    """Returns the variables that each of the user's own layers has for itself, and does not train.

    By the id of the layer. Not those of metrics, which are merged as such.
    """
    of_metrics = {variable.ref() for variable in state_of(model)}
    owned = {}
    for layer in own_layers(model):
        inner = {id(v) for each in layers_in(layer)[1:] for v in each.weights}
        inner |= {id(weight) for weight in layer.trainable_weights}
        known = [*layer.non_trainable_weights, *held_by(layer, tf.Variable)]
        variables = {id(raw(v)): raw(v) for v in known if id(v) not in inner}
        owned[id(layer)] = [
            v
            for v in variables.values()
            if isinstance(v, tf.Variable) and v.ref() not in of_metrics
        ]
    return owned


def _equal(one: Any, other: Any) -> bool:
    largest = np.max(np.abs(other), initial=1e-6)
    return bool(np.max(np.abs(np.subtract(one, other)), initial=0.0) <= _TOLERANCE * largest)


def explained(moved: Sequence[Moved], *, by_microbatch: tf.keras.Model | None = None) -> list[str]:
    """Returns a clause for each state that is not that of one device.

    Args:
        by_microbatch: a model of which a step calls the layers once for each of several
            microbatches; None where it calls them once.
    """
    if by_microbatch is not None:
        kind = tf.keras.layers.SpectralNormalization  # Keras' own, beside BatchNormalization.
        normed = [layer for layer in layers_in(by_microbatch) if isinstance(layer, kind)]
        states = [*map(str, moved), *(f"the state of layer '{layer.name}'" for layer in normed)]
        return [f"{each} is changed by each microbatch, not once a step" for each in states]
    return [
        f"{each} is changed in a step by no mean over the rows of a batch, which are divided here, "
        "so it is not that of one device"
        for each in moved
        if not each.is_alike and not each.is_mean
    ] + [
        f"{each} is changed by evaluate or predict, too, there by each replica's own rows: change "
        "it only in training"
        for each in moved
        if not each.is_alike and each.in_evaluation
    ]


def refuse_without_way(moved: Sequence[Moved]) -> None:
    """Raises:
    ModelError: replicas of one of TensorFlow's strategies would not change a variable as one device
        does, though they could.
    """
    kinds = tf.VariableAggregation
    for each in moved:
        given = each.variable.aggregation
        if not each.is_distributed or each.is_merged:
            continue
        if each.is_alike and given in (kinds.MEAN, kinds.ONLY_FIRST_REPLICA):
            continue
        if not each.is_alike and not each.is_mean and given != kinds.NONE:
            continue  # Of which a warning tells.
        way = "aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA"
        if not each.is_alike:
            way = (
                "synchronization=tf.VariableSynchronization.ON_READ, "
                "aggregation=tf.VariableAggregation.MEAN, as Keras' BatchNormalization does"
            )
        raise ModelError(
            "a variable that a layer changes in a step must say how replicas share it",
            received=f"{each} with aggregation={given.name}",
            mend=f"Make it {'' if CAN_SAY_AGGREGATION else 'a tf.Variable '}with {way}",
        )


def merge(
    moved: Sequence[Moved], part: tf.Tensor, summed: Callable[[tf.Tensor, str], tf.Tensor]
) -> None:
    """Makes means over the rows of one replica those over the global batch; called on each.

    Args:
        part: of the global batch that the replica has, float [].
        summed: adds up a tensor over the replicas; given a name, too.
    """
    variables = [each.variable for each in moved if each.is_merged]
    for dtype in dict.fromkeys(variable.dtype for variable in variables):
        alike = [variable for variable in variables if variable.dtype == dtype]
        flat = [tf.reshape(tf.convert_to_tensor(variable), [-1]) for variable in alike]
        # Of padding there may be anything, which counts nothing.
        own = tf.math.multiply_no_nan(tf.concat(flat, 0), tf.cast(part, dtype))
        total = summed(own, f"moved.{dtype.name}")
        pieces = tf.split(total, [variable.shape.num_elements() for variable in alike])
        for variable, piece in zip(alike, pieces, strict=True):
            variable.assign(tf.reshape(piece, variable.shape))
