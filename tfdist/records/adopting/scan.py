"""Reading files of records once: every checksum, and what the records have."""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tfdist.records.adopting.feature_statistics import Found
from tfdist.records.format.checking import Fault, ShardReader, check_records
from tfdist.records.format.encoding import HEADER_BYTES, length_in
from tfdist.records.format.examples import features_of
from tfdist.records.format.files import open_regular, unreadable
from tfdist.records.format.wire import NoMessageError
from tfdist.records.writing.processes import run_in_threads

_GZIP_MAGIC = b"\x1f\x8b\x08"
# Checksums and inflating run side by side; more than a few would only wait for the rest.
_MOST_THREADS = 4


class _EnoughError(Exception):
    """As many records as were asked for have been read."""


@dataclass
class Scanned:
    """One file.

    Attributes:
        name: as in ``file_patterns.Files``.
        found: by key, what its records have.
        lengths: of each record that was looked at, in bytes.
        fault: the first thing that is wrong with it; None when it is right.
    """

    name: str
    records: int = 0
    bytes: int = 0
    checksum: str = ""
    is_gzip: bool = False
    found: dict[str, Found] = field(default_factory=dict)
    lengths: array[int] = field(default_factory=lambda: array("Q"))
    fault: Fault | None = None


def scan(
    folder: Path,
    names: Sequence[str],
    wanted: Collection[str] | None,
    progress: Callable[[int], None],
) -> list[Scanned]:
    """Returns what is in each file.

    Args:
        wanted: the keys that are looked at; None looks at all.
        progress: called, by several threads, with the number of bytes just read.
    """
    threads = max(1, min(_MOST_THREADS, os.cpu_count() or 1, len(names)))

    def scan_one(name: str, advance: Callable[[int], None]) -> Scanned:
        return scan_file(folder, name, wanted, advance)

    return run_in_threads(names, scan_one, count=threads, progress=progress)


def peek(folder: Path, name: str, records: int) -> dict[str, Found]:
    """Returns what the first records of a file have; nothing where they cannot be read."""
    scanned = scan_file(folder, name, None, limit=records)
    return {} if scanned.fault is not None else scanned.found


def scan_file(
    folder: Path,
    name: str,
    wanted: Collection[str] | None,
    progress: Callable[[int], None] | None = None,
    *,
    limit: int | None = None,
) -> Scanned:
    """Returns what is in a file.

    Args:
        limit: read no more records than that.
    """
    scanned = Scanned(name)
    keys = None if wanted is None else frozenset(key.encode() for key in wanted)
    looked = _Looked(keys, limit, scanned.lengths)

    def advance(num_bytes: int) -> None:
        scanned.bytes += num_bytes
        if progress is not None:
            progress(num_bytes)

    faults: list[Fault] = []
    count: int | None = 0
    try:
        compression = _compression(folder / name)
        scanned.is_gzip = compression == "gzip"
        if compression == "zlib":
            reason = "is compressed with ZLIB, where gzip or no compression is read"
            scanned.fault = Fault(name, None, None, reason)
            return scanned
        with (
            ShardReader(folder / name, scanned.is_gzip, advance) as reader,
            contextlib.suppress(_EnoughError),
        ):
            faults, count = check_records(reader, name, None, looked.take)
            reader.finish()
        scanned.checksum = f"{reader.checksum:08x}"
    except OSError as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else unreadable(error)
        faults = [Fault(name, None, None, reason.removeprefix("which "))]
    scanned.records = count or 0
    scanned.fault = faults[0] if faults else None
    scanned.found = looked.found()
    return scanned


def _compression(path: Path) -> str:
    with open_regular(path) as file:
        head = file.read(HEADER_BYTES)
    # A record can have a length that looks so; then its checksum is right.
    if len(head) == HEADER_BYTES and length_in(head) is not None:
        return "none"
    if head[:3] == _GZIP_MAGIC:
        return "gzip"
    # The header of zlib, RFC 1950: deflate, and two bytes that 31 divides.
    is_zlib = head[:1] == b"\x78" and int.from_bytes(head[:2], "big") % 31 == 0
    return "zlib" if is_zlib else "none"


class _Looked:
    """Looks at one record after the other."""

    def __init__(self, keys: frozenset[bytes] | None, limit: int | None, lengths: array[int]):
        self._lengths = lengths
        self._found: dict[bytes, Found] = {}
        self._is_wanted = (lambda key: True) if keys is None else keys.__contains__
        self._left = limit
        self._is_broken = False

    def take(self, record: bytes) -> str | None:
        """Takes a record; returns what is wrong with it, once for all."""
        if self._left is not None:
            if not self._left:
                raise _EnoughError
            self._left -= 1
        self._lengths.append(len(record))
        if self._is_broken:
            return None
        try:
            features, lists = features_of(record, self._is_wanted)
            for key, values in features.items():
                self._of(key, in_list=False).take(record, values)
            for key, steps in lists.items():
                self._of(key, in_list=True).take_steps(record, steps)
        except NoMessageError as error:
            self._is_broken = True
            return f"is no tf.train.Example ({error})"
        return None

    def _of(self, key: bytes, *, in_list: bool) -> Found:
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = Found(in_list)
        if found.in_list != in_list:
            raise NoMessageError("a feature and a feature list of one name")
        return found

    def found(self) -> dict[str, Found]:
        return {key.decode(errors="replace"): found for key, found in self._found.items()}
