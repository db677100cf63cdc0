"""Reads the files of TensorFlow's profiler, a part at a time, without TensorFlow.

The format is ``tsl/profiler/protobuf/xplane.proto``. A file may hold hundreds of megabytes: it is
mapped, not read, and of a line of events ``_CHUNK`` bytes are decoded at once, which then take
fifty times as many.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfdist.errors import DataError
from tfdist.records.format.message_classes import message_classes
from tfdist.records.format.wire import DELIMITED, after, fields, varint

_CHUNK = 2 << 20
_PLANES = 1  # Fields of XSpace,
_NAME, _LINES, _EVENT_METADATA, _STAT_METADATA, _STATS = 2, 3, 4, 5, 6  # and of XPlane.
_EVENT_TAG = 4 << 3 | DELIMITED  # Of an event in XLine.


class Event(NamedTuple):
    """Something that took a while, and what is said of it; times are ns of the plane's clock."""

    begun_ns: float
    ended_ns: float
    name: str
    stats: dict[str, Any]


class Line(NamedTuple):
    """A thread of a host, or a stream of a device.

    Attributes:
        name: of it.
        told: events that are told one by one.
        times: float64 [n, 2], begin and end of those that are many, in ns of the plane's clock.
        numbers: int64 [n], the number of each name among the plane's ``names``.
    """

    name: str
    told: list[Event]
    times: np.ndarray
    numbers: np.ndarray


class Plane:
    """What was seen of one device; of a host, its threads are the lines."""

    def __init__(self, space: memoryview):
        self._lines: list[memoryview] = []
        self.name = ""
        #: Number -> name, such as "dense/MatMul:MatMul", and kind, such as "MatMul", or "".
        self.names: dict[int, tuple[str, str]] = {}
        self._stats: dict[int, str] = {}
        own = []
        for number, part in _fields(space):
            if number == _NAME:
                self.name = bytes(part).decode()
            elif number == _LINES:
                self._lines.append(part)
            elif number == _EVENT_METADATA:
                entry = _parsed("EventEntry", part)
                self.names[entry.key] = (entry.value.name, entry.value.display_name)
            elif number == _STAT_METADATA:
                entry = _parsed("StatEntry", part)
                self._stats[entry.key] = entry.value.name
            elif number == _STATS:
                own.append(part)
        #: What is said of it as a whole.
        self.stats = self._read_stats([_parsed("Stat", part) for part in own])

    def lines(
        self, is_told: Callable[[str], bool], is_timed: Callable[[str, str], bool]
    ) -> Iterator[Line]:
        """Yields the lines, in the order of the file.

        Args:
            is_told: whether events of that name are told one by one.
            is_timed: whether others, of that name and kind, have their times told.
        """
        told = {number for number, names in self.names.items() if is_told(names[0])}
        timed = {number for number, names in self.names.items() if is_timed(*names)} - told
        for line in self._lines:
            yield self._read_line(line, told, timed)

    def _read_line(self, line: memoryview, told: set[int], timed: set[int]) -> Line:
        name, clock, events = "", None, []
        begun, ended, numbers = array("d"), array("d"), array("q")
        for chunk in _chunks(line):
            part = _parsed("Line", chunk)
            if clock is None:
                name, clock = part.name, part.timestamp_ns
            for event in part.events:
                number = event.metadata_id
                if number in timed:
                    at = clock + event.offset_ps / 1000
                    begun.append(at)
                    ended.append(at + event.duration_ps / 1000)
                    numbers.append(number)
                elif number in told:
                    at = clock + event.offset_ps / 1000
                    end = at + event.duration_ps / 1000
                    stats = self._read_stats(event.stats)
                    events.append(Event(at, end, self.names[number][0], stats))
        times = np.stack([np.asarray(begun), np.asarray(ended)], axis=1)
        return Line(name, events, times, np.asarray(numbers, np.int64))

    def _read_stats(self, stats: Any) -> dict[str, Any]:
        found = {}
        for stat in stats:
            which = stat.WhichOneof("value")
            value = which and getattr(stat, which)
            if which == "ref_value":
                value = self._stats.get(value, "")
            found[self._stats.get(stat.metadata_id, "")] = value
        return found


