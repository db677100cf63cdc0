"""The features of a tf.train.Example or SequenceExample of any writer, found without TensorFlow.

Bytes are not copied: what is found are places in the record.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tfdist.records.format.wire import DELIMITED, NoMessageError, after, fields, varint

# Of the fields of tf.train.Feature: bytes_list, float_list, int64_list.
KINDS = {1: "bytes", 2: "float", 3: "int64"}
_HIGH_DIGITS = bytes(range(128, 256))


class Values(NamedTuple):
    """The list of one feature: its kind, a value of ``KINDS``, and where in the record it lies."""

    kind: str
    start: int
    stop: int


def features_of(
    record: bytes, is_wanted: Callable[[bytes], bool], *, strict: bool = True
) -> tuple[dict[bytes, Values], dict[bytes, list[Values]]]:
    """Returns the features of a record, and its feature lists, which only SequenceExamples have.

    What holds no list is left out: it counts as missing. An empty list is a list of its kind.

    Args:
        is_wanted: asked for each key; others are left out.
        strict: whether a field that no Example has is an error; TensorFlow passes it over.

    Raises:
        NoMessageError: the record is no Example.
    """
    features: dict[bytes, Values] = {}
    lists: dict[bytes, list[Values]] = {}
    for number, start, stop in fields(record, 0, len(record)):
        if number == 1:
            for key, at, end in _entries(record, start, stop):
                if is_wanted(key):
                    features.pop(key, None)  # Of a key that comes twice the last one counts.
                    if (values := _values(record, at, end)) is not None:
                        features[key] = values
        elif number == 2:
            for key, at, end in _entries(record, start, stop):
                if is_wanted(key):
                    steps = (_values(record, *f[1:]) for f in fields(record, at, end))
                    lists[key] = [step or Values("none", 0, 0) for step in steps]
        elif strict:
            raise NoMessageError(f"field {number}")
    return features, lists


def values_in(record: bytes, name: str) -> list[bytes]:
    """Returns the values of the BytesList of one feature of an Example; none of another list.

    Raises:
        NoMessageError: the bytes are no Example.
    """
    found = list_in(record, name, "bytes")
    return [] if found is None else [record[start:stop] for start, stop in strings(record, found)]


def int64_in(record: bytes, name: str) -> list[int]:
    """Returns the values of the Int64List of one feature of an Example. As ``values_in``."""
    found = list_in(record, name, "int64")
    return [] if found is None else integers(record, found)


def list_in(record: bytes, name: str, kind: str) -> Values | None:
    """Returns the list of one feature; None where there is none, or one of another kind."""
    key = name.encode()
    found = features_of(record, key.__eq__, strict=False)[0].get(key)
    return found if found is not None and found.kind == kind else None


def count(record: bytes, values: Values) -> int:
    """Returns how many values a list has."""
    if values.kind == "bytes":
        return sum(1 for _ in strings(record, values))
    total = 0
    for wire, start, stop in _numbers(record, values):
        if wire != DELIMITED:
            total += 1
        elif values.kind == "float":
            total += (stop - start) // 4
        else:  # The last digit of each varint is below 128.
            total += len(record[start:stop].translate(None, _HIGH_DIGITS))
    return total


def strings(record: bytes, values: Values) -> Iterator[tuple[int, int]]:
    """Yields where the strings of a list of kind "bytes" lie."""
    for number, start, stop in fields(record, values.start, values.stop):
        if number == 1:
            yield start, stop


def integers(record: bytes, values: Values) -> list[int]:
    """Returns the numbers of a list of kind "int64"."""
    found = []
    for wire, at, stop in _numbers(record, values):
        if wire != DELIMITED:
            found.append(_signed(varint(record, at)[0]))
            continue
        while at < stop:
            number, at = varint(record, at)
            found.append(_signed(number))
    return found


def floats(record: bytes, values: Values) -> list[float]:
    """Returns the numbers of a list of kind "float"."""
    found: list[float] = []
    for _, at, stop in _numbers(record, values):
        if (stop - at) % 4:
            raise NoMessageError("half a number")
        found.extend(struct.unpack_from(f"<{(stop - at) // 4}f", record, at))
    return found


def _entries(record: bytes, start: int, stop: int) -> Iterator[tuple[bytes, int, int]]:
    """Yields (key, where its message lies) of the entries of a map."""
    for number, at, end in fields(record, start, stop):
        if number != 1:
            continue
        key, place = None, None
        for part, low, high in fields(record, at, end):
            if part == 1:
                key = record[low:high]
            elif part == 2:
                place = (low, high)
        if key is not None and place is not None:
            yield key, *place


def _values(record: bytes, start: int, stop: int) -> Values | None:
    """Returns the list of a tf.train.Feature, which may be empty; None when none is set."""
    found = None
    for number, low, high in fields(record, start, stop):
        if number in KINDS:
            found = Values(KINDS[number], low, high)
    return found


def _numbers(record: bytes, values: Values) -> Iterator[tuple[int, int, int]]:
    """Yields (wire type, where it lies) of the parts of a list of numbers, packed or one by one."""
    at = values.start
    while at < values.stop:
        key, at = varint(record, at)
        wire = key & 7
        if wire == DELIMITED:
            length, at = varint(record, at)
            end = at + length
        else:
            end = after(record, at, wire)
        if end > values.stop:
            raise NoMessageError("a list that leads out of the record")
        if key >> 3 == 1:
            yield wire, at, end
        at = end


def _signed(number: int) -> int:
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number
