"""What decides what a run writes, files and records in memory, and whether another is the same."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c

from tfdist.errors import DataError, OptionError, spelt
from tfdist.records.buckets.urls import url_of
from tfdist.records.format.columns import Columns
from tfdist.records.format.files import sums, walk
from tfdist.records.writing.raw_sources import DIGITS
from tfdist.records.writing.shard_files import frame_bytes

# Who goes on, or writes another part, may give others of these.
_MAY_DIFFER = ("source", "out", "workers", "resume", "overwrite", "part", "progress", "opened")
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


def said_in(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns of the arguments of ``writer.write`` those that decide what is written, as JSON."""
    return {name: _as_json(value) for name, value in given.items() if name not in _MAY_DIFFER}


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value


def known_by(
    source: Any, here: Any, beside: Mapping[str | Path | None, str | Path | None]
) -> tuple[list[str], Listing]:
    """Returns the names of the files that a source is in, and how they lie there.

    Args:
        here: where the source is on this machine: a copy, where it was fetched.
        beside: further files of it -> where they are on this machine; None for none.
    """
    if not isinstance(source, (str, os.PathLike)) or source == DIGITS:
        return [], listing_of([])
    places = {source: here} | {path: copy for path, copy in beside.items() if path is not None}
    urls = {path: url_of(path) for path in places}
    listing = listing_of(places.values(), are_copies=any(urls.values()))
    return [url or os.path.abspath(path) for path, url in urls.items()], listing


def check_same(now: Mapping[str, Any], was: Mapping[str, Any]) -> None:
    """Raises an error unless a run may go on with another, see ``Unfinished.said``.

    Raises:
        DataError: that was of another version, or its source is another one now.
        OptionError: it had other options.
    """
    anew = f"Give it the same, or begin anew with {spelt('overwrite', True)}"
    if was["written_by"] != now["written_by"]:
        raise DataError(
            f"{spelt('resume', True)} must go on with the version that began",
            received=f"{now['written_by']} where {was['written_by']} began",
            mend=anew,
        )
    asked, had = now["options"], was["options"]
    other = [name for name in asked if asked[name] != had.get(name)]
    if other:
        shown = ", ".join(f"{name} {_shown(asked[name])}" for name in other)
        began = ", ".join(_shown(had.get(name)) for name in other)
        raise OptionError(
            f"{spelt('resume', True)} must have the options of the run that was ended",
            received=f"{shown} where it had {began}",
            mend=anew,
        )
    found, listed = Listing(**now["listing"]), Listing(**was["listing"])
    if now["files"] != was["files"]:
        received = f"{_named(now['files'])} where it had {_named(was['files'])}"
    elif found != listed:
        same = (found.files, found.bytes) == (listed.files, listed.bytes)
        received = "files of other sizes or times" if same else f"{found} where there were {listed}"
    else:
        return
    raise DataError(
        f"{spelt('resume', True)} must find the source as it was when the run began",
        received=received,
        mend=f"Begin anew with {spelt('overwrite', True)}",
    )


def _named(files: Sequence[str]) -> str:
    return ", ".join(files) or "data in memory"


def _shown(value: object) -> str:
    return "none" if value is None else str(value)
