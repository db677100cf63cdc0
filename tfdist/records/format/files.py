"""Files as they lie on a disk: which one it is, and the sum of its bytes, reckoned once."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from crc32c import crc32c

_CHUNK_BYTES = 1 << 20
# A file written so lately may be written again without a change of its time.
_YOUNG_NS = 1_000_000_000


def walk(folder: str | Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yields what ``os.walk`` does, of folders behind links too, and of each folder once."""
    seen: set[str] = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:  # A link to a folder above has no end.
            folders.clear()
            continue
        seen.add(real)
        yield place, folders, files


Identity = tuple[int, int, int, int]  # device, inode, bytes, time of the last change


class NoFileError(OSError):
    """What should be a file is missing, or is a folder, a pipe, a device or a socket."""


def open_regular(path: Path) -> IO[bytes]:
    """Opens a regular file, unbuffered; never waits, as for a pipe without a writer.

    Raises:
        OSError: there is none, or it cannot be read.
    """
    try:
        # A device is not even opened: that may do something.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise NoFileError(0, "is no regular file")
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # A name that no file can have.
        raise NoFileError(0, str(error)) from None
    file = open(descriptor, "rb", buffering=0)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise NoFileError(0, "is no regular file")
    return file


def unreadable(error: OSError) -> str:
    """Returns why a file cannot be read, such as could follow its name: "which is missing"."""
    if isinstance(error, FileNotFoundError):
        return "which is missing"
    return f"which cannot be read ({error.strerror or error})"


def regular_size(path: Path) -> int:
    """Returns the bytes of a regular file. Raises OSError."""
    with open_regular(path) as file:
        return os.fstat(file.fileno()).st_size


def _identity(found: os.stat_result) -> Identity:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class Sums:
    """The crc32c of files, each reckoned once for as long as the file stays the same one."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, Identity], str] = {}
        self._turns: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def of(self, path: Path, go_on: Callable[[], bool] = lambda: True) -> str | None:
        """Returns 8 hexadecimal digits.

        Whoever asks while another thread reckons waits for that.

        Args:
            go_on: asked now and then; once False, None is returned.

        Raises:
            OSError: no regular file, or one that cannot be read.
        """
        name = os.fspath(path)
        with self._lock:
            turn = self._turns.setdefault(name, threading.Lock())
        with turn, open_regular(path) as file:
            found = _identity(os.fstat(file.fileno()))
            if (name, found) in self._known:
                return self._known[name, found]
            is_young = time.time_ns() - found[3] < _YOUNG_NS
            checksum, chunk = 0, memoryview(bytearray(_CHUNK_BYTES))
            while count := file.readinto(chunk):
                checksum = crc32c(chunk[:count], checksum)
                if not go_on():
                    return None
            text = f"{checksum:08x}"
            if not is_young and _identity(os.fstat(file.fileno())) == found:
                self._known[name, found] = text
            return text


#: Those of this process.
sums = Sums()
