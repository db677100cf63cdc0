"""A whole model on a few rows, all and in two parts: what cannot be tried by itself.

What is between layers, in a class of the user's own, or a regularizer of activity.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.keras.layers import called_in, layers_in, replaced
from tfdist.keras.losses import (
    compiled_as_one,
    compiled_loss,
    compute_loss,
    loss_anew,
    other_compiled_loss,
)
from tfdist.training.layers import loss_masks, randomness
from tfdist.training.layers.losses import AsOnOneDevice, has_own_compute_loss, is_sum
from tfdist.training.steps import custom_steps, row_probe_layers
from tfdist.training.steps.row_probe_rows import FIRST, ROWS, SLICES, differ

MOST_ELEMENTS = 10_000_000  # Of a weight whose gradient is looked at.


def looks_at_rows(layer: str) -> str:
    """Returns what is said of a layer whose outputs of a row depend on others."""
    return (
        f"layer '{layer}' looks at several rows of a batch, which are divided here, so its outputs "
        "are not those of one device"
    )


def no_mean(name: str) -> str:
    """Returns what is said of a loss, a metric or a gradient."""
    return (
        f"{name} is no mean over the rows of a batch, which are divided here, so it is not that of "
        "one device"
    )


def clauses_of(
    model: tf.keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    gradients: bool = True,
    training: bool = True,
) -> list[str]:
    """Returns a clause where outputs or losses of rows are others beside other rows.

    What is between layers, in a class of the user's own, or a regularizer of activity: all that
    cannot be tried by itself. Layers run as in training but for those that draw, and for
    BatchNormalization, whose statistics are the engine's; where something draws all the same, or
    ``training`` is not, as in inference.
    """
    if training and "train_step" in custom_steps.own_steps(model):
        return []
    loud = loud_layers(model)
    most = row_probe_layers.tolerance_of(model)
    for in_training in (loud, []) if training else ([],):
        batch, has_loss = (x, y, sample_weight), training or y is not None
        forward = _Forward(model, in_training, batch, gradients, has_loss=has_loss)
        whole, again = forward.of(slice(None)), forward.without_gradient(slice(None))
        if not _part(whole.values, again.values, slice(None), most):
            break
    else:
        return []  # It draws random numbers.
    parts = [forward.of(rows, counted=whole.counted) for rows in SLICES]
    if any(
        _part(whole.outputs, part.outputs, rows, most)
        for part, rows in zip(parts, SLICES, strict=True)
    ):
        seeing = row_probe_layers.parted(model, x, SLICES, loud)
        if seeing:
            return [looks_at_rows(layer.name) for layer in seeing[:1]]
        return [
            "the model looks at several rows of a batch, which are divided here, so its outputs "
            "are not those of one device"
        ]
    if differ([seen.added for seen in (whole, *parts)], most / 10):
        return [no_mean("what layers add to the loss (add_loss, activity_regularizer)")]
    if differ([seen.loss for seen in (whole, *parts)], most / 10):
        return [no_mean("the compiled loss")]
    if _is_no_mean([seen.gradient for seen in (whole, *parts)], most):
        return [no_mean("the gradient of the losses")]
    return []


def loud_layers(model: tf.keras.Model) -> list[Any]:
    """Returns what ``model`` calls but for layers that draw, and for BatchNormalization."""
    stilled = [i for layer in randomness.drawing_layers(model) for i in layers_in(layer)]
    stilled += [i for i in layers_in(model) if isinstance(i, tf.keras.layers.BatchNormalization)]
    return [layer for layer in called_in(model) if all(layer is not i for i in stilled)]


def _part(wholes: Sequence[Any], of_parts: Sequence[Any], rows: slice, most: float) -> bool:
    """Whether tensors of these rows are others than those rows of the tensors of all."""
    pairs = zip(wholes, of_parts, strict=True)
    return any(row_probe_layers.difference(*pair, rows) > most for pair in pairs)


def _is_no_mean(gradients: Sequence[Sequence[tf.Tensor] | None], most: float) -> bool:
    """Whether gradients of all rows are others than the mean of those of the two parts."""
    if any(of_rows is None for of_rows in gradients):
        return False
    off, largest = 0.0, 1e-6
    for whole, first, second in zip(*gradients, strict=True):
        joined = (FIRST * first + (ROWS - FIRST) * second) / ROWS
        difference = _largest(whole - joined)
        if not np.isfinite(difference):
            return False  # Of such rows nothing is known.
        off = max(off, difference)
        largest = max(largest, _largest(whole))
    return off > most * largest


def _largest(values: tf.Tensor) -> float:
    return float(tf.reduce_max(tf.abs(values))) if tf.size(values) else 0.0


@dataclass(frozen=True)
class _Seen:
    """What some rows give.

    Attributes:
        outputs: of the model.
        added: what layers add to the loss, which is beside it.
        loss: the mean over the rows.
        gradient: of both, by each weight; None where it cannot be had.
        counted: positions that the losses of outputs count.
    """

    outputs: list[tf.Tensor]
    added: tf.Tensor
    loss: tf.Tensor
    gradient: list[tf.Tensor] | None
    counted: list[tf.Tensor | None]

    @property
    def values(self) -> list[tf.Tensor]:
        return [*self.outputs, tf.reshape(self.added, [-1])]


class _Forward:
    """Takes rows of a batch through a model and its loss, as a replica takes its share.

    Args:
        in_training: layers that run so.
        batch: (x, y, sample_weight) of ROWS rows.
        gradients: whether to take those of the losses.
        has_loss: whether there are losses; a prediction has none.
    """

    def __init__(
        self,
        model: tf.keras.Model,
        in_training: Sequence[Any],
        batch: tuple,
        gradients: bool,
        *,
        has_loss: bool,
    ):
        self._model = model
        self._batch = batch
        self._gradients = gradients
        self._has_loss = has_loss
        self._walk = row_probe_layers.Walk(model, in_training)

    def of(self, rows: slice, counted: Sequence[Any] | None = None) -> _Seen:
        """Returns what these rows give; ``counted``: what the losses of all rows count."""
        if not self._gradients:
            return self.without_gradient(rows, counted)
        with tf.GradientTape() as tape:
            seen = self.without_gradient(rows, counted)
            total = seen.loss + seen.added
        gradient = None
        if total.shape.rank == 0:
            with contextlib.suppress(Exception):  # Weights may lie elsewhere.
                gradient = _gradient(tape, total, self._model)
        return replace(seen, gradient=gradient)

    def without_gradient(self, rows: slice, counted: Sequence[Any] | None = None) -> _Seen:
        """Returns what ``of`` does, but no gradient."""
        model = self._model
        share = tf.constant([len(range(ROWS)[rows]), ROWS], tf.int64)
        x, y, weight = tf.nest.map_structure(lambda t: None if t is None else t[rows], self._batch)
        y_pred = self._walk.run(x, lambda layer, call, outputs: outputs)
        outputs = tf.nest.flatten(y_pred)
        added = tf.add_n([tf.cast(loss, tf.float32) for loss in model.losses] or [tf.zeros([])])
        if not self._has_loss:
            return _Seen(outputs, tf.zeros([]), tf.zeros([]), None, [])
        if not has_own_compute_loss(model) and not is_sum(model):
            masks, labels = loss_masks.found(model, y, y_pred)
            if counted is None:
                counted = loss_masks.counted(masks, y_pred, lambda tensor, _: tensor)
            else:
                weight = loss_masks.as_weights(model, masks, y_pred, weight, share, counted)
                y, y_pred = labels, loss_masks.without_masks(y_pred)
        loss = tf.cast(loss_of(model, x, y, y_pred, weight), tf.float32) - added
        if is_sum(model):
            loss /= tf.cast(share[0], loss.dtype)
        return _Seen(outputs, added, loss, None, list(counted or ()))


def _gradient(tape: tf.GradientTape, loss: tf.Tensor, model: tf.keras.Model) -> list[tf.Tensor]:
    variables = [v for v in model.trainable_variables if v.shape.num_elements() <= MOST_ELEMENTS]
    found = [g for g in tape.gradient(loss, variables) if g is not None]
    return [tf.cast(tf.convert_to_tensor(g), tf.float32) for g in found]


def loss_of(model: tf.keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
    """Returns what ``compute_loss`` does; a state that one of the user's own moves stays."""
    is_own = has_own_compute_loss(model)
    kept = row_probe_layers.state_kept(model) if is_own else contextlib.nullcontext()
    with without_metrics(model), kept:
        return compute_loss(model, x, y, y_pred, sample_weight, training=True)


@contextlib.contextmanager
def without_metrics(model: tf.keras.Model) -> Iterator[None]:
    """Encloses a call of ``compute_loss`` that leaves no trace in a metric, and makes none."""
    compiled = compiled_loss(model)
    keras = compiled.whole if isinstance(compiled, AsOnOneDevice) else compiled
    anew = None if keras is None else loss_anew(keras, getattr(model, "output_names", None))
    with (
        other_compiled_loss(model, anew),
        replaced_in(model.metrics, lambda _: lambda *args, **options: None),
        replaced_in(compiled_as_one(model), lambda _: lambda *args, **options: None),
    ):
        yield


@contextlib.contextmanager
def replaced_in(
    metrics: Any, instead: Callable[[Any], Callable], method: str = "update_state"
) -> Iterator[None]:
    with contextlib.ExitStack() as meanwhile:
        for metric in metrics:
            meanwhile.enter_context(replaced(metric, **{method: instead(metric)}))
        yield
