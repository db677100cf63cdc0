"""Photos as they were taken: turned as the EXIF in their files says, which tf.io leaves alone.

The same as ``records.format.exif``, in a graph.
"""

from __future__ import annotations

import functools

import tensorflow as tf

from tfdist.records.format.exif import (
    APP1,
    ENTRY_BYTES,
    EXIF,
    SHORT,
    START_OF_SCAN,
    TAG,
    UPRIGHT,
)

_HEAD_BYTES = 10


def orientation_of_jpeg(file: tf.Tensor) -> tf.Tensor:
    """Returns the orientation, int64 scalar of 1 to 8, of a JPEG file, scalar string."""
    length = tf.strings.length(file, name="upright")
    length = tf.cast(length, tf.int64)

    def look(at: tf.Tensor, _found: tf.Tensor, _is_open: tf.Tensor) -> list[tf.Tensor]:
        head = _bytes(file, at, _HEAD_BYTES, length)
        is_marker = (head[0] == 0xFF) & (head[1] != START_OF_SCAN)
        is_exif = (head[1] == APP1) & tf.reduce_all(head[4:] == list(EXIF))
        end = at + 2 + _number(head[2:4], is_big=True)
        following = tf.where(head[1] == 0xFF, at + 1, end)
        found = is_marker & is_exif
        return [tf.where(found, at, following), found, is_marker & ~is_exif]

    start = [tf.constant(2, tf.int64), tf.constant(False), tf.constant(True)]
    at, found, _ = tf.while_loop(lambda _at, _found, is_open: is_open, look, start)
    return tf.cond(
        found,
        lambda: _orientation_of_exif(file, at, length),
        lambda: tf.constant(UPRIGHT, tf.int64),
    )


def _orientation_of_exif(file: tf.Tensor, at: tf.Tensor, length: tf.Tensor) -> tf.Tensor:
    head = _bytes(file, at, _HEAD_BYTES, length)
    stop = tf.minimum(at + 2 + _number(head[2:4], is_big=True), length)
    tiff = at + _HEAD_BYTES
    head = _bytes(file, tiff, 8, stop)
    is_big = head[0] == ord("M")
    first = tiff + _number(head[4:], is_big)
    count = _number(_bytes(file, first, 2, stop), is_big)
    # Those that are cut off are no entries.
    count = tf.clip_by_value((stop - first - 2) // ENTRY_BYTES, 0, count)
    entries = _bytes(file, first + 2, ENTRY_BYTES * tf.maximum(count, 1), stop)
    entries = tf.reshape(entries, (-1, ENTRY_BYTES))
    tags, kinds, values = (_number(entries[:, n : n + 2], is_big) for n in (0, 2, 8))
    named = (tags == TAG) & (kinds == SHORT) & (values > UPRIGHT) & (values <= 8)
    named = tf.concat([tf.boolean_mask(values, named), [UPRIGHT]], 0)
    return named[0]


def _bytes(file: tf.Tensor, at: tf.Tensor, size: int | tf.Tensor, stop: tf.Tensor) -> tf.Tensor:
    """Returns int64 [size]: bytes of a file, and zeros behind ``stop``."""
    at = tf.minimum(at, stop)
    part = tf.strings.substr(file, at, tf.minimum(tf.cast(size, tf.int64), stop - at))
    fixed = tf.cast(size, tf.int32)
    return tf.cast(tf.io.decode_raw(part, tf.uint8, fixed_length=fixed), tf.int64)


def _number(digits: tf.Tensor, is_big: bool | tf.Tensor) -> tf.Tensor:
    """Returns the numbers int64 [...] of bytes, int64 [..., bytes]."""
    digits = tf.where(is_big, digits, tf.reverse(digits, [-1]))
    places = [256**place for place in reversed(range(digits.shape[-1]))]
    return tf.reduce_sum(digits * tf.constant(places, tf.int64), axis=-1)


def turned(image: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """Returns an image [height, width, channels] upright, which may exchange height and width."""

    def by(number: int) -> tf.Tensor:
        upright = tf.transpose(image, (1, 0, 2)) if number >= 5 else image
        # Upside down, mirrored.
        axes = [*([0] if number in (3, 4, 7, 8) else []), *([1] if number in (2, 3, 6, 7) else [])]
        return tf.reverse(upright, axes) if axes else upright

    branches = [functools.partial(by, number) for number in range(1, 9)]
    upright = tf.switch_case(tf.cast(orientation - 1, tf.int32), branches)
    return tf.ensure_shape(upright, (None, None, image.shape[-1]))
