"""Features of variable length at the length of a batch, and batches of records of one length.

The lengths of all records are known before the first batch is read. So whoever reads a share of a
global batch pads it to the longest record of the whole one, and the order of an epoch that brings
records of similar length together is a function of its number alone, on any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import DataError
from tfdist.records.format.pad_to import Padding
from tfdist.records.format.schema import STRING, Feature, Schema
from tfdist.records.reading.graph_checks import check

# Of how many batches records are sorted together. More waste less, and leave less to chance.
_POOL_BATCHES = 50
# Records whose lengths are counted at once.
_COUNTED_RECORDS = 1024
_SAME_LENGTH = "record_fn must give a record the same length each time, where pad_to is said"


class BatchPadding:
    """How the batches of one source are padded, and which records are in them.

    Attributes:
        padding: what the user said.
        fills: of each part of a record of variable length, what it is padded with; None for parts
            of one shape. In the order of tf.nest.
    """

    def __init__(self, padding: Padding, fills: Sequence[Any], lengths: Any):
        """Makes the paddings of one source.

        Args:
            lengths: entries of each part of variable length as it is read, int32 [records, parts].
        """
        self.padding = padding
        self.fills = tuple(fills)
        varying = [place for place, fill in enumerate(fills) if fill is not None]
        self._columns = {place: column for column, place in enumerate(varying)}
        self._lengths = tf.constant(lengths)

    def spec(self, spec: Any) -> Any:
        """Returns the specs of batches, of which those of one length are given."""

        def free(leaf: tf.TensorSpec, _: int) -> tf.TensorSpec:
            return tf.TensorSpec((None, None, *leaf.shape[2:]), leaf.dtype)

        return self._of_varying(free, spec)

    def cut(self, record: Any, number: tf.Tensor) -> Any:
        """Returns a record that is padded to any length at its own; ``number``: int64 []."""
        return self._of_varying(
            lambda leaf, column: tf.ensure_shape(
                leaf[: self._lengths[number, column]], (None, *leaf.shape[1:])
            ),
            record,
        )

    def evened(self, record: Any, number: tf.Tensor) -> Any:
        """Returns a record of its own length at that of the longest; ``number``: int64 []."""
        longest = tf.reduce_max(self._lengths, axis=0)

        def even(leaf: tf.Tensor, column: int) -> tf.Tensor:
            known, found = self._lengths[number, column], tf.shape(leaf)[0]
            alike = check(
                found == known, _SAME_LENGTH, tf.strings.format("{}, then {}", (known, found))
            )
            with tf.control_dependencies([alike]):
                fill = self._fill(leaf, column)
            return _at_width(leaf[None], longest[column], fill)[0]

        return self._of_varying(even, record)

    def _of_varying(self, change: Callable[[Any, int], Any], structure: Any) -> Any:
        """Returns a structure whose parts of variable length have gone through ``change``."""
        flat = tf.nest.flatten(structure)
        for place, column in self._columns.items():
            flat[place] = change(flat[place], column)
        return tf.nest.pack_sequence_as(structure, flat)

    def _fill(self, tensor: tf.Tensor, column: int) -> Any:
        fill = [fill for fill in self.fills if fill is not None][column]
        return tf.cast(fill, tensor.dtype) if tensor.dtype != tf.string else tf.constant("")

    def longest(self, numbers: tf.Tensor) -> tf.Tensor:
        """Returns int32 [features]: the most entries that the records of these numbers have."""
        return tf.reduce_max(tf.gather(self._lengths, numbers), axis=0)

    def padded(self, batch: Any, longest: tf.Tensor) -> Any:
        """Returns a batch of one length at that of ``longest``, or the multiple that holds it."""
        multiple = self.padding.multiple
        # A layer may not take a batch without an entry.
        widths = (tf.maximum(longest, 1) + multiple - 1) // multiple * multiple

        return self._of_varying(
            lambda tensor, column: _at_width(tensor, widths[column], self._fill(tensor, column)),
            batch,
        )

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


def of_schema(padding: Padding, schema: Schema, lengths: np.ndarray) -> BatchPadding:
    """Returns the paddings of records as they are read.

    Args:
        lengths: entries of each of ``ragged_features``, int32 [records, features].
    """
    features = {feature.name: feature for feature in ragged_features(schema)}
    column = {name: column for column, name in enumerate(features)}
    names = tf.nest.flatten(
        schema.nest({feature.name: feature.name for feature in schema.features})
    )
    fills = [_fill_of(features[name]) if name in features else None for name in names]
    varying = [column[name] for name in names if name in features]
    return BatchPadding(padding, fills, lengths[:, varying])


def of_records(
    padding: Padding, spec: Any, own: BatchPadding, own_spec: Any, records: tf.data.Dataset
) -> BatchPadding:
    """Returns the paddings of records that a function has changed; reads all of them once.

    Args:
        spec: of a batch of them.
        own, own_spec: the paddings before, and the spec.
        records: all of them, in their order, each of its own length.
    """
    leaves, before = tf.nest.flatten(spec), tf.nest.flatten(own_spec)
    fills = ["" if leaf.dtype == tf.string else 0 for leaf in leaves]
    if len(leaves) == len(before):
        # What stands in the place of a feature is padded as that is, if it is text or numbers, too.
        kinds = [
            (leaf.dtype == tf.string) == (of.dtype == tf.string)
            for leaf, of in zip(leaves, before, strict=True)
        ]
        places = zip(fills, own.fills, kinds, strict=True)
        fills = [of if is_alike and of is not None else fill for fill, of, is_alike in places]
    varies = [leaf.shape[1:2] == [None] for leaf in leaves]
    fills = [fill if is_free else None for fill, is_free in zip(fills, varies, strict=True)]

    def lengths(*record: Any) -> tf.Tensor:
        parts = zip(tf.nest.flatten(record), varies, strict=True)
        found = [tf.shape(part)[0] for part, is_free in parts if is_free]
        return tf.stack(found) if found else tf.zeros([0], tf.int32)

    found = records.map(lengths).batch(_COUNTED_RECORDS).as_numpy_iterator()
    return BatchPadding(padding, fills, np.concatenate(list(found)))


def check_can_pad(schema: Schema | None, *, is_apart: bool) -> None:
    """Checks that records can be padded batch by batch.

    Raises:
        DataError: they have one length, or lengths that cannot be known beforehand.
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


def _fill_of(feature: Feature) -> Any:
    return "" if feature.dtype == STRING else feature.reading.fill or 0


def _at_width(tensor: tf.Tensor, width: tf.Tensor, fill: Any) -> tf.Tensor:
    tensor = tensor[:, :width]
    missing = width - tf.shape(tensor)[1]
    around = [[0, 0]] * tensor.shape.rank
    around[1] = [0, missing]
    padded = tf.pad(tensor, around, constant_values=fill)
    return tf.ensure_shape(padded, (None, None, *tensor.shape[2:]))
