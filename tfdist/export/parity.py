"""Is the file the same model? Its outputs against Keras' own, on real records."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import DataError, first_line
from tfdist.export.converter import Rescale
from tfdist.export.interpreter import TfliteModel
from tfdist.export.models import PlainModel
from tfdist.export.quiet import quiet
from tfdist.export.samples import Rows
from tfdist.keras.layers import written_anew
from tfdist.keras.losses import compiled_loss, compute_loss, show_loss
from tfdist.training.layers.data_errors import check_text_labels, explain_value_error

_BATCH_ROWS = 64
_ACCURACY = re.compile(r"(.*[^a-z])?(acc|accuracy)[^a-z]*", re.IGNORECASE)
# What TensorFlow raises for labels that it does not take.
_OF_LABELS = (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError)


@dataclass(frozen=True)
class Parity:
    """What a comparison found.

    Attributes:
        records: how many were compared.
        largest_difference, mean_difference: of an output's absolute values.
        output_scale: the largest absolute output of Keras, to see the differences in proportion.
        metric: what the drop is of: "accuracy" (or another metric of that name; of several the one
            that drops most), "loss", or "outputs" for records without labels.
        keras, file: the metric's values; for "outputs" their mean absolute values.
        drop: for accuracy Keras' minus the file's, 0.01 being one in a hundred records; for a loss
            its relative growth; for outputs the mean difference relative to their mean size.
    """

    records: int
    largest_difference: float
    mean_difference: float
    output_scale: float
    metric: str
    keras: float
    file: float
    drop: float


class Judge:
    """Compares files with one model on the same records; Keras computes once."""

    def __init__(self, model: PlainModel, rows: Rows, rescale: Rescale | None = None):
        self._model = model
        self._rows = rows
        self._expected = keras_outputs(model, rows, rescale)

    def compare(
        self, file: TfliteModel, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> Parity:
        found = file.predict(self._rows.x, progress)
        pairs = [(self._expected[name], found[name]) for name in self._expected]
        differences = [np.abs(a.astype(np.float64) - b) for a, b in pairs]
        sizes = [np.abs(a.astype(np.float64)) for a, _ in pairs]
        num_values = sum(part.size for part in differences)
        mean_difference = float(sum(part.sum() for part in differences) / num_values)
        mean_size = float(sum(part.sum() for part in sizes) / num_values)
        metric, keras, of_file, drop = self._judged(found, mean_difference, mean_size)
        return Parity(
            records=len(self._rows),
            largest_difference=float(max(part.max() for part in differences)),
            mean_difference=mean_difference,
            output_scale=float(max(part.max() for part in sizes)),
            metric=metric,
            keras=keras,
            file=of_file,
            drop=drop,
        )

    def _judged(
        self, found: dict[str, np.ndarray], mean_difference: float, mean_size: float
    ) -> tuple[str, float, float, float]:
        expected = metrics(self._model, self._rows, self._expected)
        of_file = metrics(self._model, self._rows, found)
        drops = {name: expected[name] - of_file[name] for name in _accuracies(expected)}
        name = max(drops, key=drops.__getitem__, default=judging_metric(expected))
        if name is None:
            drop = mean_difference / max(mean_size, np.finfo(np.float32).tiny)
            return "outputs", mean_size, mean_size + mean_difference, drop
        keras, file = expected[name], of_file[name]
        if name == "loss":
            return name, keras, file, (file - keras) / max(abs(keras), np.finfo(np.float32).eps)
        return name, keras, file, drops[name]


def keras_outputs(
    model: PlainModel, rows: Rows, rescale: Rescale | None = None
) -> dict[str, np.ndarray]:
    """Returns Keras' outputs by name, [rows, ...], for raw records."""
    parts = []
    infer = tf.function(lambda values: model(values), autograph=False, reduce_retracing=True)
    with quiet():  # TensorFlow advises against tracing anew, which another model needs.
        for start in range(0, len(rows), _BATCH_ROWS):
            values = {}
            for name, spec in model.inputs.items():
                value = tf.cast(rows.x[name][start : start + _BATCH_ROWS], spec.dtype)
                if rescale is not None and spec.dtype.is_floating:
                    value = value * rescale[0] + rescale[1]
                values[name] = value
            parts.append({name: output.numpy() for name, output in infer(values).items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def judging_metric(values: dict[str, float]) -> str | None:
    """Returns the metric that a drop is measured in: an accuracy, or else the loss."""
    return next(iter(_accuracies(values)), "loss" if "loss" in values else None)


def _accuracies(values: Iterable[str]) -> list[str]:
    """Returns the metrics that are accuracies by their last word: "accel_loss" is none."""
    return [name for name in values if _ACCURACY.fullmatch(name)]


def metrics(model: PlainModel, rows: Rows, outputs: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns the model's own loss and metrics of outputs; the accuracy of class ids in any case.

    Args:
        outputs: name -> array [rows, ...].

    Raises:
        DataError: labels that the model's loss or metrics do not take.
    """
    if rows.y is None:
        return {}
    try:
        values = _compiled_metrics(model, rows, outputs)
    except (ValueError, TypeError, *_OF_LABELS) as error:
        check_text_labels(model.keras, rows.y)
        raise explain_value_error(error, model.keras) or DataError(
            "labels must be such as the model's loss and metrics take",
            received=f"an error: {first_line(error)}",
            mend="Give the data that the model was trained on",
        ) from error
    if not _accuracies(values):
        accuracy = _top_1(rows.y, outputs)
        if accuracy is not None:
            values["accuracy"] = accuracy
    return values


def _compiled_metrics(
    model: PlainModel, rows: Rows, outputs: dict[str, np.ndarray]
) -> dict[str, float]:
    judge = model.keras
    if compiled_loss(judge) is None:
        return {}
    judge.reset_metrics()
    for start in range(0, len(rows), _BATCH_ROWS):
        part = slice(start, start + _BATCH_ROWS)
        y = tf.nest.map_structure(lambda column, part=part: tf.constant(column[part]), rows.y)
        weight = None if rows.weight is None else tf.constant(rows.weight[part])
        found = model.structured_outputs(
            {name: tf.constant(column[part]) for name, column in outputs.items()}
        )
        if written_anew(judge, "compute_loss"):
            loss = compute_loss(judge, None, y, found, weight, training=False)
        else:  # What is added to it, as for regularization, is the same of any outputs.
            loss = compiled_loss(judge)(y, found, weight)
        show_loss(judge, loss, tf.nest.flatten(rows.y)[0][part].shape[0])
        values = judge.compute_metrics(None, y, found, weight)
    judge.reset_metrics()
    return {name: float(value) for name, value in values.items() if np.ndim(value) == 0}


def _top_1(y: Any, outputs: dict[str, np.ndarray]) -> float | None:
    if not isinstance(y, np.ndarray) or len(outputs) != 1 or y.dtype.kind not in "iu":
        return None
    (scores,) = outputs.values()
    if scores.ndim != 2 or scores.shape[1] < 2 or y.size != len(scores):
        return None
    return float(np.mean(scores.argmax(-1) == y.reshape(-1)))
