"""From the bytes of image files to pixels of one size, as the manifest says that they are read."""

from __future__ import annotations

import functools

import tensorflow as tf

from tfdist.errors import DataError
from tfdist.records.format.exif import (
    APP1,
    ENTRY_BYTES,
    EXIF,
    LONG,
    SHORT,
    START_OF_SCAN,
    TAG,
    UPRIGHT,
    is_sideways,
)
from tfdist.records.format.schema import Feature, Schema

# Names the graph's nodes that decode images, and so appears in the message when one fails; a check
# for each image, as for raw features, would cost as much as decoding a small one.
IMAGE_NODE = "tfdist_image"

_WITH_ALPHA = 4
_OPAQUE = 255
# What libjpeg can divide the sides of an image by while it decodes it.
_RATIOS = (1, 2, 4, 8)
# How many times larger than wanted it is left, so that what follows can hardly tell.
_GAP = 2

Sides = tuple[tf.Tensor, tf.Tensor]


def check_one_size(schema: Schema) -> None:
    """Raises DataError when images are read in the sizes they have: those make no batch."""
    for feature in schema.features:
        if feature.is_image and None in feature.read_shape:
            raise DataError(
                "images must be read in one size, as batches are",
                received=f"'{feature.name}', whose sizes differ from record to record",
                mend="Say the size that they are read in, which writes no record anew: `tfdist "
                "adopt DIR --resize HxW`; or say it when they are written: `tfdist shard SOURCE "
                "OUT --resize HxW`",
            )


def decode_images(feature: Feature, files: tf.Tensor) -> tf.Tensor:
    """Returns images of one size, [batch, *feature.read_shape], from their files, string [batch].

    Each is decoded by itself: its pixels are the same in every batch.
    """
    spec = tf.TensorSpec(feature.read_shape, feature.dtype)
    return tf.map_fn(lambda file: decode_image(feature, file), files, fn_output_signature=spec)


def decode_image(feature: Feature, file: tf.Tensor) -> tf.Tensor:
    """Returns one image from its file, scalar string, in the feature's dtype.

    Its shape is ``feature.read_shape``; without a size to be resized to, an image has its own.
    Pixels are resized bilinearly, over all that a pixel covers where there were more, and rounded
    to the dtype. A JPEG file that is at least twice as large as wanted is decoded at 1/2, 1/4 or
    1/8 first, which libjpeg does in the frequencies that it has before it, and exactly alike
    everywhere. Where the reading says upright, a JPEG file is turned as its EXIF says, before all
    else. An image that is a label is a mask, whose numbers are never mixed: the nearest one
    is taken.
    """
    shape = feature.read_shape
    from_png = functools.partial(_from_png, feature, file)
    from_jpeg = functools.partial(_from_jpeg, feature, file)
    if feature.encoding == "jpeg":
        return from_jpeg()
    # decode_png reads JPEG files too, but neither smaller ones nor with an alpha channel.
    is_plain = not (_is_resized(feature) or feature.reading.upright or shape[-1] == _WITH_ALPHA)
    if feature.encoding == "png" or is_plain:
        return from_png()
    return tf.ensure_shape(tf.cond(tf.io.is_jpeg(file), from_jpeg, from_png), shape)


def _is_resized(feature: Feature) -> bool:
    return feature.reading.size not in (None, feature.shape[:2])


def _from_png(feature: Feature, file: tf.Tensor) -> tf.Tensor:
    channels = feature.read_shape[-1]
    image = tf.io.decode_png(file, channels, tf.as_dtype(feature.dtype), name=IMAGE_NODE)
    image = tf.ensure_shape(image, (*feature.shape[:2], channels), name=IMAGE_NODE)
    return _fitted(feature, image, tf.shape(image)[:2]) if _is_resized(feature) else image


def _from_jpeg(feature: Feature, file: tf.Tensor) -> tf.Tensor:
    channels = feature.read_shape[-1]
    orientation = orientation_of_jpeg(file) if feature.reading.upright else None
    if not _is_resized(feature):
        image = _decode_jpeg(file, channels, 1)
        image = image if orientation is None else turned(image, orientation)
        return tf.ensure_shape(image, (*feature.shape[:2], channels), name=IMAGE_NODE)
    sides = tf.io.extract_jpeg_shape(file, tf.int32, name=IMAGE_NODE)[:2]
    if orientation is not None:
        sides = tf.where(is_sideways(orientation), sides[::-1], sides)
    if None not in feature.shape:
        # What does not fit fails under the name by which an image is known.
        known = tf.ensure_shape(tf.zeros(sides, tf.bool), feature.shape[:2], name=IMAGE_NODE)
        sides = tf.shape(known)
    times = tf.cast(sides, tf.int64) // feature.reading.size
    least = tf.reduce_max(times) if feature.reading.fit == "pad" else tf.reduce_min(times)
    # 1, 2, 4 and 8 as their logarithms.
    branch = tf.reduce_sum(tf.cast(least >= [_GAP * ratio for ratio in _RATIOS[1:]], tf.int32))
    branches = [functools.partial(_decode_jpeg, file, channels, ratio) for ratio in _RATIOS]
    image = tf.ensure_shape(tf.switch_case(branch, branches), (None, None, channels))
    image = image if orientation is None else turned(image, orientation)
    return _fitted(feature, image, sides)


