"""The size of a JPEG or PNG image, read from the first bytes of its file."""

from __future__ import annotations

import struct
from typing import NamedTuple

from tfdist.records.format.exif import UPRIGHT, is_sideways, orientation_of_jpeg

_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}
_OTHERS = {
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
}
# Start of frame, of every way to code it; C4, C8 and CC are something else.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_WITHOUT_LENGTH = frozenset([0x01, *range(0xD0, 0xD9)])


class Head(NamedTuple):
    """Format, "jpeg" or "png", and size of an image; channels 1 to 4, bits of a value.

    A JPEG image that is turned, as its EXIF says, has the size of the upright one.
    """

    format: str
    height: int
    width: int
    channels: int
    bits: int
    is_turned: bool = False


def head_of(data: bytes, start: int = 0, stop: int | None = None) -> Head | None:
    """Returns what the head of an image says; None where it is no JPEG or PNG, or a broken one."""
    stop = len(data) if stop is None else stop
    first = data[start : start + 8]
    try:
        if first[:3] == b"\xff\xd8\xff":
            return _upright(_jpeg(data, start + 2, stop), orientation_of_jpeg(data, start, stop))
        if first == _PNG and stop - start >= 33:
            width, height, bits, color = struct.unpack_from(">IIBB", data, start + 16)
            return Head("png", height, width, _PNG_CHANNELS[color], bits)
    except (IndexError, KeyError, struct.error):
        pass
    return None


def other_format(data: bytes) -> str | None:
    """Returns the name of an image format that is not read here."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    return next((name for magic, name in _OTHERS.items() if data.startswith(magic)), None)


def _upright(head: Head | None, orientation: int) -> Head | None:
    if head is None or orientation == UPRIGHT:
        return head
    size = (head.height, head.width)
    height, width = size[::-1] if is_sideways(orientation) else size
    return head._replace(height=height, width=width, is_turned=True)


def _jpeg(data: bytes, at: int, stop: int) -> Head | None:
    while at + 9 < stop:
        if data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker == 0xFF or marker in _WITHOUT_LENGTH:
            at += 1 if marker == 0xFF else 2
            continue
        if marker in _FRAMES:
            bits, height, width, channels = struct.unpack_from(">BHHB", data, at + 4)
            return Head("jpeg", height, width, channels, bits)
        at += 2 + struct.unpack_from(">H", data, at + 2)[0]
    return None
