"""A folder of this machine and what lies below a URL, the one copied to the other file by file.

Whenever a process is killed, each name has what it had before or all of the new, on both sides. In
which order they are copied and removed, so that what is there can be used, is the caller's to say.
A request that fails is made again by the packages of ``store``.
"""

from __future__ import annotations

import functools
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath

from crc32c import crc32c

from tfdist.errors import DataError, InUseError, TfdistError, WriteError
from tfdist.records.buckets.store import Store

_PIECE_BYTES = 1 << 20
_SECONDS_BETWEEN_LINES = 5.0
# Files of at most so many bytes are told apart by them: they may be written anew, and be the same.
_SMALL_BYTES = 4096
_LAST_TRIES = 3
_BETWEEN_TRIES_S = 2.0
_AGAIN = "Run this again, and if that does not help, upload the file again"


class Mirror:
    """Copies files between a folder and a URL.

    Args:
        folder: of this machine.
        url: as ``urls.url_of`` returns it.

    Attributes:
        there: names of the objects below the URL, as ``look`` has found them and ``send`` and
            ``remove`` have changed them.
    """

    def __init__(self, folder: Path, url: str):
        self.folder, self.url = folder, url
        self.there: set[str] = set()
        # Object -> what tells the file that it is a copy of from others.
        self._copies: dict[str, bytes | tuple[int, int, int]] = {}

    @functools.cached_property
    def store(self) -> Store:
        """What is below the URL; its package is imported for those alone who ask for something."""
        return Store(self.url)

    def look(self) -> dict[str, int | None]:
        """Returns the bytes of every object below the URL, by name."""
        sizes = self.store.sizes()
        self.there = set(sizes)
        self._copies = {name: copy for name, copy in self._copies.items() if name in sizes}
        return sizes

    def fetch(
        self,
        sizes: Mapping[str, int | None],
        checksums: Mapping[str, str | None] | None = None,
        below: str = "",
    ) -> None:
        """Copies objects into the folder.

        Args:
            sizes: name in the folder -> the bytes that it must have; None where no one knows.
            checksums: name -> its CRC-32C, where that is known.
            below: what their names below the URL begin with.

        Raises:
            DataError: one is missing, or not as it must be; those before it are in the folder.
        """
        progress = _Progress(self.url, sum(size or 0 for size in sizes.values()))
        self._check_names(sizes)
        for name, size in sizes.items():
            self._fetch(name, below + name, size, (checksums or {}).get(name), progress)

    def _check_names(self, names: Collection[str]) -> None:
        """Raises DataError for an object that could be no file of its own in the folder."""
        paths = {name: PurePosixPath(name) for name in names}
        times = Counter(path.as_posix() for path in paths.values())
        for name, path in paths.items():
            is_plain = ".." not in path.parts and not path.is_absolute()
            is_alone = times[path.as_posix()] == 1
            if not (is_plain and is_alone) or any(p.as_posix() in times for p in path.parents):
                raise DataError(
                    f"an object of {self.url} must have a plain name of its own, and be below no "
                    "other",
                    received=repr(name),
                    mend="Rename it in the bucket",
                )

    def _fetch(
        self,
        name: str,
        key: str,
        size: int | None,
        checksum: str | None,
        progress: Callable[[int], None],
    ) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{uuid.uuid4().hex}")
        try:
            self.store.fetch(key, temporary, progress)
            found = temporary.stat().st_size
            if size is not None and found != size:
                raise DataError(
                    f"{self.url}/{key} must have {size} bytes",
                    received=f"{found} bytes",
                    mend=_AGAIN,
                )
            if checksum is not None and _checksum(temporary) != checksum:
                raise DataError(
                    f"{self.url}/{key} must be as it was written",
                    received="bytes that do not match the checksum of the manifest",
                    mend=_AGAIN,
                )
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        self._copies[key] = _identity(path)

    def send(self, names: Iterable[str], below: str = "", of: Path | None = None) -> None:
        """Copies those files of the folder, in their order, of which there is no copy yet.

        Args:
            below: what their names below the URL begin with.
            of: a folder with the same files, as they were at one time.
        """
        for name in names:
            path, key = (of or self.folder) / name, below + name
            known = _identity(path)
            if self._copies.get(key) != known:
                self.store.put(path, key)
                self.there.add(key)
                self._copies[key] = known

    def remove(self, keys: Iterable[str]) -> None:
        """Removes objects, in their order."""
        for key in list(keys):
            self.store.remove(key)
            self.there.discard(key)
            self._copies.pop(key, None)


def finish(send: Callable[[], object], url: str, what: str, mend: str) -> None:
    """Has ``send`` take to a URL what is left; tries a few times, as it is the last occasion.

    Args:
        what: what the URL must hold, for the message.
        mend: what to do with what is on this machine.

    Raises:
        WriteError: it cannot be taken there, or the place is another's.
    """
    for number in range(1, _LAST_TRIES + 1):
        try:
            send()
            return
        except (TfdistError, OSError) as error:
            if number == _LAST_TRIES or isinstance(error, InUseError):
                raise WriteError(
                    f"{url} must hold all {what}", received=f"an error: {error}", mend=mend
                ) from error
            time.sleep(_BETWEEN_TRIES_S * number)


def _checksum(path: Path) -> str:
    checksum = 0
    with open(path, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            checksum = crc32c(piece, checksum)
    return f"{checksum:08x}"


def _identity(path: Path) -> bytes | tuple[int, int, int]:
    found = path.stat()
    if found.st_size <= _SMALL_BYTES:
        return path.read_bytes()
    return found.st_ino, found.st_mtime_ns, found.st_size


class _Progress:
    """Says now and then how far it is, where it is known how much there is."""

    def __init__(self, url: str, total: int):
        self._url, self._total = url, total
        self._done = 0
        self._said = time.monotonic()

    def __call__(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._total and time.monotonic() - self._said >= _SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            print(
                f"tfdist: fetched {self._done / 1e6:,.0f} of {self._total / 1e6:,.0f} MB "
                f"of {self._url}",
                flush=True,
            )