def _decode_jpeg(file: tf.Tensor, channels: int, ratio: int) -> tf.Tensor:
    image = tf.io.decode_jpeg(file, min(channels, 3), ratio, name=IMAGE_NODE)
    if channels != _WITH_ALPHA:
        return image
    return tf.pad(image, [[0, 0], [0, 0], [0, 1]], constant_values=_OPAQUE)


def _fitted(feature: Feature, image: tf.Tensor, sides: tf.Tensor) -> tf.Tensor:
    """Returns an image in the size that it is read in.

    Args:
        image: the whole image, perhaps smaller than it is stored.
        sides: height and width as it is stored (and turned upright), which say what is cut off: so
            that an image and its mask are cut alike.
    """
    fit = {"stretch": _stretched, "crop": _cropped, "pad": _padded}[feature.reading.fit]
    height, width = tf.unstack(tf.cast(sides, tf.int64))
    fitted = fit(image, (height, width), feature.reading.size, feature.role == "label")
    return tf.ensure_shape(fitted, feature.read_shape)


def _stretched(image: tf.Tensor, sides: Sides, size: tuple[int, int], is_mask: bool) -> tf.Tensor:
    return _resized(image, size, is_mask)


def _cropped(image: tf.Tensor, sides: Sides, size: tuple[int, int], is_mask: bool) -> tf.Tensor:
    """Cuts the middle of the size's proportions out, and resizes that.

    The same as to cover the size and to crop that, and never an image of any width between.
    """
    (height, width), (wanted_height, wanted_width) = sides, tf.unstack(tf.constant(size, tf.int64))
    is_wide = width * wanted_height > height * wanted_width
    kept_height = tf.where(is_wide, height, _scaled(wanted_height, width, wanted_width))
    kept_width = tf.where(is_wide, _scaled(wanted_width, height, wanted_height), width)
    kept = tf.stack([kept_height, kept_width])
    begin = (tf.stack(sides) - kept) // 2
    # From the pixels that are stored to those that were decoded.
    now, stored = tf.shape(image, tf.int64)[:2], tf.stack(sides)
    begin = _rounded(begin * now, stored)
    kept = tf.clip_by_value(_rounded(kept * now, stored), 1, now - begin)
    part = tf.slice(image, tf.concat([begin, [0]], 0), tf.concat([kept, [image.shape[-1]]], 0))
    return _resized(part, size, is_mask)


def _padded(image: tf.Tensor, sides: Sides, size: tuple[int, int], is_mask: bool) -> tf.Tensor:
    """Resizes so that the longer side fits, and puts zeros around."""
    (height, width), (wanted_height, wanted_width) = sides, tf.unstack(tf.constant(size, tf.int64))
    is_wide = width * wanted_height > height * wanted_width
    inner_height = tf.where(is_wide, _scaled(height, wanted_width, width), wanted_height)
    inner_width = tf.where(is_wide, wanted_width, _scaled(width, wanted_height, height))
    inner = tf.stack([inner_height, inner_width])
    resized = _resized(image, tf.cast(inner, tf.int32), is_mask)
    before = (tf.constant(size, tf.int64) - inner) // 2
    after = tf.constant(size, tf.int64) - inner - before
    around = tf.stack([before, after], axis=1)
    return tf.pad(resized, tf.concat([around, tf.zeros((1, 2), tf.int64)], axis=0))


def _resized(image: tf.Tensor, size: tuple[int, int] | tf.Tensor, is_mask: bool) -> tf.Tensor:
    if is_mask:
        return tf.image.resize(image, size, "nearest")
    resized = tf.image.resize(image, size, "bilinear", antialias=True)
    return tf.saturate_cast(tf.round(resized), image.dtype)


def _scaled(length: tf.Tensor, by: tf.Tensor, of: tf.Tensor) -> tf.Tensor:
    """Returns length * by / of to the nearest integer, at least 1."""
    return tf.maximum(_rounded(length * by, of), 1)


def _rounded(number: tf.Tensor, by: tf.Tensor) -> tf.Tensor:
    """Returns number / by to the nearest integer: without floats, and so exactly."""
    return (2 * number + by) // (2 * by)


# The same as ``records.format.exif``, in a graph: tf.io leaves alone how a photo was turned.
_HEAD_BYTES = 10


def orientation_of_jpeg(file: tf.Tensor) -> tf.Tensor:
    """Returns the orientation, int64 scalar of 1 to 8, of a JPEG file, scalar string."""
    length = tf.cast(tf.strings.length(file, name="upright"), tf.int64)

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
    values = tf.where(kinds == LONG, _number(entries[:, 8:], is_big), values)
    is_number = (kinds == SHORT) | (kinds == LONG)
    named = (tags == TAG) & is_number & (values > UPRIGHT) & (values <= 8)
    return tf.concat([tf.boolean_mask(values, named), [UPRIGHT]], 0)[0]


def _bytes(file: tf.Tensor, at: tf.Tensor, size: int | tf.Tensor, stop: tf.Tensor) -> tf.Tensor:
    """Returns int64 [size]: bytes of a file, and zeros behind ``stop``."""
    at = tf.minimum(at, stop)
    part = tf.strings.substr(file, at, tf.minimum(tf.cast(size, tf.int64), stop - at))
    digits = tf.io.decode_raw(part, tf.uint8, fixed_length=tf.cast(size, tf.int32))
    return tf.cast(digits, tf.int64)


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
