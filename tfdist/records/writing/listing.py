"""Whether files are still those that they were."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tfdist.records.format.files import sums, walk


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
