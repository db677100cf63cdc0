"""Presets of ``record_fn`` by name: random changes of images that leave what is on them.

TensorFlow is imported when a record is changed: the command line asks for names alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.errors import DataError, OptionError

if TYPE_CHECKING:
    import tensorflow as tf

# Of height and width, on each side: 4 pixels of 32, as is usual for CIFAR-10 (He et al. 2015,
# arXiv:1512.03385, section 4.2).
_PADDED_SHARE = 8
# Color: the most that brightness moves, as a share of the range; contrast and saturation are
# multiplied by 1 - this to 1 + this.
_BRIGHTNESS = 0.125
_CONTRAST = 0.25
_SATURATION = 0.25
# Gray of red, green and blue: ITU-R BT.601.
_LUMA = (0.299, 0.587, 0.114)
_CHANNELS = (1, 3, 4)
# Every preset has numbers of its own, whatever the others are.
_NUMBERS = 6


def augment(presets: str | Sequence[str]) -> Callable[..., Any]:
    """Returns a ``record_fn`` that changes the image of a record at random, anew in each epoch.

    dtype and range stay: uint8 in 0 to 255, other numbers between the least and the largest of the
    image. Its numbers are those of the record in the epoch: see ``Strategy.dataset``.

    Args:
        presets: "flip,crop,color", or a list of these. flip: left and right are exchanged in half
            of the images. crop: mirrors an eighth of the size around the image and cuts the size
            out anywhere. color: moves brightness by up to an eighth of the range, contrast and, of
            colours, saturation by up to a quarter.

    Raises:
        OptionError: an unknown preset; DataError, when it is given records: they have no image, or
            labels that lie on it.
    """
    names = parse_presets(presets)

    def record_fn(x: Any, *labels: Any, seed: tf.Tensor) -> tuple[Any, ...]:
        import tensorflow as tf

        key = _image_key(x)
        if labels and names != ("color",):
            _refuse_places(labels[0])
        numbers = tf.unstack(tf.random.stateless_uniform([_NUMBERS], seed))
        image = x if key is None else x[key]
        for name in names:
            image = _PRESETS[name](image, numbers)
        return (image if key is None else {**x, key: image}, *labels)

    record_fn.keeps_sizes = True
    return record_fn


def parse_presets(presets: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the names of presets in the order in which they are applied.

    Raises:
        OptionError: there are none, or one is unknown.
    """
    given = presets.split(",") if isinstance(presets, str) else presets
    names = [str(name).strip() for name in given]
    unknown = [name for name in names if name not in _PRESETS]
    if unknown or not names:
        raise OptionError(
            f"augmentations must be one or more of {', '.join(_PRESETS)}",
            received=", ".join(map(repr, unknown)) or "none",
            mend="Write them with commas between, such as flip,crop",
        )
    return tuple(name for name in _PRESETS if name in names)


def _flip(image: tf.Tensor, numbers: list[tf.Tensor]) -> tf.Tensor:
    import tensorflow as tf

    return tf.cond(numbers[0] < 0.5, lambda: tf.reverse(image, [1]), lambda: image)


def _crop(image: tf.Tensor, numbers: list[tf.Tensor]) -> tf.Tensor:
    import tensorflow as tf

    for axis in (0, 1):
        last = tf.shape(image)[axis] - 1
        margin = (last + 1) // _PADDED_SHARE
        places = tf.cast(2 * margin + 1, tf.float32)
        moved = tf.range(last + 1) + tf.cast(numbers[1 + axis] * places, tf.int32) - margin
        # Gathered where it lies: to pad and to cut again takes several times as long.
        mirrored = last - tf.abs(last - tf.abs(moved))
        image = tf.ensure_shape(tf.gather(image, mirrored, axis=axis), image.shape)
    return image


def _color(image: tf.Tensor, numbers: list[tf.Tensor]) -> tf.Tensor:
    import tensorflow as tf

    dtype = image.dtype
    pixels = image if dtype in (tf.float32, tf.float64) else tf.cast(image, tf.float32)
    if dtype == tf.uint8:
        low, high = (tf.cast(limit, pixels.dtype) for limit in (dtype.min, dtype.max))
    else:  # What its range is, only the image tells: of 16 bits many cameras fill 12.
        low, high = tf.reduce_min(pixels), tf.reduce_max(pixels)
    brightness, contrast, saturation = (
        tf.cast(2 * number - 1, pixels.dtype) * most
        for number, most in zip(numbers[3:], (_BRIGHTNESS, _CONTRAST, _SATURATION), strict=True)
    )
    pixels, alpha = pixels[..., :3], pixels[..., 3:]  # Gray and colour have no alpha.
    # All three are one linear map: each pass over the pixels costs as much as a change would.
    shift = brightness * (high - low) - contrast * tf.reduce_mean(pixels)
    if image.shape[-1] == 1:
        pixels *= 1 + contrast
    else:
        gray = tf.tile(tf.constant(_LUMA, pixels.dtype)[:, tf.newaxis], [1, 3])
        mixed = (1 + saturation) * tf.eye(3, dtype=pixels.dtype) - saturation * gray
        flat = tf.matmul(tf.reshape(pixels, [-1, 3]), (1 + contrast) * mixed)
        pixels = tf.reshape(flat, tf.shape(pixels))
    pixels = tf.clip_by_value(pixels + shift, low, high)
    if image.shape[-1] > 3:
        pixels = tf.concat([pixels, alpha], -1)
    pixels = tf.cast(tf.round(pixels) if dtype.is_integer else pixels, dtype)
    return tf.ensure_shape(pixels, image.shape)


# In the order in which they are applied.
_PRESETS = {"flip": _flip, "crop": _crop, "color": _color}


def _image_key(x: Any) -> Any:
    """Returns which of several inputs is the image; None when there is one input, an image."""
    if not isinstance(x, Mapping):
        if _is_image(x):
            return None
        found = f"shape {_shown(x)}" if hasattr(x, "shape") else f"inputs as {type(x).__name__}"
    else:
        images = [key for key, tensor in x.items() if _is_image(tensor)]
        if len(images) == 1:
            return images[0]
        found = f"{len(images) or 'no'} images among {', '.join(map(str, x))}"
    raise DataError(
        "records to augment must have one image, of shape (height, width, channels)",
        received=found,
        mend="Write a record_fn for strategy.dataset, or leave augmentation out",
    )


def _is_image(tensor: Any) -> bool:
    shape = getattr(tensor, "shape", None)
    is_number = shape is not None and (tensor.dtype.is_integer or tensor.dtype.is_floating)
    return is_number and shape.rank == 3 and shape[-1] in _CHANNELS


def _refuse_places(labels: Any) -> None:
    """A mask or boxes would stay where they are, while the image under them moves."""
    import tensorflow as tf

    for label in tf.nest.flatten(labels):
        if getattr(label, "shape", None) is not None and (label.shape.rank or 0) >= 2:
            raise DataError(
                "labels beside flip and crop must not tell of places on the image",
                received=f"labels of shape {_shown(label)}",
                mend="Choose color alone, or write a record_fn that moves labels along",
            )


def _shown(tensor: Any) -> str:
    return str(tuple(tensor.shape)) if tensor.shape.rank is not None else "unknown"
