"""Protobuf's wire format, https://protobuf.dev/programming-guides/encoding: where things lie.

Nothing is copied, of bytes as of a memoryview.
"""

from __future__ import annotations

from collections.abc import Iterator

DELIMITED = 2
_VARINT, _FIXED_64, _FIXED_32 = 0, 1, 5


class NoMessageError(ValueError):
    """The bytes are no message, or none of its kind."""


def fields(message: bytes | memoryview, at: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yields (number, where it lies) of the length-delimited fields of a message."""
    while at < stop:
        key = message[at]
        at += 1
        if key > 127:
            key, at = varint(message, at - 1)
        wire = key & 7
        if wire == DELIMITED and at < stop:
            length = message[at]
            at += 1
            if length > 127:
                length, at = varint(message, at - 1)
            end = at + length
            if end > stop or key < 8:
                raise NoMessageError("a length that leads out of the message")
            yield key >> 3, at, end
            at = end
        else:
            at = after(message, at, wire)
            if at > stop:
                raise NoMessageError("a number that leads out of the message")


def after(message: bytes | memoryview, at: int, wire: int) -> int:
    """Returns where a number of that wire type ends."""
    if wire == _VARINT:
        return varint(message, at)[1]
    if wire not in (_FIXED_32, _FIXED_64):
        raise NoMessageError("no protobuf message")
    return at + (4 if wire == _FIXED_32 else 8)


def varint(message: bytes | memoryview, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        if at >= len(message):
            raise NoMessageError("a number that leads out of the message")
        digit = message[at]
        at += 1
        number |= (digit & 127) << shift
        if digit < 128:
            return number, at
        shift += 7
        if shift > 63:
            raise NoMessageError("a number that is too long")
