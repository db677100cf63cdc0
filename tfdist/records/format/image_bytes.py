"""Whether the bytes of an image file can be decoded, every row of it. Needs no TensorFlow.

Pillow is imported here alone, when images are first met.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Sequence

from tfdist.errors import in_one_line, package_missing
from tfdist.records.format.exif import UPRIGHT, is_sideways, orientation_of_exif

try:
    from PIL import Image, UnidentifiedImageError
except ImportError as error:
    raise package_missing("Pillow", "files of images", "images", error) from error

__all__ = ["UNREADABLE", "Image", "UnidentifiedImageError", "orientation_of", "undecodable"]

_PNG_END = b"IEND\xaeB`\x82"
_JPEG_END = b"\xff\xd9"
# Of a segment; none within pixels.
_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
# All that Pillow raises for a file that it cannot read, or that ends where it does not expect it.
UNREADABLE = (
    *(OSError, SyntaxError, ValueError, Image.DecompressionBombError),
    *(EOFError, IndexError, struct.error),
)


def orientation_of(image: Image.Image) -> int:
    """Returns the orientation that the EXIF of an opened image names, 1 to 8; see ``exif``."""
    exif = image.info.get("exif")
    return orientation_of_exif(exif) if isinstance(exif, bytes) else UPRIGHT


def _has_end(jpeg: bytes) -> bool:
    """Whether the pixels of a JPEG file end with the mark of its end, whatever is behind that."""
    if jpeg.rstrip(b"\0").endswith(_JPEG_END):
        return True
    at = len(_JPEG_END)
    while (found := _MARKER.search(jpeg, at)) is not None and found[0] != _JPEG_END:
        at = found.end() + int.from_bytes(jpeg[found.end() : found.end() + 2], "big")
    return found is not None


def undecodable(
    data: bytes, shape: Sequence[int] | None = None, *, upright: bool = False
) -> str | None:
    """Returns why an image cannot be decoded; None when it can. Pillow warns of huge ones.

    Args:
        data: the bytes of a file.
        shape: height, width and channels that it must have; None for any.
        upright: whether that is the shape of a JPEG image turned as its EXIF says.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.verify()  # The checksums of a PNG; it can be used once.
            if image.format == "PNG" and _PNG_END not in data:  # libpng wants it, Pillow not.
                return "its end is damaged, or cut off"
        with Image.open(io.BytesIO(data)) as image:
            size = (image.height, image.width)
            is_turned = upright and data[:2] == b"\xff\xd8"
            if is_turned and is_sideways(orientation_of(image)):
                size = size[::-1]
            if shape is not None and size != tuple(shape[:2]):
                return f"{size[1]}x{size[0]} pixels where there are {shape[1]}x{shape[0]}"
            image.load()
            if image.format in ("JPEG", "MPO") and not _has_end(data):  # libjpeg wants it, too.
                return "its end is damaged, or cut off"
    except UNREADABLE as error:
        return in_one_line(error)
    return None
