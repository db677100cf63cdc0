"""Positions that a loss leaves out: those of a mask of Keras, and the labels of ``ignore_class``.

Keras divides such a loss by the positions that it counts of the batch it sees. Here they become
sample weights, which divide by those of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist import keras
from tfdist.training.layers import losses
from tfdist.training.model.logits import changed
from tfdist.training.model.precision import full_type


def can_be(model: tf.keras.Model) -> bool:
    """Whether a loss may leave out positions; of a class of its own the masks are not known."""
    return keras.tensors.masks_its_outputs(model) or any(
        losses.ignored_class(loss) is not None
        for loss in tf.nest.flatten(keras.losses.compiled_losses(model))
    )


def found(model: tf.keras.Model, y: Any, y_pred: Any) -> tuple[list[tf.Tensor | None], Any]:
    """Returns for each output which positions its loss counts, bool [rows, ...], None: all.

    And the labels, where a class that is ignored is another one: weights leave it out, and Keras
    would divide by none where a share has no other.
    """
    outputs = tf.nest.flatten(y_pred)
    masks = [keras.tensors.mask_of(output) for output in outputs]
    ignored = [losses.ignored_class(loss) for loss in losses.by_output(model, y_pred)]
    if all(each is None for each in ignored):
        return masks, y
    labels = losses.to_outputs(model, y, y_pred)
    # Outputs without labels have no loss: without a name, or the last ones of a list.
    for n, (number, label) in enumerate(zip(ignored, labels, strict=False)):
        if number is None or label is None:
            continue
        is_left_out = tf.equal(tf.cast(label, tf.int64), number)
        another = tf.cast(1 if number == 0 else 0, label.dtype)
        labels[n] = tf.where(is_left_out, another, label)
        counts = tf.logical_not(is_left_out)
        if counts.shape.rank == len(outputs[n].shape):
            counts = tf.squeeze(counts, -1)
        masks[n] = counts if masks[n] is None else masks[n] & counts
    if not isinstance(y, Mapping):
        return masks, tf.nest.pack_sequence_as(y if tf.nest.is_nested(y) else y_pred, labels)
    names = losses.names_of_outputs(model, y_pred)
    named = zip(names, tf.nest.pack_sequence_as([*map(y.get, names)], labels), strict=True)
    # A name that no output has stays, for Keras to refuse it.
    return masks, {**y, **{name: of_name for name, of_name in named if name in y}}


def counted(
    masks: Sequence[tf.Tensor | None], y_pred: Any, summed: Callable[[tf.Tensor, str], tf.Tensor]
) -> list[tf.Tensor | None]:
    """Returns for each output how many positions all replicas count, float []; None: all.

    Args:
        summed: adds up a tensor, under a name, over the replicas.
    """
    dtype = full_type(tf.as_dtype(tf.nest.flatten(y_pred)[0].dtype))
    return [
        None if mask is None else summed(tf.reduce_sum(tf.cast(mask, dtype)), f"mask.{index}")
        for index, mask in enumerate(masks)
    ]


def as_weights(
    model: tf.keras.Model,
    masks: Sequence[tf.Tensor | None],
    y_pred: Any,
    sample_weight: Any,
    share: tf.Tensor,
    all_counted: Sequence[tf.Tensor | None],
) -> Any:
    """Returns sample weights, as ``y_pred`` is structured, that leave out what masks leave out.

    For losses of outputs ``without_masks``.

    Args:
        masks: of ``found``.
        share: int64 [2], the rows here and those of the global batch.
        all_counted: of ``counted``.
    """
    if all(mask is None for mask in masks):
        return sample_weight
    given = losses.to_outputs(model, sample_weight, y_pred)
    given += [None] * (len(masks) - len(given))  # The last outputs of a list may have none.
    weights = []
    outputs = tf.nest.flatten(y_pred)
    for output, mask, count, weight in zip(outputs, masks, all_counted, given, strict=True):
        if mask is None:
            weights.append(weight)
            continue
        positions = tf.reduce_prod(tf.shape(mask)[1:]) * tf.cast(share[1], tf.int32)
        # A batch that counts nowhere leaves weights as they are; of a mask, Keras 2 makes them NaN.
        is_nan = keras.losses.NAN_WHERE_ALL_IS_MASKED and keras.tensors.mask_of(output) is not None
        divide = tf.divide if is_nan else tf.math.divide_no_nan
        own = tf.cast(mask, count.dtype) * divide(tf.cast(positions, count.dtype), count)
        if weight is not None:
            own *= _like(own, tf.cast(weight, own.dtype))
        weights.append(own)
    return tf.nest.pack_sequence_as(y_pred, weights)


def without_masks(y_pred: Any) -> Any:
    """Returns outputs to which no mask is attached, with the logits that a loss looks for."""
    outputs = tf.nest.flatten(y_pred)
    if all(keras.tensors.mask_of(output) is None for output in outputs):
        return y_pred
    return tf.nest.pack_sequence_as(y_pred, [changed(tf.identity, output) for output in outputs])


def _like(positions: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Returns weights, of rows or positions, in the rank of the positions."""
    missing = positions.shape.rank - weight.shape.rank
    if missing < 0:  # Of rows, as a column.
        return tf.squeeze(weight, -1)
    return tf.reshape(weight, tf.concat([tf.shape(weight), tf.ones([missing], tf.int32)], 0))
