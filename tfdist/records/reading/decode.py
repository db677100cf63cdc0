"""From a batch of serialised records to tensors: always whole batches, never one record."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.records.format.encoding import FOOTER_BYTES, HEADER_BYTES
from tfdist.records.format.manifest import Layout, Slot
from tfdist.records.format.schema import IMAGE_ENCODINGS, Feature, Schema
from tfdist.records.reading.graph_checks import check, listed

# Names the graph's nodes that decode images, and so appears in the message when one fails; a check
# for each image, as for raw features, would cost as much as decoding a small one.
IMAGE_NODE = "tfdist_image"

Decoder = Callable[[tf.Tensor], Any]


def batch_spec(schema: Schema) -> Any:
    """Returns the structure of tf.TensorSpec of a batch of unknown size."""
    return schema.nest(
        {
            feature.name: tf.TensorSpec((None, *feature.shape), feature.dtype)
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
    rows = tf.io.decode_raw(frames, tf.uint8)
    frame_bytes = HEADER_BYTES + layout.record_bytes + FOOTER_BYTES
    rows = tf.ensure_shape(rows, (None, frame_bytes))[:, HEADER_BYTES:-FOOTER_BYTES]
    return decode_rows(schema, layout, rows)


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
    elif feature.dtype == "bool":
        values = tf.cast(values, tf.bool)
    elif feature.dtype != "uint8":
        item_bytes = np.dtype(feature.dtype).itemsize
        values = tf.reshape(values, (-1, feature.num_values, item_bytes))
        values = (
            tf.bitcast(values[..., 0], feature.dtype)
            if item_bytes == 1
            else tf.bitcast(values, feature.dtype)
        )
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
    parsed = tf.io.parse_example(
        serialized, {feature.name: _parse_spec(feature) for feature in schema.features}
    )
    return schema.nest(
        {feature.name: _decode(feature, parsed[feature.name]) for feature in schema.features}
    )


def _parse_spec(feature: Feature) -> tf.io.FixedLenFeature:
    if feature.encoding == "int64":
        return tf.io.FixedLenFeature(feature.shape, tf.int64)
    if feature.encoding == "float":
        return tf.io.FixedLenFeature(feature.shape, tf.float32)
    return tf.io.FixedLenFeature((), tf.string)


def _decode(feature: Feature, values: tf.Tensor) -> tf.Tensor:
    if feature.encoding in IMAGE_ENCODINGS:
        return _decode_images(feature, values)
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
    return tf.cast(values, feature.dtype)


def _decode_images(feature: Feature, files: tf.Tensor) -> tf.Tensor:
    channels = feature.shape[-1]

    def decode(file: tf.Tensor) -> tf.Tensor:
        if feature.encoding == "jpeg":
            image = tf.io.decode_jpeg(file, channels, name=IMAGE_NODE)
        else:
            # decode_png reads JPEG files too.
            image = tf.io.decode_png(file, channels, tf.as_dtype(feature.dtype), name=IMAGE_NODE)
        return tf.ensure_shape(image, feature.shape, name=IMAGE_NODE)

    return tf.map_fn(decode, files, fn_output_signature=tf.TensorSpec(feature.shape, feature.dtype))


def spec_bytes(spec: Any) -> int | None:
    """Returns the bytes of one record of a batch's specs, or None when a size is not known."""
    total = 0
    for leaf in tf.nest.flatten(spec):
        shape = leaf.shape[1:]
        if not shape.is_fully_defined() or leaf.dtype == tf.string:
            return None
        total += math.prod(shape.as_list()) * leaf.dtype.size
    return total
