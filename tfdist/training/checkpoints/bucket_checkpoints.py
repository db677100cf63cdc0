"""Checkpoints of a fit in a bucket: written on this machine, and taken there when each is whole."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import time
from pathlib import Path

from tfdist.errors import OptionError, TfdistError, WriteError
from tfdist.records.buckets import cache
from tfdist.records.buckets.store import Store
from tfdist.records.buckets.urls import WRITABLE
from tfdist.training.checkpoints import checkpoint_files
from tfdist.training.engine.failure_notices import ToldOnce

_LAST_TRIES = 3
_BETWEEN_TRIES_S = 2.0


class BucketCheckpoints:
    """The checkpoints below a URL, and the folder of this machine that they are written in.

    A checkpoint goes up before the list that names it, and what has gone here goes there after
    that; objects of others are left alone.

    Args:
        url: s3:// or gs://, as ``url_of`` returns it.

    Raises:
        OptionError: another kind of URL.
    """

    def __init__(self, url: str):
        if url.split(":")[0] not in WRITABLE:
            raise OptionError(
                "the directory of Checkpoints must be a folder, or a URL that begins with s3:// or "
                "gs://",
                received=url,
            )
        self.url = url
        place = cache.working_place(url)
        self.lock = place / checkpoint_files.LOCK
        self.folder = Path(tempfile.mkdtemp(dir=place, prefix=f"fit-{os.getpid()}-"))
        self._store: Store | None = None
        #: What is there: name -> the file of this machine that it is a copy of.
        self._there: dict[str, tuple[int, int]] = {}
        self._failures = ToldOnce()
        self._is_behind = False
        atexit.register(self._remove)

    def fetch(self) -> None:
        """Makes the folder hold what is there.

        Raises:
            DataError: the URL cannot be reached.
        """
        self._store = Store(self.url)
        sizes = self._store.sizes()
        names = checkpoint_files.whole(sizes)
        parts = {part for parts in names.values() for part in parts}
        for path in self.folder.iterdir():
            if checkpoint_files.is_part(path.name) and path.name not in parts:
                path.unlink()
        missing = {part for part in parts if not (self.folder / part).exists()}
        cache.fetch_files(self.url, self.folder, {part: sizes[part] for part in missing})
        self._there = {part: self._identity(part) for part in parts}
        self._is_behind = False

    def send(self) -> None:
        """Takes there what is new; what cannot be is told of once, and tried again next time."""
        try:
            self._send()
            self._is_behind = False
            self._failures.worked()
        except (TfdistError, OSError) as error:
            self._is_behind = True
            self._failures.failed(
                f"the fit goes on, and its checkpoints are kept in {self.folder} until they can "
                f"be taken to {self.url}: {error}"
            )

    def _send(self) -> None:
        if self._store is None:  # Of a chief that has taken the place of one that was lost.
            self._store = Store(self.url)
        found = (path.name for path in self.folder.iterdir())
        here = checkpoint_files.whole(path for path in found if checkpoint_files.is_part(path))
        parts = [part for parts in here.values() for part in parts]
        for part in parts:  # One that was damaged there may have been written anew.
            own = self._identity(part)
            if self._there.get(part) != own:
                self._store.put(self.folder / part, part)
                self._there[part] = own
        self._store.put(self.folder / checkpoint_files.LIST, checkpoint_files.LIST)
        # The index first: without it a checkpoint is none.
        gone = sorted(self._there.keys() - set(parts), key=lambda name: not name.endswith(".index"))
        for part in gone:
            self._store.remove(part)
            del self._there[part]

    def _identity(self, part: str) -> tuple[int, int]:
        found = (self.folder / part).stat()
        return found.st_size, found.st_mtime_ns

    def finish(self) -> None:
        """Takes there what is left.

        Raises:
            WriteError: that cannot be; it is kept on this machine.
        """
        for number in range(_LAST_TRIES):
            if not self._is_behind:
                return
            time.sleep(_BETWEEN_TRIES_S * number)
            self.send()
        if self._is_behind:
            raise WriteError(
                f"{self.url} must hold all checkpoints of the fit",
                received="ones that could not be taken there",
                mend=f"They are kept in {self.folder}: copy them",
            )

    def _remove(self) -> None:
        if not self._is_behind:
            shutil.rmtree(self.folder, ignore_errors=True)
