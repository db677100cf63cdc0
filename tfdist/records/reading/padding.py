"""Features of variable length as dense tensors: filled up, or cut off, to one length.

The length is the same for every batch, whoever reads it: so each step is the same on any number
of replicas, also with layers that do not mask what was filled in. What is more than the longest
record of a batch needs is cut off where a user asks for it: see ``batch_padding``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.records.format.schema import STRING, Feature
from tfdist.records.reading.graph_checks import check, listed
from tfdist.records.reading.parsing import from_bytes


def padded(feature: Feature, values: tf.RaggedTensor | tf.Tensor) -> tf.Tensor:
    """Returns [batch, *feature.read_shape].

    Args:
        values: of each record all values in a row, ragged [batch, None]; of the encoding "raw"
            their bytes, string [batch].
    """
    length, *entry = feature.read_shape
    of_entry = math.prod(entry)
    if feature.encoding == "raw":
        dense, found = _of_bytes(feature, values, length * of_entry, of_entry)
    else:
        found = values.row_lengths()
        with tf.control_dependencies([_fits(feature, found, of_entry)]):
            dense = _filled(values, feature, length * of_entry)
    dense = tf.reshape(dense, (-1, length, *entry))
    if feature.encoding != "raw" or not feature.reading.fill:
        return dense
    entries = tf.reshape(found // of_entry, (-1, *[1] * (len(entry) + 1)))
    is_there = tf.reshape(tf.range(length, dtype=tf.int64), (-1, *[1] * len(entry))) < entries
    return tf.where(is_there, dense, tf.cast(feature.reading.fill, dense.dtype))


def entry_counts(features: Sequence[Feature], parsed: Mapping[str, Any]) -> tf.Tensor:
    """Returns how many entries records have as they are read, int32 [batch, len(features)].

    Args:
        features: of variable length.
        parsed: their values, see ``parsing.parsed_values``.
    """
    counts = []
    for feature in features:
        length, *entry = feature.read_shape
        values, of_entry = parsed[feature.name], math.prod(entry)
        if feature.encoding == "raw":
            found = tf.strings.length(values) // (of_entry * np.dtype(feature.dtype).itemsize)
        else:
            found = tf.cast(values.row_lengths(), tf.int32) // of_entry
        counts.append(tf.minimum(found, length))
    return tf.stack(counts, axis=1)


def _filled(values: tf.RaggedTensor, feature: Feature, width: int) -> tf.Tensor:
    """Returns [batch, width] of the feature's dtype."""
    if feature.dtype == STRING:
        return values.to_tensor("", shape=(None, width))
    fill = tf.cast(feature.reading.fill, values.dtype)
    return tf.cast(values.to_tensor(fill, shape=(None, width)), feature.dtype)


def _of_bytes(
    feature: Feature, values: tf.Tensor, width: int, of_entry: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns [batch, width] filled with zeros, and how many values there were, int64 [batch]."""
    item_bytes = np.dtype(feature.dtype).itemsize
    lengths = tf.cast(tf.strings.length(values), tf.int64)
    with tf.control_dependencies([_fits(feature, lengths, of_entry * item_bytes)]):
        digits = tf.io.decode_raw(values, tf.uint8, fixed_length=width * item_bytes)
    digits = tf.ensure_shape(digits, (None, width * item_bytes))
    return from_bytes(digits, feature.dtype), lengths // item_bytes


def _fits(feature: Feature, found: tf.Tensor, of_entry: int) -> tf.Operation:
    what = "bytes" if feature.encoding == "raw" else "values"
    return check(
        tf.reduce_all(found % of_entry == 0),
        f"feature '{feature.name}' must have {of_entry} {what} for each entry",
        listed(found),
    )
