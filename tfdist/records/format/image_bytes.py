"""Whether the bytes of an image file can be decoded, every row of it. Needs no TensorFlow.

Pillow is imported here alone, when images are first met.
"""

from __future__ import annotations

import io
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import IO

from tfdist.errors import in_one_line, package_missing
from tfdist.records.format.exif import UPRIGHT, is_sideways, orientation_of_exif

try:
    from PIL import Image, UnidentifiedImageError
except ImportError as error:
    raise package_missing("Pillow", "files of images", "images", error) from error

__all__ = ["UNREADABLE", "Image", "UnidentifiedImageError", "orientation_of", "undecodable"]

_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_PNG_END = b"IEND\xaeB`\x82"
_JPEG_END = b"\xff\xd9"
# Of a segment; none within pixels.
_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
# All that Pillow raises for a file that it cannot read, or that ends where it does not expect it.
UNREADABLE = (
    *(OSError, SyntaxError, ValueError, Image.DecompressionBombError),
    *(EOFError, IndexError, struct.error, zlib.error),
)


def orientation_of(image: Image.Image) -> int:
    """Returns the orientation that the EXIF of an opened image names, 1 to 8; see ``exif``."""
    exif = image.info.get("exif")
    if exif is None and image.format == "PNG" and (file := getattr(image, "fp", None)) is not None:
        exif = _exif_behind_pixels(file)
    return orientation_of_exif(exif) if isinstance(exif, bytes) else UPRIGHT


def _exif_behind_pixels(png: IO[bytes]) -> bytes | None:
    """Returns what Pillow reads with the pixels of a PNG file alone, since it is behind them."""
    before = png.tell()
    found = next((length for kind, length in _chunks(png) if kind == b"eXIf"), None)
    exif = None if found is None else png.read(found)
    png.seek(before)
    return exif


def _chunks(png: IO[bytes]) -> Iterator[tuple[bytes, int]]:
    """Yields kind and length of each chunk of a PNG file, which is at its content meanwhile."""
    at = 8
    while png.seek(at) and len(head := png.read(8)) == 8:
        length = int.from_bytes(head[:4], "big")
        yield head[4:], length
        at += 12 + length


def _lacks_rows(data: bytes, image: Image.Image) -> bool:
    """Whether the pixels of a PNG end too early: Pillow makes black ones of the others."""
    width, height = image.size
    is_interlaced = data[28] != 0
    if is_interlaced or image.crop((0, height - 1, width, height)).getbbox() is not None:
        return False
    missing = height * (1 + -(-width * data[24] * _PNG_CHANNELS[data[25]] // 8))
    png, pixels = io.BytesIO(data), zlib.decompressobj()
    for kind, length in _chunks(png):
        if kind == b"IDAT" and missing:
            missing -= len(pixels.decompress(png.read(length), missing))
    return missing > 0


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
            if image.format == "PNG" and _lacks_rows(data, image):  # libpng wants all of them.
                return "its last rows are missing"
            if image.format in ("JPEG", "MPO") and not _has_end(data):  # libjpeg wants it, too.
                return "its end is damaged, or cut off"
    except UNREADABLE as error:
        return in_one_line(error)
    return None