def planes(path: Path) -> Iterator[Plane]:
    """Yields the planes of a file; what they give is read from it as long as the iterator lives.

    Raises:
        DataError: nothing is in it; for other damage see ``whole``.
    """
    if path.stat().st_size == 0:
        raise _damaged(path, "nothing in it")
    with path.open("rb") as file:
        # Whoever still holds an event of it holds the mapping, too.
        space = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    for number, part in _fields(space):
        if number == _PLANES:
            yield Plane(part)


@contextlib.contextmanager
def whole(path: Path) -> Iterator[None]:
    """Encloses the reading of a file, and of what its planes give: damage may stand anywhere.

    Raises:
        DataError: it is damaged, or none of the profiler's.
    """
    from google.protobuf.message import DecodeError

    try:
        yield
    except (DecodeError, ValueError, LookupError, TypeError, ArithmeticError) as error:
        raise _damaged(path, f"an error: {error or type(error).__name__}") from None


def _damaged(path: Path, found: str) -> DataError:
    return DataError(
        f"{path} must be a whole trace of TensorFlow's profiler",
        received=found,
        mend="Trace the steps again",
    )


def _chunks(line: memoryview) -> Iterator[memoryview]:
    """Yields a line in parts that are lines themselves; name and time stand in the first one.

    Raises:
        ValueError: it ends too early.
    """
    at = begun = 0
    end = len(line)
    while at < end:
        # Nearly all that a line has: this loop is most of what reading takes.
        if line[at] == _EVENT_TAG and at + 2 < end and line[at + 1] < 0x80:
            at += 2 + line[at + 1]
        elif line[at] == _EVENT_TAG and at + 3 < end and line[at + 2] < 0x80:
            at += 3 + (line[at + 1] & 0x7F | line[at + 2] << 7)
        else:
            at = _end_of_field(line, at)
        if at - begun >= _CHUNK:
            yield line[begun:at]
            begun = at
    if at > end:
        raise ValueError("it ends too early")
    yield line[begun:]


def _end_of_field(message: memoryview, at: int) -> int:
    """Returns where the next field begins. Raises NoMessageError: it is none."""
    tag, at = varint(message, at)
    if tag & 7 == DELIMITED:
        length, at = varint(message, at)
        return at + length
    return after(message, at, tag & 7)


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yields number and content of each field that has a length."""
    for number, start, stop in fields(message, 0, len(message)):
        yield number, message[start:stop]


def _parsed(kind: str, content: memoryview | bytes) -> Any:
    return messages()[kind].FromString(bytes(content))


@functools.cache
def messages() -> dict[str, Any]:
    """Returns the classes of the few messages and fields of xplane.proto that are read here."""
    return message_classes("tfdist.xplane", _MESSAGES)


_MESSAGES = {
    "Stat": "int64 metadata_id 1, oneof double double_value 2, oneof uint64 uint64_value 3, "
    "oneof int64 int64_value 4, oneof string str_value 5, oneof bytes bytes_value 6, "
    "oneof uint64 ref_value 7",
    "Event": "int64 metadata_id 1, int64 offset_ps 2, int64 duration_ps 3, repeated Stat stats 4",
    "Line": "int64 id 1, string name 2, int64 timestamp_ns 3, repeated Event events 4",
    "EventMetadata": "int64 id 1, string name 2, string display_name 4",
    "EventEntry": "int64 key 1, EventMetadata value 2",
    "StatMetadata": "int64 id 1, string name 2",
    "StatEntry": "int64 key 1, StatMetadata value 2",
    "Plane": "int64 id 1, string name 2, repeated Line lines 3, "
    "repeated EventEntry event_metadata 4, repeated StatEntry stat_metadata 5, "
    "repeated Stat stats 6",
    "Space": "repeated Plane planes 1",
}
