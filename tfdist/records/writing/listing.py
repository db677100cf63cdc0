"""Whether files, and records in memory, are still those that they were."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c

from tfdist.records.format.columns import Columns
from tfdist.records.format.files import sums, walk
from tfdist.records.writing.shard_sizes import frame_bytes

_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class Listing:
    """Some files and folders as they lie on the disk.

    Attributes:
        files: how many files they are, with those in folders.
        bytes: of all of them.
        digest: of their names and sizes, and of their times of the last change or checksums.
    """

    files: int
    bytes: int
    digest: str

    def __str__(self) -> str:
        return f"{self.files:,} files of {self.bytes:,} bytes"


def listing_of(paths: Iterable[str | Path], *, are_copies: bool = False) -> Listing:
    """Returns that of files and folders; of those that cannot be found nothing.

    Args:
        are_copies: whether they were made just now, somewhere: then their content is compared.

    Raises:
        OSError: a file or a folder that cannot be read.
    """
    count = size = 0
    digest = hashlib.sha256()
    for path in map(os.path.abspath, paths):
        for name in _files(path):
            try:
                stat = os.stat(name)
            except OSError:
                continue  # A link to nothing, or to itself: told where it is read.
            count, size = count + 1, size + stat.st_size
            called = os.path.relpath(name, path) if are_copies else name
            mark = sums.of(Path(name)) if are_copies else stat.st_mtime_ns
            line = f"{called}\0{stat.st_size} {mark}\0"
            digest.update(line.encode(errors="surrogateescape"))
    return Listing(count, size, digest.hexdigest())


def _files(path: str) -> Iterator[str]:
    if not os.path.isdir(path):
        yield path
        return
    for folder, folders, names in walk(path):
        folders.sort()
        yield from (os.path.join(folder, name) for name in sorted(names))


def content_of(columns: Columns) -> str:
    """Returns a text that is another one where a value of any record is another one.

    All values are read once, some at a time. What they are called, and of which dtype they are,
    tells the schema. Raises DataError for values that cannot be written.
    """
    rows = max(1, int(_CHUNK_BYTES // max(1, frame_bytes(columns))))
    sums = dict.fromkeys(columns.columns, 0)
    for start in range(0, columns.num_records, rows):
        chunk = np.arange(start, min(start + rows, columns.num_records))
        for name, values in columns.block(chunk).items():
            for part in _parts(values):
                sums[name] = crc32c(part, sums[name])
    return repr(sums)


def _parts(values: Any) -> Iterator[memoryview | bytes]:
    """Yields the bytes of values, those of different lengths each with its own."""
    if isinstance(values, np.ndarray) and values.dtype != object:
        yield memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        return
    if isinstance(values, bytes):
        yield values
        return
    for value in values:
        yield b"%d " % len(value)
        yield from _parts(value)
