"""Image files: what their headers say, and their bytes as they are written."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.errors import DataError, in_one_line
from tfdist.records.format.exif import UPRIGHT, is_sideways
from tfdist.records.format.files import open_regular
from tfdist.records.format.image_bytes import (
    UNREADABLE,
    Image,
    UnidentifiedImageError,
    orientation_of,
    undecodable,
)
from tfdist.records.writing.images.options import ImageOptions

# Formats and modes whose files tf.io decodes to the pixels that Pillow sees: their bytes are kept.
_KEPT = {"JPEG": ("L", "RGB"), "PNG": ("L", "RGB", "RGBA", "I;16", "I;16B", "I")}
_CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4, "I;16": 1, "I;16B": 1, "I": 1}
# The mode that any other file is written in, as PNG.
_CONVERTED = {
    **dict.fromkeys(("1", "L"), "L"),
    **dict.fromkeys(("I;16", "I;16B"), "I;16"),
    **dict.fromkeys(("LA", "PA", "RGBA"), "RGBA"),
    **dict.fromkeys(("RGBX", "RGB", "P", "CMYK", "YCbCr", "LAB", "HSV"), "RGB"),
}
# The mode of a mask whose pixels are numbers of classes, as they are or as a palette's.
_MASKS = {"L": "L", "1": "L", "P": "L", "I;16": "I;16", "I;16B": "I;16", "I": "I;16"}
# Files between two lines of the journal.
_AT_ONCE = 64
_LOSSY = ("JPEG", "WEBP", "MPO")
_JPEG_QUALITY = 95
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


@dataclass(frozen=True, slots=True)
class Header:
    """What an image file says of itself.

    Attributes:
        convert_to: the mode to write it in as PNG; None to keep the file's bytes.
        height, width: of the image turned upright.
        orientation: how the camera was held, 1 to 8: see ``format.exif``.
        has_frames: whether more images follow the first one.
        is_cut: whether its colours have 16 bits, of which Pillow and TensorFlow read 8.
    """

    format: str
    mode: str
    height: int
    width: int
    channels: int
    dtype: str
    convert_to: str | None
    orientation: int = UPRIGHT
    has_frames: bool = False
    is_cut: bool = False

    @property
    def written_format(self) -> str:
        return "PNG" if self.convert_to else self.format

    @property
    def turned_when_read(self) -> bool:
        """Whether the bytes are kept, and their pixels are not upright."""
        return self.orientation != UPRIGHT and self.convert_to is None

    def __str__(self) -> str:
        bits = "16-bit " if self.dtype == "uint16" else ""
        plural = "s" if self.channels > 1 else ""
        return f"{self.width}x{self.height} with {self.channels} {bits}channel{plural}"


def read_headers(
    paths: Sequence[Path], options: ImageOptions, what: str = "images"
) -> list[Header | str]:
    """Returns what each file is; for one that cannot be read, why.

    Args:
        what: "masks", of which the pixels are numbers of classes, or "images".
    """
    # Of what was found in the same files before; what is found now is added.
    journal = options.looked_at(what)

    def read(first: int) -> list[Any]:
        if journal is not None and first in (found := journal.found()):
            return found[first]
        some = paths[first : first + _AT_ONCE]
        headers = (_read_header(path, options.decode, what == "masks") for path in some)
        told = [header if isinstance(header, str) else astuple(header) for header in headers]
        if journal is not None:
            journal.add(first, told)
        return told

    firsts = range(0, len(paths), _AT_ONCE)
    in_turn = firsts if journal is None else journal.in_turn(firsts)
    # Pillow warns of huge images. What Python warns of is the process's, and not for threads to
    # change; they work side by side as Pillow decodes outside Python's lock.
    with (
        warnings.catch_warnings(action="ignore"),
        ThreadPoolExecutor(options.workers, thread_name_prefix="tfdist-images") as pool,
    ):
        told = dict(zip(in_turn, pool.map(read, in_turn), strict=True))
    return [
        each if isinstance(each, str) else Header(*each) for first in firsts for each in told[first]
    ]


def _read_header(path: Path, decode: bool, is_mask: bool) -> Header | str:
    try:
        with open_regular(path) as file:  # A link may lead to a device, which never ends.
            data = file.read() if decode else b""  # Else no pixels of it are read.
            with Image.open(io.BytesIO(data) if decode else file) as image:
                header = mask_header(image) if is_mask else header_of(image)
    except UnidentifiedImageError:
        return "is no image"
    except OSError as error:
        return error.strerror or str(error)
    except UNREADABLE as error:
        return in_one_line(error)
    return (undecodable(data) if decode else None) or header


def header_of(image: Image.Image) -> Header | str:
    """Returns what an opened image is; for one that cannot be written, why."""
    kept = image.mode in _KEPT.get(_format(image), ())
    mode = image.mode if kept else _CONVERTED.get(image.mode)
    if mode is None:
        return f"mode {image.mode} where images must have 8 or 16 bits a channel"
    if image.mode == "P" and "transparency" in image.info:
        mode = "RGBA"
    orientation = orientation_of(image)
    # Pixels of a PNG are turned when they are written, which loses nothing.
    kept &= _format(image) == "JPEG" or orientation == UPRIGHT
    return _header(image, mode, kept, orientation)


def mask_header(image: Image.Image) -> Header | str:
    """Returns what ``header_of`` does of an image whose pixels are numbers of classes."""
    mode = _MASKS.get(image.mode)
    if mode is None or image.format in _LOSSY:
        return f"{image.format} of mode {image.mode} where a mask must be a PNG of one channel"
    if stretched := _stretched(image):
        return f"{image.format} of {stretched} where a mask must have 8 or 16 bits a pixel"
    if image.mode == "I" and not 0 <= image.getextrema()[0] <= image.getextrema()[1] < 1 << 16:
        return f"numbers from {image.getextrema()[0]} to {image.getextrema()[1]}, not 0 to 65535"
    return _header(image, mode, image.format == "PNG" and image.mode not in ("1", "P"))


def has_numbers(image: Image.Image) -> bool:
    """Whether the pixels of a file are numbers, of which readers make others where they are seen.

    They are two, or those of a palette, or grays of fewer than 8 bits.
    """
    return image.mode in ("1", "P") or (image.mode == "L" and _stretched(image) is not None)


def _stretched(image: Image.Image) -> str | None:
    """Returns of what a file is whose numbers every reader makes grays of, 0 to 255; else None."""
    for codec, _, _, args in image.tile[:1]:
        raw, *more = args if isinstance(args, tuple) else (args,)
        if codec.startswith("ppm") and more and more[0] not in (255, 65535):
            return f"numbers up to {more[0]}, which are read as grays"
        if str(raw).startswith("L;") and raw != "L;R":  # Of fewer bits, or inverted.
            return f"grays of the kind {raw}, which are not read as numbers"
    return None


def _has_16_bits(image: Image.Image) -> bool:
    """Whether a channel of a file has more than 8 bits."""
    tiles = [(tile[0], tile[3]) for tile in getattr(image, "tile", ())]
    largest = [args[-1] for codec, args in tiles if codec.startswith("ppm")]
    above = any(isinstance(value, int) and value > 255 for value in largest)
    return above or any(";16" in str(args) for _, args in tiles)


def _format(image: Image.Image) -> str:
    # Several JPEG images in one file, as telephones write: the first one is the photo.
    return "JPEG" if image.format == "MPO" else image.format or ""


def _header(image: Image.Image, mode: str, kept: bool, orientation: int = UPRIGHT) -> Header:
    size = (image.height, image.width)
    height, width = size[::-1] if is_sideways(orientation) else size
    dtype = "uint16" if mode.startswith("I") else "uint8"
    return Header(
        format=_format(image),
        mode=image.mode,
        height=height,
        width=width,
        channels=_CHANNELS[mode],
        dtype=dtype,
        convert_to=None if kept else mode,
        orientation=orientation,
        has_frames=(not kept or _format(image) == "PNG") and getattr(image, "is_animated", False),
        is_cut=dtype == "uint8" and _has_16_bits(image),
    )


@dataclass(frozen=True)
class Resizing:
    """Height and width, and how they are reached: "stretch", "crop" or "pad"."""

    size: tuple[int, int]
    fit: str


class ImageFiles:
    """A column of image files, read when they are written: a protocol of ``format.columns``.

    Args:
        resizing: the size that they are written in; None keeps their bytes where they can be kept.
        are_masks: whether their pixels are numbers, which no conversion may change.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        headers: Sequence[Header],
        resizing: Resizing | None = None,
        *,
        are_masks: bool = False,
    ):
        self._paths, self._headers = paths, headers
        self._resizing = resizing
        self._are_masks = are_masks

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, rows: np.ndarray) -> list[bytes]:
        return [self._read(row) for row in rows.tolist()]

    def _read(self, row: int) -> bytes:
        path, header = self._paths[row], self._headers[row]
        try:
            if header.convert_to is None and self._resizing is None:
                return path.read_bytes()
            # Of a path Pillow maps a TIFF as if it were turned already.
            with path.open("rb") as file, Image.open(file) as image:
                return rewritten(image, header, self._resizing, are_masks=self._are_masks)
        except UNREADABLE as error:
            raise DataError(
                "every image must be decodable",
                received=f"{path}: {error}",
                mend="Repair or remove it",
            ) from error


def rewritten(
    image: Image.Image,
    header: Header,
    resizing: Resizing | None = None,
    *,
    are_masks: bool = False,
) -> bytes:
    """Returns the file of an image that is made anew, upright."""
    if are_masks and header.mode in ("1", "P"):
        image = Image.fromarray(np.asarray(image).astype(np.uint8))
    elif header.mode in ("I", "I;16B"):  # Of which Pillow's own conversion keeps 8 bits.
        image = Image.fromarray(np.asarray(image).astype(np.uint16))
    elif header.convert_to is not None:
        image = image.convert(header.convert_to)
    image = turned(image, header.orientation)
    if resizing is not None:
        image = resized(image, resizing, is_mask=are_masks)
    file = io.BytesIO()
    image.save(file, header.written_format, quality=_JPEG_QUALITY)  # PNG has none.
    return file.getvalue()


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
