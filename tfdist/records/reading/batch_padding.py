"""Features of variable length at the length of a batch, and batches of records of one length.

The lengths of all records are known before the first batch is read. So whoever reads a share of a
global batch pads it to the longest record of the whole one, and the order of an epoch that brings
records of similar length together is a function of its number alone, on any number of processes.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.errors import DataError, OptionError
from tfdist.records.format.pad_to import Padding
from tfdist.records.format.schema import STRING, Feature, Schema

# Of how many batches records are sorted together. More waste less, and leave less to chance.
_POOL_BATCHES = 50


class BatchPadding:
    """How the batches of one source are padded, and which records are in them.

    Attributes:
        padding: what the user said.
    """

    def __init__(self, padding: Padding, schema: Schema, lengths: Any):
        """Makes the paddings of one source.

        Args:
            lengths: entries of each feature of variable length as it is read, in the order of
                ``ragged_features``: int32 [records, features].
        """
        self.padding = padding
        features = ragged_features(schema)
        self._columns = {feature.name: column for column, feature in enumerate(features)}
        self._features = {feature.name: feature for feature in features}
        self._names = schema.nest({feature.name: feature.name for feature in schema.features})
        self._lengths = tf.constant(lengths)

    def spec(self, spec: Any) -> Any:
        """Returns the specs of batches, of which those of one length are given."""

        def padded(name: str, leaf: tf.TensorSpec) -> tf.TensorSpec:
            if name not in self._features:
                return leaf
            return tf.TensorSpec((None, None, *leaf.shape[2:]), leaf.dtype)

        return tf.nest.map_structure(padded, self._names, spec)

    def longest(self, numbers: tf.Tensor) -> tf.Tensor:
        """Returns int32 [features]: the most entries that the records of these numbers have."""
        return tf.reduce_max(tf.gather(self._lengths, numbers), axis=0)

    def padded(self, batch: Any, longest: tf.Tensor) -> Any:
        """Returns a batch of one length at that of ``longest``, or the multiple that holds it."""
        multiple = self.padding.multiple
        # A layer may not take a batch without an entry.
        widths = (tf.maximum(longest, 1) + multiple - 1) // multiple * multiple

        def at_width(name: str, tensor: tf.Tensor) -> tf.Tensor:
            if name not in self._features:
                return tensor
            return _at_width(tensor, widths[self._columns[name]], self._features[name])

        return tf.nest.map_structure(at_width, self._names, batch)

    def bucketed_order(self, num_records: int, batch_size: int, key: tf.Tensor) -> tf.Tensor:
        """Returns records [0, num_records) in batches of similar lengths, int64 [num_records].

        All is drawn from ``key``: which records meet, the order of the batches, the rows of each,
        and which records are in a last, smaller batch.
        """
        drawn = tf.random.experimental.stateless_shuffle(
            tf.range(num_records, dtype=tf.int64), seed=key
        )
        num_batches = num_records // batch_size
        if num_batches == 0:
            return drawn
        len_whole = num_batches * batch_size
        whole = drawn[:len_whole]
        length = tf.cast(tf.reduce_max(tf.gather(self._lengths, whole), axis=1), tf.int64)
        places = tf.range(len_whole, dtype=tf.int64)
        if self.padding.buckets:
            bounds = tf.constant(self.padding.buckets, tf.int64)
            rank = tf.searchsorted(bounds, length, out_type=tf.int64)
        else:
            pool = places // (_POOL_BATCHES * batch_size)
            rank = pool * (tf.reduce_max(length) + 1) + length
        # Places as they were drawn, within one length too.
        by_length = tf.sort(rank * len_whole + places) % len_whole
        # Rows as they were drawn: else the last replica would always have the longest ones.
        rows = tf.sort(tf.reshape(by_length, (num_batches, batch_size)), axis=1)
        batches = tf.random.experimental.stateless_shuffle(rows, seed=tf.bitwise.invert(key))
        records = tf.gather(whole, tf.reshape(batches, [-1]))
        return tf.concat([records, drawn[len_whole:]], 0)


def ragged_features(schema: Schema) -> tuple[Feature, ...]:
    return tuple(feature for feature in schema.features if feature.is_ragged)


def check_can_pad(schema: Schema | None, *, is_apart: bool, has_record_fn: bool) -> None:
    """Raises:
    DataError: records that have one length, or whose lengths cannot be known beforehand.
    OptionError: a function that may change lengths.
    """
    if schema is None or not ragged_features(schema):
        raise DataError(
            "pad_to must be said of shards with a feature of variable length",
            received="arrays or a dataset"
            if schema is None
            else ", ".join(f"{f.name} {f.shown_shape}" for f in schema.features),
            mend="Leave it out"
            + (", or write shards with tfdist.records.write" if schema is None else ""),
        )
    if is_apart:
        raise DataError(
            "pad_to must be said of shards that every host has as files, as all must know the "
            "lengths of all records",
            received="shards that come through pipes, or that are divided among hosts",
            mend="Leave it out, or give each host the whole data as files",
        )
    if has_record_fn:
        raise OptionError(
            "record_fn must be left out where batches are padded to their longest record, as it "
            "could change lengths",
            received="record_fn and pad_to",
            mend="Take map_fn, which is given the padded batch, or leave pad_to out",
        )


def _at_width(tensor: tf.Tensor, width: tf.Tensor, feature: Feature) -> tf.Tensor:
    tensor = tensor[:, :width]
    missing = width - tf.shape(tensor)[1]
    around = [[0, 0]] * tensor.shape.rank
    around[1] = [0, missing]
    fill = "" if feature.dtype == STRING else tf.cast(feature.reading.fill, tensor.dtype)
    padded = tf.pad(tensor, around, constant_values=fill)
    return tf.ensure_shape(padded, (None, None, *tensor.shape[2:]))
