"""Images upright and in another size before they are written: pixels made anew, with Pillow."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tfdist.records.format.image_bytes import Image

# What turns an image of each orientation of EXIF upright.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True)
class Resizing:
    """Height and width, and how they are reached: "stretch", "crop" or "pad"."""

    size: tuple[int, int]
    fit: str


def turned(image: Image.Image, orientation: int) -> Image.Image:
    """Returns an image upright, which says nothing of an orientation any more."""
    if orientation not in _TURNS:
        return image
    upright = image.transpose(_TURNS[orientation])
    upright.info.pop("exif", None)
    return upright


def resized(image: Image.Image, to: Resizing, *, is_mask: bool = False) -> Image.Image:
    """Returns an image in another size: with Lanczos' filter, or the nearest pixels of a mask."""
    if is_mask:
        return _fitted(image, to, Image.Resampling.NEAREST)
    if not image.mode.startswith("I"):
        return _fitted(image, to, Image.Resampling.LANCZOS)
    # Pillow filters no 16-bit pixels.
    wide = Image.fromarray(np.asarray(image).astype(np.float32))
    values = np.asarray(_fitted(wide, to, Image.Resampling.LANCZOS))
    most = np.iinfo(np.uint16).max
    return Image.fromarray(values.round().clip(0, most).astype(np.uint16))


def _fitted(image: Image.Image, to: Resizing, filtered: Image.Resampling) -> Image.Image:
    from PIL import ImageOps

    size = (to.size[1], to.size[0])
    if to.fit == "crop":
        return ImageOps.fit(image, size, filtered)
    if to.fit == "pad":
        return ImageOps.pad(image, size, filtered, color=0)
    return image.resize(size, filtered)
