"""Images among the values of a stream: bytes of JPEG and PNG files are kept as they are."""

from __future__ import annotations

import io
import warnings
from typing import Any

from tfdist.errors import DataError, spelt
from tfdist.records.format.exif import UPRIGHT, is_sideways
from tfdist.records.format.image_bytes import UNREADABLE, Image, orientation_of, undecodable
from tfdist.records.format.schema import Feature, Reading
from tfdist.records.wording import listed
from tfdist.records.writing.images.options import ImageOptions
from tfdist.records.writing.images.resizing import turned

# What tf.io decodes to the pixels that Pillow sees, and the channels of each mode.
_KEPT = {"JPEG": ("L", "RGB"), "PNG": ("L", "RGB", "RGBA", "I;16", "I;16B", "I")}
_CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4, "I;16": 1, "I;16B": 1, "I": 1}
_BAD_SHOWN = 5
_WITH_ALPHA = ("LA", "PA", "RGBA", "La", "RGBa")


class StreamImages:
    """The images of one feature, whose sizes are known when all have come.

    Args:
        options: what they are read as, and whether each is decoded, to see that it can be.
    """

    def __init__(self, name: str, role: str, options: ImageOptions):
        self._name, self._role, self._options = name, role, options
        self._encodings: set[str] = set()
        self._sizes: set[tuple[int, int]] = set()
        self._channels: set[int] = set()
        self._dtypes: set[str] = set()
        self._turned = 0
        self._are_upright = True

    def take(self, values: Any, first: int) -> list[bytes]:
        """Returns the bytes of image files. Raises DataError for what is no image."""
        files, bad = [], []
        for number, value in enumerate(values, first):
            try:
                files.append(self.file(value, number))
            except _BadImageError as error:
                member = getattr(value, "member", None)
                where = f"in record {number}" if member is None else f"in {member}"
                bad.append(f"{error} {where}")
        if bad:
            is_of_tar = any(hasattr(value, "member") for value in values)
            raise DataError(
                f"every value '{self._name}' must be an image that can be decoded",
                received=listed(bad, _BAD_SHOWN),
                mend="Repair it, or leave its record out"
                + (f" with {spelt('skip_bad', True)}" * is_of_tar),
            )
        return files

    def feature(self) -> Feature:
        # Two sizes are enough to know that they differ.
        size = next(iter(self._sizes)) if len(self._sizes) == 1 else (None, None)
        channels = next(iter(self._channels)) if len(self._channels) == 1 else 3
        encoding = next(iter(self._encodings)) if len(self._encodings) == 1 else "image"
        return Feature(
            name=self._name,
            dtype=next(iter(self._dtypes)),
            shape=(*size, channels),
            encoding=encoding,
            role=self._role,
            reading=Reading(upright=not self._are_upright),
        )

    def notes(self) -> list[str]:
        found = []
        if len(self._sizes) > 1 and not self._options.is_resized:
            found.append(
                f"the images '{self._name}' have several sizes: to be read in batches they need "
                f"one, {spelt('resize', 'HxW')}"
            )
        if len(self._channels) > 1 and self._options.color is None:
            found.append(f"the images '{self._name}' have different channels, and are read with 3")
        if self._turned:
            found.append(
                f"{self._turned:,} images '{self._name}' say in EXIF that they are to be turned: "
                "they are read upright"
            )
        return found

    def file(self, value: Any, record: int) -> bytes:
        """Returns the bytes of an image file. Raises _BadImageError for what is none."""
        try:
            data = bytes(value) if isinstance(value, (bytes, bytearray, memoryview)) else None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow warns of huge images.
                image = value if data is None else Image.open(io.BytesIO(data))
                kept = data is not None and image.mode in _KEPT.get(image.format or "", ())
                encoding, mode = (image.format or "").lower(), image.mode
                orientation = orientation_of(image)
                kept &= encoding == "jpeg" or orientation == UPRIGHT
                if not kept:
                    encoding, (mode, data) = "png", _as_png(turned(image, orientation))
        except (*UNREADABLE, TypeError) as error:
            raise _BadImageError(" ".join(str(error).split())) from None
        if kept and self._options.decode and (reason := undecodable(data)):
            raise _BadImageError(" ".join(str(reason).split()))
        self._turned += orientation != UPRIGHT
        self._are_upright &= orientation == UPRIGHT or not kept
        self._encodings.add(encoding)
        self._channels.add(_CHANNELS[mode])
        self._dtypes.add("uint16" if mode.startswith("I") else "uint8")
        if len(self._sizes) < 2:
            size = (image.height, image.width)
            self._sizes.add(size[::-1] if is_sideways(orientation) else size)
        if len(self._dtypes) > 1:
            raise DataError(
                f"all images '{self._name}' must have as many bits a channel",
                received=f"8 and 16, in record {record}",
            )
        return data


class _BadImageError(Exception):
    """An image that cannot be read: why."""


def fault(file: bytes, *, is_decoded: bool) -> str | None:
    """Returns why the bytes of an image file cannot be written; None where they can."""
    try:
        StreamImages("", "input", ImageOptions(decode=is_decoded)).file(file, 0)
    except _BadImageError as error:
        return str(error)
    return None


def _as_png(image: Any) -> tuple[str, bytes]:
    """Returns the mode and the bytes of an image that is written anew, without loss."""
    if image.mode in _KEPT["PNG"]:
        mode = image.mode
    elif image.mode in _WITH_ALPHA or (image.mode == "P" and "transparency" in image.info):
        mode = "RGBA"
    elif image.mode == "1":
        mode = "L"
    elif image.mode in ("P", "CMYK", "YCbCr", "LAB", "HSV", "RGBX"):
        mode = "RGB"
    else:
        raise ValueError(f"an image of mode {image.mode}, not of 8 or 16 bits a channel")
    png = io.BytesIO()
    image.convert(mode).save(png, "PNG")
    return mode, png.getvalue()
