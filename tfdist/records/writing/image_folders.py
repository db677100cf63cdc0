"""A folder of class folders with images."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tfdist.errors import DataError
from tfdist.records.format.columns import Columns
from tfdist.records.format.image_bytes import UNREADABLE, Image, undecodable
from tfdist.records.format.schema import Feature, Schema

_STRUCTURE = "images must lie in class folders, FOLDER/CLASS/IMAGE"
_MEND = "Give a folder that holds a folder for each class, and nothing else"

# Formats and modes whose files tf.io decodes to the pixels that Pillow sees: their bytes are kept.
_KEPT = {"JPEG": ("L", "RGB"), "PNG": ("L", "RGB", "RGBA", "I;16", "I;16B", "I")}
_CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4, "I;16": 1, "I;16B": 1, "I": 1}
# The mode that any other file is written in, as PNG.
_CONVERTED = {
    "1": "L",
    "L": "L",
    "I;16": "I;16",
    "LA": "RGBA",
    "PA": "RGBA",
    "RGBA": "RGBA",
    "RGBX": "RGB",
    "RGB": "RGB",
    "P": "RGB",
    "CMYK": "RGB",
    "YCbCr": "RGB",
    "LAB": "RGB",
    "HSV": "RGB",
}


@dataclass(frozen=True)
class _Header:
    """What the first bytes of an image file say.

    Attributes:
        convert_to: the mode to write it in as PNG; None to keep the file's bytes.
    """

    format: str
    shape: tuple[int, int, int]
    dtype: str
    convert_to: str | None


class ImageFiles:
    """A column of image files, read when they are written.

    Attributes:
        are_decoded: whether those that are kept byte for byte are decoded too, to see that they
            can be.
    """

    are_decoded = True

    def __init__(self, paths: Sequence[Path], convert_to: Sequence[str | None]):
        self._paths = paths
        self._convert_to = convert_to

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, rows: np.ndarray) -> list[bytes]:
        return [self._read(row) for row in rows.tolist()]

    def _read(self, row: int) -> bytes:
        mode = self._convert_to[row]
        if mode is None:
            data = self._paths[row].read_bytes()
            if self.are_decoded and (reason := undecodable(data)):
                raise DataError(
                    "every image must be one that can be decoded",
                    received=f"{self._paths[row]}: {reason}",
                    mend="Repair or remove it; --no-decode leaves this check out",
                )
            return data
        png = io.BytesIO()
        try:
            with Image.open(self._paths[row]) as image:
                image.convert(mode).save(png, "PNG")
        except UNREADABLE as error:
            raise DataError(
                "every image must be decodable", received=f"{self._paths[row]}: {error}"
            ) from error
        return png.getvalue()


def from_class_folders(folder: Path) -> Columns:
    """Returns the images of ``folder``/CLASS/ with the numbers of their classes, sorted by name.

    JPEG and PNG files are written byte for byte; others that Pillow reads become PNG.

    Raises:
        DataError: no class folders, a class without images, a file that is not an image, or
            images of unequal size or channels.
    """
    classes, paths, labels = _find_images(folder)
    headers = [_read_header(path) for path in paths]
    first = headers[0]
    for path, header in zip(paths, headers, strict=True):
        if (header.shape, header.dtype) != (first.shape, first.dtype):
            raise DataError(
                "all images must have the same size and channels",
                received=f"{paths[0]} {_describe(first)}, {path} {_describe(header)}",
                mend="Resize or convert them first",
            )
    formats = {"PNG" if header.convert_to else header.format for header in headers}
    encoding = formats.pop().lower() if len(formats) == 1 else "image"
    schema = Schema(
        (
            Feature(
                name="image", dtype=first.dtype, shape=first.shape, encoding=encoding, role="input"
            ),
            Feature(
                name="label",
                dtype="int64",
                shape=(),
                encoding="int64",
                role="label",
                classes=tuple(classes),
            ),
        )
    )
    images = ImageFiles(paths, [header.convert_to for header in headers])
    return Columns("folder", schema, {"image": images, "label": np.array(labels, np.int64)})


def _find_images(folder: Path) -> tuple[list[str], list[Path], list[int]]:
    """Returns the classes, and path and class number of each image; hidden files are left out."""
    entries = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    loose = [path for path in entries if not path.is_dir()]
    if loose or not entries:
        received = f"the file {loose[0]}" if loose else f"nothing in {folder}"
        raise DataError(_STRUCTURE, received=received, mend=_MEND)
    paths, labels = [], []
    for number, class_folder in enumerate(entries):
        images = [path for path in sorted(class_folder.iterdir()) if path.name[0] != "."]
        if not images:
            raise DataError(
                "every class folder must have an image", received=f"none in {class_folder}"
            )
        for path in images:
            if not path.is_file():
                raise DataError(_STRUCTURE, received=f"the folder {path}", mend=_MEND)
        paths.extend(images)
        labels.extend([number] * len(images))
    return [path.name for path in entries], paths, labels


def _read_header(path: Path) -> _Header:
    try:
        # Pillow warns of huge images; nothing is decoded here.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path) as image:
                return _header_of(path, image)
    except UNREADABLE as error:
        raise DataError(
            "every file in a class folder must be an image that Pillow reads",
            received=f"{path}: {error}",
        ) from error


def _header_of(path: Path, image: Image.Image) -> _Header:
    kept = image.mode in _KEPT.get(image.format or "", ())
    mode = image.mode if kept else _CONVERTED.get(image.mode)
    if mode is None:
        raise DataError(
            "images must have 8 or 16 bits a channel", received=f"{path}, mode {image.mode}"
        )
    if image.mode == "P" and "transparency" in image.info:
        mode = "RGBA"
    return _Header(
        format=image.format or "",
        shape=(image.height, image.width, _CHANNELS[mode]),
        dtype="uint16" if mode.startswith("I") else "uint8",
        convert_to=None if kept else mode,
    )


def _describe(header: _Header) -> str:
    height, width, channels = header.shape
    bits = "16-bit " if header.dtype == "uint16" else ""
    return f"{width}x{height} with {channels} {bits}channel{'s' if channels > 1 else ''}"
