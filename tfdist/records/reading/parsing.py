"""The values of the features of serialised records, as their protobuf or their bytes have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.records.format.schema import Feature, Schema

_STORED = {"int64": tf.int64, "float": tf.float32, "bytes": tf.string}


def parsed_values(schema: Schema, serialized: tf.Tensor) -> dict[str, Any]:
    """Returns by name [batch, *shape], and of features of variable length ragged [batch, None].

    Files of images and the bytes of arrays are strings [batch]. Features that the schema does not
    name are not parsed.

    Args:
        serialized: Examples or SequenceExamples, string [batch].
    """
    specs = {feature.name: _spec(feature) for feature in schema.features}
    if not schema.is_sequence_example:
        return tf.io.parse_example(serialized, specs)
    in_list = {feature.name for feature in schema.features if feature.in_list}
    context, lists, _ = tf.io.parse_sequence_example(
        serialized,
        context_features={name: specs[name] for name in specs if name not in in_list} or None,
        sequence_features={name: specs[name] for name in in_list},
    )
    # Of each record [steps, values]: in a row they are as an Example would have them.
    return {**context, **{name: values.merge_dims(1, 2) for name, values in lists.items()}}


def _spec(feature: Feature) -> tf.io.FixedLenFeature | tf.io.RaggedFeature:
    stored = _STORED.get(feature.encoding)
    if stored is None:
        return tf.io.FixedLenFeature((), tf.string)
    if feature.is_ragged:
        return tf.io.RaggedFeature(stored, row_splits_dtype=tf.int64)
    return tf.io.FixedLenFeature(feature.shape, stored)


def from_bytes(digits: tf.Tensor, dtype: str) -> tf.Tensor:
    """Returns the numbers of a dtype, [batch, n], of uint8 [batch, n * bytes of a number]."""
    if dtype == "uint8":
        return digits
    if dtype == "bool":
        return tf.cast(digits, tf.bool)
    item_bytes = np.dtype(dtype).itemsize
    if item_bytes == 1:
        return tf.bitcast(digits, dtype)
    count = digits.shape[1] // item_bytes
    return tf.bitcast(tf.reshape(digits, (-1, count, item_bytes)), dtype)
