"""Data that do not fit the model, told in the terms of the data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import DataError, ModelError
from tfdist.keras.graph import input_names
from tfdist.keras.layers import layers_in, written_anew
from tfdist.keras.losses import compiled_losses, labels_without_weights
from tfdist.records.wording import listed
from tfdist.training.feed.keras_data import as_array
from tfdist.training.layers.losses import is_keras_own, name_of

_LABEL_OUT_OF_RANGE = re.compile(
    r"label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)"
)
# TensorFlow's words where several labels a record meet one output for it.
_LABELS_A_ROW = re.compile(
    r"logits and labels must have the same first dimension, "
    r"got logits shape \[(\d+),.*?\] and labels shape \[(\d+)\]"
)

# TensorFlow's words of a gather, and the operation that they name.
_ID_OUT_OF_RANGE = re.compile(r"indices(?:\[[\d,]*\])? = (-?\d+) is not in \[0, (\d+)\)")
_NODE = re.compile(r"\{\{node (.*?)\}\}")

# Keras' words where a loss meets labels of another shape than its outputs.
_LOSS_SHAPES = re.compile(
    r"Shapes \(.*\) and \(.*\) are incompatible|must have the same shape|Dimensions must be equal"
)
# Those of Keras 3, which names no file.
_LOSS_SHAPES_OF_KERAS_3 = re.compile(r"Arguments? `(?:target|output)`.* must have ")


def check_inputs(model: tf.keras.Model, element_spec: Any) -> None:
    """Checks the inputs of a dataset against those of a Functional or Sequential model.

    Args:
        element_spec: of a batch, (x[, y[, sample_weight]]), each with the batch as first dimension.

    Raises:
        DataError: an input is missing, or has another shape than the model's, or is text where the
            model takes numbers, or the other way round.
    """
    for name, spec, symbol in _inputs(model, element_spec):
        wanted = tf.TensorShape(symbol.shape)[1:]
        if not _fits(spec.shape[1:], wanted):
            raise DataError(
                f"records for input '{name}' of the model must have shape {list(wanted)}",
                received=f"shape {list(spec.shape[1:])}",
                mend=_mend(spec.shape[1:], wanted),
            )
        takes_text = tf.as_dtype(symbol.dtype) == tf.string
        if (spec.dtype == tf.string) != takes_text:
            raise DataError(
                f"records for input '{name}' of the model must be "
                f"{'text' if takes_text else 'numbers'}",
                received="numbers" if takes_text else "text",
                mend="Change them before, or have keras.Input(dtype=...) and a layer such as "
                "StringLookup or TextVectorization in the model",
            )


def _inputs(model: tf.keras.Model, element_spec: Any) -> list[tuple[str, Any, Any]]:
    """Returns of each input its name, what a dataset gives for it, and what the model takes.

    Of a model of a class of its own nothing: only its call knows. Raises as ``check_inputs``.
    """
    expected = getattr(model, "inputs", None)
    if not expected:
        return []
    names = input_names(model)
    x = element_spec[0]
    if isinstance(x, Mapping):
        missing = [name for name in names if name not in x]
        if missing:
            raise DataError(
                f"a dataset must have the inputs {', '.join(names)} of the model",
                received=", ".join(sorted(x)),
                mend="Name the model's keras.Input layers as the features are named",
            )
        given = [x[name] for name in names]
    else:
        given = tf.nest.flatten(x)
    if len(given) != len(expected):
        raise DataError(
            f"a dataset must have one feature for each input of the model, here {len(expected)}",
            received=f"{len(given)} features",
            mend="Give (x, y), x with a feature for each keras.Input, in their order or by name",
        )
    return list(zip(names, given, expected, strict=True))


def check_free_lengths(model: tf.keras.Model, element_spec: Any) -> None:
    """Checks inputs of any length. Raises DataError: one has a fixed length, and batches differ."""
    for name, spec, symbol in _inputs(model, element_spec):
        wanted = tf.TensorShape(symbol.shape)[1:]
        is_free = bool(spec.shape.rank) and spec.shape.rank > 1 and spec.shape[1] is None
        if is_free and wanted.rank and wanted[0] is not None:
            raise DataError(
                f"input '{name}' of a model must take any length where batches are padded to their "
                "longest record",
                received=f"shape {list(wanted)}",
                mend=f"Write keras.Input({(None, *wanted[1:])}), or leave pad_to out",
            )


def explain_value_error(error: Exception, model: tf.keras.Model) -> DataError | None:
    """Returns what an error about a label, or an id that is looked up, means; None for another."""
    return _explain_label_error(error) or _explain_id_error(error, model)


def _explain_label_error(error: Exception) -> DataError | None:
    found = _LABEL_OUT_OF_RANGE.search(str(error))
    if found is None:
        return _explain_labels_a_row(error)
    label, classes = found.groups()
    return DataError(
        f"a label must be a class that the model has an output for, here 0 to {int(classes) - 1}",
        received=f"label {label}",
        mend="Give the model's last layer more outputs, or mend the labels",
    )


def _explain_labels_a_row(error: Exception) -> DataError | None:
    found = _LABELS_A_ROW.search(str(error))
    if found is None:
        return None
    rows, labels = found.groups()
    return DataError(
        "a crossentropy of class numbers must have one label for each row of the model's outputs",
        received=f"{labels} labels for {rows} rows",
        mend="Give each record one class number (a text or a list is several), or have the model "
        "give an output for each label",
    )


def explain_class_error(
    error: Exception, class_weight: Mapping[int, float] | None
) -> DataError | None:
    """Returns what an error of Keras about ``class_weight`` means, None when it is another.

    Keras looks weights up while it reads batches.
    """
    found = _ID_OUT_OF_RANGE.search(str(error))
    if not class_weight or found is None or "IteratorGetNext" not in str(error):
        return None
    number, known = found.groups()
    return class_without_weight(number) if int(known) == len(class_weight) else None


def class_without_weight(classes: object) -> DataError:
    return DataError(
        "class_weight must have a weight for each class of the data, 1 to leave a class as it is",
        received=f"none for class {classes}",
        mend="Add the class to class_weight",
    )


def _explain_id_error(error: Exception, model: tf.keras.Model) -> DataError | None:
    text = str(error)
    found = _ID_OUT_OF_RANGE.search(text)
    if found is None:
        return None
    number, rows = found.groups()
    node = _NODE.search(text, found.end())
    operation = node.group(1) if node else ""
    for layer in layers_in(model):
        is_embedding = isinstance(layer, tf.keras.layers.Embedding)
        if is_embedding and layer.input_dim == int(rows) and layer.name in operation.split("/"):
            return DataError(
                f"an id that layer '{layer.name}' looks up must be one of its vocabulary, here 0 "
                f"to {int(rows) - 1}",
                received=f"id {number}",
                mend="Give the Embedding a larger input_dim, or mend the ids in the data",
            )
    of_operation = f" by operation '{operation}'" if operation else ""
    return DataError(
        f"an index that is looked up{of_operation} must be one of what is there, here 0 to "
        f"{int(rows) - 1}",
        received=f"index {number}",
        mend="Mend the indices in the data; if they are ids, give their table more rows",
    )


def _mend(given: tf.TensorShape, expected: tf.TensorShape) -> str:
    mend = "Change the model's keras.Input, or reshape the data"
    if given.rank and _fits(given[1:], expected):
        return f"If each record is a batch, say batched=True to strategy.dataset; else: {mend}"
    if expected.rank and _fits(given, expected[1:]):
        return f"If records were taken for batches, say batched=False; else: {mend}"
    return mend


def check_labels(model: tf.keras.Model, element_spec: Any) -> None:
    """Raises:
    DataError: there are no labels for the compiled loss, they are text, or Keras 3 would look for
        weights that are not there.
    ModelError: the model was compiled without a loss, and has none of its own.
    """
    if _knows_what_it_needs(model):
        return
    check_text_labels(model, element_spec[1:2])
    losses = [loss for loss in tf.nest.flatten(compiled_losses(model)) if loss is not None]
    if losses and len(element_spec) == 1:
        raise DataError(
            "data for a model that is compiled with a loss must have labels",
            received="records of inputs alone",
            mend="Give (x, y)",
        )
    y, weights = (*element_spec[1:3], None, None)[:2]
    if without := labels_without_weights(y, weights):
        raise DataError(
            "sample weights by name must be there for each label by name",
            received=f"none for {listed(without)}",
            mend="Give ones to what counts as without",
        )
    # A model of a class of its own may add losses in its call.
    if not losses and getattr(model, "inputs", None) and not model.losses:
        raise ModelError(
            "a model must have a loss to be trained or evaluated",
            received=f"model '{model.name}' compiled without one",
            mend="Call model.compile(optimizer, loss)",
        )


def _knows_what_it_needs(model: tf.keras.Model) -> bool:
    return bool(written_anew(model, "train_step", "test_step", "compute_loss"))


def check_text_labels(model: tf.keras.Model, labels: Any) -> None:
    """Checks the labels' dtype. Raises DataError: text, of which no loss of Keras makes numbers.

    Args:
        labels: in their structure, of each what ``is_text`` takes.
    """
    losses = tf.nest.flatten(compiled_losses(model))
    # A user's own loss may look its labels up; an output without a loss needs none.
    of_keras = all(loss is not None and is_keras_own(loss) for loss in losses)
    if _knows_what_it_needs(model) or not of_keras:
        return
    if any(map(is_text, tf.nest.flatten(labels))):
        raise DataError(
            "labels for a loss of Keras must be numbers",
            received="labels of text",
            mend="Number the classes: names, y = np.unique(y, return_inverse=True) for arrays, or "
            "data.map with keras.layers.StringLookup(vocabulary=names, num_oov_indices=0); "
            "tfdist shard and tfdist.records.write number classes by themselves",
        )


def check_given_labels(model: tf.keras.Model, x: Any, options: Mapping[str, Any]) -> None:
    """``check_text_labels`` of what Keras itself is to read.

    Args:
        options: those of its fit or evaluate.
    """
    held_out = options.get("validation_data")
    labels = [as_array(options.get("y"))]
    if isinstance(held_out, (tuple, list)):
        labels += map(as_array, held_out[1:2])
    for data in (x, held_out):
        if isinstance(data, tf.data.Dataset) and isinstance(data.element_spec, tuple):
            labels += data.element_spec[1:2]
    check_text_labels(model, labels)


def is_text(values: Any) -> bool:
    """Whether an array, a column of a table, or the spec of a tensor is one of text."""
    dtype = getattr(values, "dtype", None)
    if isinstance(dtype, tf.DType):
        return dtype == tf.string
    array = np.asarray(values)
    is_object = array.dtype.kind == "O" and array.size > 0
    return array.dtype.kind in "SU" or (is_object and isinstance(array.flat[0], (str, bytes)))


def explain_loss_error(
    error: Exception, model: tf.keras.Model, element_spec: Any
) -> DataError | None:
    """Returns what a loss's refusal of its labels means, None when the error is another.

    Args:
        element_spec: see ``check_inputs``.
    """
    losses = [loss for loss in tf.nest.flatten(compiled_losses(model)) if loss is not None]
    outputs = tf.nest.flatten(getattr(model, "output", None))
    text = str(error)
    is_of_a_loss = "keras/src/losses.py" in text and _LOSS_SHAPES.search(text)
    is_of_a_loss = is_of_a_loss or _LOSS_SHAPES_OF_KERAS_3.search(text)
    # A user's own loss knows itself what it refuses.
    if not is_of_a_loss or not all(map(is_keras_own, losses)):
        return None
    if any(output is None for output in outputs) or len(element_spec) < 2:
        return None
    names = ", ".join(dict.fromkeys(map(name_of, losses)))
    labels, shapes = (
        " and ".join(str(list(part.shape[1:])) for part in tf.nest.flatten(parts))
        for parts in (element_spec[1], outputs)
    )
    return DataError(
        f"labels must have a shape that the compiled loss takes for outputs of shape {shapes}",
        received=f"labels of shape {labels} and the loss {names}",
        mend="For class numbers compile with sparse_categorical_crossentropy and an output for "
        "each class, for one-hot labels with categorical_crossentropy, for a yes or no with "
        "binary_crossentropy and one output",
    )


def _fits(given: tf.TensorShape, expected: tf.TensorShape) -> bool:
    if given.rank is None or expected.rank is None:
        return True
    # Keras adds and drops dimensions of 1 itself.
    shapes = ([size for size in shape if size != 1] for shape in (given, expected))
    given_sizes, expected_sizes = shapes
    return len(given_sizes) == len(expected_sizes) and all(
        None in pair or pair[0] == pair[1] for pair in zip(given_sizes, expected_sizes, strict=True)
    )
