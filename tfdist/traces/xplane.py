"""Reads the files of TensorFlow's profiler, a part at a time, without TensorFlow.

The format is ``tsl/profiler/protobuf/xplane.proto``. A file may hold hundreds of megabytes: it is
mapped, not read, and of a line of events so many bytes are decoded at once as ``_CHUNK`` says.
"""

from __future__ import annotations

import functools
import itertools
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tfdist.errors import DataError

_CHUNK = 16 << 20
_LENGTH_DELIMITED = 2
_PLANES = 1  # Fields of XSpace,
_NAME, _LINES, _EVENT_METADATA, _STAT_METADATA, _STATS = 2, 3, 4, 5, 6  # of XPlane,
_EVENTS = 4  # and of XLine.


class Event(NamedTuple):
    """Something that took a while.

    Attributes:
        begun_ns, ended_ns: of the clock of its plane.
        name: such as "dense/MatMul:MatMul".
        kind: what TensorFlow shows in its place, such as "MatMul"; "" where it has nothing.
        stats: what is said of it; of operations, which have a kind, nothing.
    """

    begun_ns: float
    ended_ns: float
    name: str
    kind: str
    stats: dict[str, Any]


class Plane:
    """What was seen of one device; of a host, its threads are the lines."""

    def __init__(self, space: memoryview):
        self._lines: list[memoryview] = []
        self.name = ""
        self._events: dict[int, tuple[str, str]] = {}
        self._stats: dict[int, str] = {}
        own = []
        for number, _, part in _fields(space):
            if number == _NAME:
                self.name = bytes(part).decode()
            elif number == _LINES:
                self._lines.append(part)
            elif number == _EVENT_METADATA:
                entry = _parsed("EventEntry", part)
                self._events[entry.key] = (entry.value.name, entry.value.display_name)
            elif number == _STAT_METADATA:
                entry = _parsed("StatEntry", part)
                self._stats[entry.key] = entry.value.name
            elif number == _STATS:
                own.append(part)
        #: What is said of it as a whole.
        self.stats = self._read_stats([_parsed("Stat", part) for part in own])

    def lines(self, wanted: Callable[[str, str], bool]) -> Iterator[tuple[str, Iterator[Event]]]:
        """Yields each line's name and events, in the order of the file.

        Args:
            wanted: whether events of that name and kind are given.
        """
        numbers = {number for number, names in self._events.items() if wanted(*names)}
        for line in self._lines:
            # What it is called comes first, or in a line's only part.
            parts = (_parsed("Line", part) for part in _chunks(line))
            first = next(parts)
            yield first.name, self._events_of(first, parts, numbers)

    def _events_of(self, first: Any, others: Iterator[Any], numbers: set[int]) -> Iterator[Event]:
        begun_ns = first.timestamp_ns
        for part in itertools.chain([first], others):
            for event in part.events:
                if event.metadata_id not in numbers:
                    continue
                begun = begun_ns + event.offset_ps / 1000
                name, kind = self._events[event.metadata_id]
                stats = {} if kind else self._read_stats(event.stats)
                ended = begun + event.duration_ps / 1000
                yield Event(begun, ended, name, kind, stats)

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
        DataError: it is damaged, or none of the profiler's.
    """
    from google.protobuf.message import DecodeError

    if path.stat().st_size == 0:
        raise _damaged(path, "nothing in it")
    with path.open("rb") as file:
        # Whoever still holds an event of it holds the mapping, too.
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    try:
        for number, _, part in _fields(whole):
            if number == _PLANES:
                yield Plane(part)
    except (DecodeError, ValueError) as error:
        raise _damaged(path, f"an error: {error}") from None


def _damaged(path: Path, found: str) -> DataError:
    return DataError(
        f"{path} must be a whole trace of TensorFlow's profiler",
        received=found,
        mend="Trace the steps again",
    )


def _chunks(line: memoryview) -> Iterator[bytes]:
    """Yields a line in parts that are lines themselves; the first one has its name and time."""
    if len(line) <= _CHUNK:
        yield bytes(line)
        return
    fields = list(_fields(line, with_bytes=True))
    parts = [whole for number, whole, _ in fields if number != _EVENTS]
    size = 0
    for number, whole, _ in fields:
        if number == _EVENTS:
            parts.append(whole)
            size += len(whole)
            if size >= _CHUNK:
                yield b"".join(parts)
                parts, size = [], 0
    yield b"".join(parts)


def _fields(
    message: memoryview, *, with_bytes: bool = False
) -> Iterator[tuple[int, memoryview, memoryview]]:
    """Yields number, bytes as a whole, and content of each field, of those with a length.

    Args:
        with_bytes: fields without a length are given, too.

    Raises:
        ValueError: the message ends too early.
    """
    at, end = 0, len(message)
    while at < end:
        begun = at
        tag, at = _varint(message, at)
        kind, number = tag & 7, tag >> 3
        content = at
        if kind == _LENGTH_DELIMITED:
            length, content = _varint(message, at)
            at = content + length
        elif kind == 0:
            _, at = _varint(message, at)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise ValueError(f"no field is of the kind {kind}")
        if at > end:
            raise ValueError("it ends too early")
        if kind == _LENGTH_DELIMITED or with_bytes:
            yield number, message[begun:at], message[content:at]


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Returns the number that begins at ``at``, and where the next thing begins."""
    value = shift = 0
    while shift < 70:
        if at >= len(message):
            raise ValueError("it ends too early")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("a number has no end")


def _parsed(kind: str, content: memoryview | bytes) -> Any:
    return messages()[kind].FromString(bytes(content))


@functools.cache
def messages() -> dict[str, Any]:
    """Returns the classes of the few messages and fields of xplane.proto that are read here."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="tfdist/xplane.proto", package="tfdist.xplane", syntax="proto3"
    )
    scalars = {
        "int64": kinds.TYPE_INT64,
        "uint64": kinds.TYPE_UINT64,
        "double": kinds.TYPE_DOUBLE,
        "string": kinds.TYPE_STRING,
        "bytes": kinds.TYPE_BYTES,
    }
    for message, fields in _MESSAGES.items():
        made = file.message_type.add(name=message)
        if message == "Stat":
            made.oneof_decl.add(name="value")
        for text in fields.split(", "):
            kind, name, number = text.removeprefix("repeated ").split()
            added = made.field.add(name=name, number=int(number), label=kinds.LABEL_OPTIONAL)
            if text.startswith("repeated "):
                added.label = kinds.LABEL_REPEATED
            if kind in scalars:
                added.type = scalars[kind]
            else:
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".tfdist.xplane.{kind}"
            if message == "Stat" and name != "metadata_id":
                added.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"tfdist.xplane.{name}"))
        for name in _MESSAGES
    }


_MESSAGES = {
    "Stat": "int64 metadata_id 1, double double_value 2, uint64 uint64_value 3, "
    "int64 int64_value 4, string str_value 5, bytes bytes_value 6, uint64 ref_value 7",
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
