"""Whether files are still those that they were, without reading them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Listing:
    """Some files and folders as they lie on the disk.

    Attributes:
        files: how many files they are, with those in folders.
        bytes: of all of them.
        digest: of their names, sizes and times of the last change.
    """

    files: int
    bytes: int
    digest: str

    def __str__(self) -> str:
        return f"{self.files:,} files of {self.bytes:,} bytes"


def listing_of(paths: Iterable[str | Path]) -> Listing:
    """Returns that of files and folders; of those that are missing nothing. Raises OSError."""
    count = size = 0
    digest = hashlib.sha256()
    for name in (name for path in paths for name in _files(os.path.abspath(path))):
        try:
            stat = os.stat(name)
        except FileNotFoundError:
            continue  # A link to nothing, too.
        count, size = count + 1, size + stat.st_size
        line = f"{name}\0{stat.st_size} {stat.st_mtime_ns}\0"
        digest.update(line.encode(errors="surrogateescape"))
    return Listing(count, size, digest.hexdigest())


def _files(path: str) -> Iterator[str]:
    if not os.path.isdir(path):
        yield path
        return
    above: set[str] = set()
    for folder, folders, names in os.walk(path, followlinks=True):
        # A folder that links to one above it has no end.
        real = os.path.realpath(folder)
        if real in above:
            folders.clear()
            continue
        above.add(real)
        folders.sort()
        yield from (os.path.join(folder, name) for name in sorted(names))
