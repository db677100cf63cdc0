"""How a camera was held: the orientation that the EXIF of a photo names, 1 to 8.

1 is upright; 5 to 8 exchange height and width. ``records.reading.images`` reads the same in a
graph.
"""

from __future__ import annotations

import struct

#: How the files of JPEG and PNG images begin.
IMAGE_BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")
UPRIGHT = 1
TAG = 0x0112
SHORT, LONG = 3, 4
EXIF = b"Exif\0\0"
APP1 = 0xE1
# A marker after which there are pixels.
START_OF_SCAN = 0xDA
ENTRY_BYTES = 12


def is_sideways(orientation: int) -> bool:
    """Whether height and width of what is stored are those of the upright image exchanged."""
    return orientation >= 5


def orientation_of_jpeg(data: bytes, start: int = 0, stop: int | None = None) -> int:
    """Returns the orientation of a JPEG file within ``data``; 1 where it names none."""
    stop = len(data) if stop is None else stop
    at = start + 2
    while at + 4 <= stop and data[at] == 0xFF and data[at + 1] != START_OF_SCAN:
        if data[at + 1] == 0xFF:
            at += 1
            continue
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if data[at + 1] == APP1 and data[at + 4 : at + 10] == EXIF:
            return orientation_of_exif(data[at + 4 : min(end, stop)])
        at = end
    return UPRIGHT


def orientation_of_exif(exif: bytes) -> int:
    """Returns the orientation that a block of EXIF names; 1 where it names none."""
    tiff = exif.removeprefix(EXIF)
    order = ">" if tiff[:1] == b"M" else "<"
    try:
        (first,) = struct.unpack_from(f"{order}I", tiff, 4)
        (count,) = struct.unpack_from(f"{order}H", tiff, first)
        for number in range(count):
            place = first + 2 + ENTRY_BYTES * number
            tag, kind, _, value = struct.unpack_from(f"{order}HHIH", tiff, place)
            if kind == LONG:
                (value,) = struct.unpack_from(f"{order}I", tiff, place + 8)
            if tag == TAG and kind in (SHORT, LONG) and UPRIGHT < value <= 8:
                return value
    except struct.error:
        pass  # It ends within.
    return UPRIGHT
