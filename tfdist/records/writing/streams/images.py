"""Images among the values of a stream: bytes of JPEG and PNG files are kept as they are."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tfdist.errors import DataError, in_one_line, spelt
from tfdist.records.format.exif import UPRIGHT
from tfdist.records.format.image_bytes import (
    UNREADABLE,
    Image,
    UnidentifiedImageError,
    undecodable,
)
from tfdist.records.format.schema import Feature, Reading
from tfdist.records.wording import listed
from tfdist.records.writing.images.files import has_numbers, header_of, mask_header, rewritten
from tfdist.records.writing.images.notes import CUT
from tfdist.records.writing.images.options import ImageOptions
from tfdist.records.writing.streams.stream import image_like

_BAD_SHOWN = 5


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
        self._turned = self._cut = self._masks = self._photos = 0
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

    def notes(self) -> Iterator[str]:
        if len(self._sizes) > 1 and not self._options.is_resized:
            yield (
                f"the images '{self._name}' have several sizes: to be read in batches they need "
                f"one, {spelt('resize', 'HxW')}"
            )
        if len(self._channels) > 1 and self._options.color is None:
            yield f"the images '{self._name}' have different channels, and are read with 3"
        if self._turned:
            yield (
                f"{self._turned:,} images '{self._name}' say in EXIF that they are to be turned: "
                "they are read upright"
            )
        if self._cut:
            yield f"{self._cut:,} images '{self._name}' {CUT}"
        if self._masks:
            yield (
                f"{self._masks:,} images '{self._name}' have few or numbered colours: as labels, "
                "their pixels are the numbers of these"
            )

    def file(self, value: Any, record: int) -> bytes:
        """Returns the bytes of an image file. Raises _BadImageError for what is none."""
        is_file = isinstance(value, (bytes, bytearray, memoryview))
        if not is_file and not image_like(value):
            raise _BadImageError(f"a {type(value).__name__}")
        try:
            with warnings.catch_warnings(action="ignore"):  # Pillow warns of huge images.
                image = Image.open(io.BytesIO(value)) if is_file else value
                # A label may be a photo, too: it has no palette, and grays of 8 bits or more.
                is_mask = self._role == "label" and has_numbers(image)
                header = (mask_header if is_mask else header_of)(image)
                if isinstance(header, str):
                    raise _BadImageError(header)
                if not is_file:  # Whose file is not at hand; as PNG nothing is lost.
                    header = replace(header, convert_to=header.convert_to or image.mode)
                is_kept = header.convert_to is None
                data = bytes(value) if is_kept else rewritten(image, header, are_masks=is_mask)
                reason = undecodable(data) if is_kept and self._options.decode else None
        except UnidentifiedImageError:
            raise _BadImageError("is no image") from None
        except UNREADABLE as error:
            raise _BadImageError(in_one_line(error)) from None
        if reason:
            raise _BadImageError(reason)
        self._turned += header.orientation != UPRIGHT
        self._cut += header.is_cut
        self._masks += is_mask
        self._photos += not is_mask and header.channels > 1
        if self._masks and self._photos:
            raise DataError(
                f"images '{self._name}' must all be photos, or all masks of numbered colours",
                received=f"both, by record {record}",
                mend="Write those with a palette or of 1 bit as RGB, or all as numbers (PNGs of 8 "
                "bits)",
            )
        self._are_upright &= not header.turned_when_read
        self._encodings.add(header.written_format.lower())
        self._channels.add(header.channels)
        self._dtypes.add(header.dtype)
        if len(self._sizes) < 2:
            self._sizes.add((header.height, header.width))
        if len(self._dtypes) > 1:
            raise DataError(
                f"all images '{self._name}' must have as many bits a channel",
                received=f"8 and 16, in record {record}",
                mend="Convert those of one kind first",
            )
        return data


class _BadImageError(Exception):
    """An image that cannot be read: why."""


def fault(file: bytes, role: str, *, is_decoded: bool) -> str | None:
    """Returns why the bytes of an image file cannot be written; None where they can."""
    try:
        StreamImages("", role, ImageOptions(decode=is_decoded)).file(file, 0)
    except _BadImageError as error:
        return str(error)
    return None
