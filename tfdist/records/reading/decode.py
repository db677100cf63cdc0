"""From a batch of serialised records to tensors: always whole batches, never one record.

Features of variable length become dense: filled up, or cut off, to one length. It is the same for
every batch, whoever reads it: so each step is the same on any number of replicas, with layers too
that do not mask what was filled in. What is more than the longest record of a batch needs is cut
off where a user asks for it: see ``batch_padding``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.records.format.encoding import FOOTER_BYTES, HEADER_BYTES
from tfdist.records.format.manifest import Layout, Slot
from tfdist.records.format.schema import AS_STORED, IMAGE_ENCODINGS, STRING, Feature, Schema
from tfdist.records.reading.graph_checks import check, listed
from tfdist.records.reading.images import decode_image, decode_images

# Of a string in a tensor, beside its text.
_STRING_BYTES = 24
_STORED = {"int64": tf.int64, "float": tf.float32, "bytes": tf.string}

Decoder = Callable[[tf.Tensor], Any]


def batch_spec(schema: Schema) -> Any:
    """Returns the structure of tf.TensorSpec of a batch of unknown size."""
    return schema.nest(
        {
            feature.name: tf.TensorSpec((None, *feature.read_shape), feature.dtype)
            for feature in schema.features
        }
    )


def make_decoder(schema: Schema, layout: Layout | None, *, framed: bool = False) -> Decoder:
    """Returns a graph-safe function: Examples, string [batch], to the schema's structure.

    With a layout the bytes are sliced, without one the Examples are parsed.

    Args:
        framed: whether Examples of a layout come with their frames.
    """
    if layout is None:
        return lambda serialized: _parse(schema, serialized)
    if framed:
        return lambda frames: _unframe(schema, layout, frames)
    return lambda serialized: _slice(schema, layout, serialized)


def make_record_decoder(
    schema: Schema, layout: Layout | None, *, framed: bool = False
) -> tuple[Decoder, Callable[[Any], Any]]:
    """Returns graph-safe functions that together do what ``make_decoder`` does, and its arguments.

    Returns:
        From Examples, string [batch], to the schema's structure with the files of images, string
        [batch], in place of the images; and from one record of that to its tensors. Images may
        have sizes of their own: no batch is made of them.
    """
    images = {feature.name: feature for feature in schema.features if feature.is_image}
    as_files = replace(
        schema,
        features=tuple(
            replace(feature, dtype=STRING, shape=(), encoding="bytes", reading=AS_STORED)
            if feature.is_image
            else feature
            for feature in schema.features
        ),
    )
    names = schema.nest({feature.name: feature.name for feature in schema.features})

    def finish(record: Any) -> Any:
        def decode(name: str, tensor: tf.Tensor) -> tf.Tensor:
            return decode_image(images[name], tensor) if name in images else tensor

        return tf.nest.map_structure(decode, names, record)

    return make_decoder(as_files, layout, framed=framed), finish


def _slice(schema: Schema, layout: Layout, serialized: tf.Tensor) -> Any:
    record_bytes = layout.record_bytes
    lengths = tf.strings.length(serialized)
    fits = check(
        tf.reduce_all(lengths == record_bytes),
        f"every record must have {record_bytes} bytes",
        listed(lengths),
    )
    with tf.control_dependencies([fits]):
        rows = tf.io.decode_raw(serialized, tf.uint8)
    return decode_rows(schema, layout, tf.ensure_shape(rows, (None, record_bytes)))


def _unframe(schema: Schema, layout: Layout, frames: tf.Tensor) -> Any:
    rows = tf.ensure_shape(tf.io.decode_raw(frames, tf.uint8), (None, layout.frame_bytes))
    return decode_rows(schema, layout, rows[:, HEADER_BYTES:-FOOTER_BYTES])


def decode_rows(schema: Schema, layout: Layout, rows: tf.Tensor) -> Any:
    """Returns the schema's structure from the bytes of Examples, uint8 [batch, record_bytes]."""
    return schema.nest(
        {
            feature.name: _from_slot(rows, feature, layout.slots[feature.name])
            for feature in schema.features
        }
    )


def _from_slot(rows: tf.Tensor, feature: Feature, slot: Slot) -> tf.Tensor:
    """Returns [batch, *shape] from the records' bytes, uint8 [batch, record_bytes]."""
    values = rows[:, slot.offset : slot.offset + slot.bytes]
    if slot.kind == "varint":
        values = _from_varints(values, slot.bytes // feature.num_values)
        values = tf.cast(values, feature.dtype)
    else:
        values = from_bytes(values, feature.dtype)
    return tf.reshape(values, (-1, *feature.shape))


def _from_varints(digits: tf.Tensor, width: int) -> tf.Tensor:
    """Returns int64 [batch, k] from padded varints, uint8 [batch, k * width]."""
    if width == 1:
        return tf.cast(digits, tf.int64)
    digits = tf.reshape(digits, (-1, digits.shape[1] // width, width))
    # Shifts cost as much as the bytes they move, so they are done in the smallest type that holds.
    wide = tf.uint64 if width > 4 else tf.int32
    number = tf.zeros_like(digits[..., 0], wide)
    for place in range(width):
        digit = tf.cast(digits[..., place] & 127, wide)
        number |= tf.bitwise.left_shift(digit, tf.constant(7 * place, wide))
    return tf.bitcast(number, tf.int64) if wide == tf.uint64 else tf.cast(number, tf.int64)


def _parse(schema: Schema, serialized: tf.Tensor) -> Any:
    parsed = parsed_values(schema, serialized)
    return schema.nest(
        {feature.name: _decode(feature, parsed[feature.name]) for feature in schema.features}
    )


def _decode(feature: Feature, values: tf.Tensor) -> tf.Tensor:
    if feature.encoding in IMAGE_ENCODINGS:
        return decode_images(feature, values)
    if feature.is_ragged:
        return padded(feature, values)
    if feature.encoding == "raw":
        lengths = tf.strings.length(values)
        fits = check(
            tf.reduce_all(lengths == feature.num_bytes),
            f"feature '{feature.name}' must have shape {list(feature.shape)}, "
            f"{feature.num_bytes} bytes",
            listed(lengths),
        )
        with tf.control_dependencies([fits]):
            values = tf.io.decode_raw(values, feature.dtype)
        return tf.reshape(values, (-1, *feature.shape))
    if feature.dtype == STRING:
        return values
    if feature.reading.offset:
        values -= feature.reading.offset
    return tf.cast(values, feature.dtype)


def spec_bytes(spec: Any, text_bytes: int | None = None) -> int | None:
    """Returns the bytes of one record of a batch's specs, or None when a size is not known.

    Args:
        text_bytes: of all text of a record; None when that is not known.
    """
    total, has_text = 0, False
    for leaf in tf.nest.flatten(spec):
        shape = leaf.shape[1:]
        if not shape.is_fully_defined():
            return None
        is_text = leaf.dtype == tf.string
        has_text |= is_text
        total += math.prod(shape.as_list()) * (_STRING_BYTES if is_text else leaf.dtype.size)
    if not has_text:
        return total
    return None if text_bytes is None else total + text_bytes


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
        parsed: their values, see ``parsed_values``.
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
