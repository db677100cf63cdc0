"""The files of a folder of shards while they are written: all of them or none.

And how many they are when nobody says it: of 100 to 200 MB each, and a few at least.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c

from tfdist.errors import DataError
from tfdist.records.format.columns import Columns
from tfdist.records.format.encoding import make_framer, make_layout
from tfdist.records.format.manifest import ShardInfo

_LEAST_SHARDS = 4
# Of a stream of unknown length: 3 GB make shards of 190 MB.
STREAM_NUM_SHARDS = 16
_SHARD_BYTES = 150_000_000
_GZIP_LEVEL = 6
_GZIP_WINDOW_BITS = 31
# What changed later may be another machine's, whose locks are not seen everywhere, or be locked in
# a moment.
_OLD_S = 60
_SUFFIX = {"none": ".tfrecord", "gzip": ".tfrecord.gz"}

Progress = Callable[[int, "int | None"], None]


def shards_for(num_bytes: float) -> int:
    """Returns the number of shards for the records of a split."""
    return max(_LEAST_SHARDS, round(num_bytes / _SHARD_BYTES))


def frame_bytes(
    columns: Columns, widths: Mapping[str, int] | None = None, samples: int = 16
) -> float:
    """Returns the bytes of a record in a shard that is not compressed, on average.

    Args:
        widths: the bytes of each varint; None: as these records need them.
        samples: how many are looked at of records that differ.
    """
    widths = columns.varint_widths if widths is None else widths
    layout = make_layout(columns.schema, widths)
    if layout is not None:
        return layout.frame_bytes
    some = np.unique(np.linspace(0, columns.num_records - 1, samples).astype(np.int64))
    try:
        block = columns.block(some)
    except DataError:
        return 0  # Told where it is written.
    return len(make_framer(columns.schema, widths).frame(block)) / len(some)


def shard_name(split: str, number: int, of: int, compression: str) -> str:
    return f"{split}-{number:05d}-of-{of:05d}{_SUFFIX[compression]}"


@contextlib.contextmanager
def staging_folder(out: Path) -> Iterator[Path]:
    """Gives a folder beside ``out`` that becomes ``out`` at the end, or vanishes on any error.

    Such folders of processes that were killed are removed.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_left(out)
    folder = out.with_name(f".{out.name}-{uuid.uuid4().hex}")
    folder.mkdir()
    lock = _lock(folder)
    try:
        yield folder
        # Replaces an empty folder in one step; fails when another writer was faster.
        os.rename(folder, out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        if lock is not None:
            os.close(lock)


def _remove_left(out: Path) -> None:
    """Removes the folders beside ``out`` whose process is gone."""
    name = re.compile(rf"\.{re.escape(out.name)}-[0-9a-f]{{32}}")
    for folder in [path for path in out.parent.iterdir() if name.fullmatch(path.name)]:
        lock = _lock(folder)
        if lock is None:
            continue
        with contextlib.suppress(OSError):
            changed = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            if time.time() - changed > _OLD_S:
                shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _lock(folder: Path) -> int | None:
    """Returns the lock of a folder, which ends with this process; None where it cannot be had."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # Another's, or a file system without locks.
        os.close(descriptor)
        return None
    return descriptor


@contextlib.contextmanager
def said_of(out: Path) -> Iterator[None]:
    """Tells what the system does not let us write as what it is: of the folder to be written."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{out} must be writable",
            received=f"an error: {error.strerror or error}",
            mend="Choose a folder that you may write, on a disk with room",
        ) from error


@contextlib.contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """Turns SIGTERM into SystemExit, so that it unwinds like Ctrl-C; a user's own handler stays."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def stop(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Counter:
    """Adds up the progress of all threads."""

    def __init__(self, total: int | None, progress: Progress | None):
        self._total, self._progress = total, progress
        self._done = 0
        self._lock = threading.Lock()

    def add(self, records: int) -> None:
        if self._progress is not None:
            with self._lock:
                self._done += records
                self._progress(self._done, self._total)


class ShardFile:
    """A file that counts and sums its bytes as they are written.

    Args:
        stays_open: whether it is open between two writes; of many files at once none should be.
    """

    def __init__(self, path: Path, compression: str, *, stays_open: bool = True):
        self.path = path
        self.bytes = 0
        self.checksum = 0
        self._stays_open = stays_open
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115
        if not stays_open:
            self._file.close()
        self._compress = (
            zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP_WINDOW_BITS)
            if compression == "gzip"
            else None
        )

    def info(self, name: str, records: int, **others: Any) -> ShardInfo:
        """Returns what there is to say of the whole file, which is to be called so."""
        checksum = f"{self.checksum:08x}"
        return ShardInfo(file=name, records=records, bytes=self.bytes, checksum=checksum, **others)

    def write(self, data: bytes | memoryview) -> None:
        self._put(data if self._compress is None else self._compress.compress(data))

    def _put(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        if self._file.closed and view:
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
        self.bytes += len(view)
        self.checksum = crc32c(view, self.checksum)
        # A raw write may take less than it is given.
        while view:
            view = view[self._file.write(view) :]
        if not self._stays_open:
            self._file.close()

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        try:
            if kind is None and self._compress is not None:
                self._put(self._compress.flush())
        finally:
            self._file.close()
