"""Images in another size before they are written: pixels are made anew, with Pillow."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tfdist.records.format.image_bytes import Image


@dataclass(frozen=True)
class Resizing:
    """Height and width, and how they are reached: "stretch", "crop" or "pad"."""

    size: tuple[int, int]
    fit: str


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
