"""Checkpoints of a fit in a bucket: written on this machine, and taken there when each is whole."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from tfdist.errors import TfdistError
from tfdist.records.buckets import cache
from tfdist.records.buckets.mirror import Mirror, finish
from tfdist.training.checkpoints import checkpoint_files
from tfdist.training.engine.failure_notices import ToldOnce


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
        self.url = url
        place = cache.working_place(url, "the directory of Checkpoints")
        self.lock = place / checkpoint_files.LOCK
        self.folder = Path(tempfile.mkdtemp(dir=place, prefix=f"fit-{os.getpid()}-"))
        self._mirror = Mirror(self.folder, url)
        self._failures = ToldOnce()
        self._is_behind = False
        atexit.register(self._remove)

    def fetch(self) -> None:
        """Makes the folder hold what is there; what an earlier fit has left is taken there first.

        Raises:
            DataError: the URL cannot be reached.
            WriteError: what is left cannot be taken there.
        """
        self.finish()
        sizes = self._mirror.look()
        names = checkpoint_files.whole(sizes)
        parts = {part for parts in names.values() for part in parts}
        for path in self.folder.iterdir():
            if checkpoint_files.is_part(path.name) and path.name not in parts:
                path.unlink()
        missing = {part for part in parts if not (self.folder / part).exists()}
        self._mirror.fetch({part: sizes[part] for part in missing})

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
        here = checkpoint_files.whole(path.name for path in self.folder.iterdir())
        parts = [part for parts in here.values() for part in parts]
        self._mirror.send([*parts, checkpoint_files.LIST])
        gone = filter(checkpoint_files.is_part, self._mirror.there - set(parts))
        self._mirror.remove(checkpoint_files.index_first(gone))

    def finish(self) -> None:
        """Takes there what is left.

        Raises:
            WriteError: that cannot be; it is kept on this machine.
        """
        if self._is_behind:
            mend = f"They are kept in {self.folder}: copy them"
            finish(self._send, self.url, "checkpoints of the fit", mend)
            self._is_behind = False

    def _remove(self) -> None:
        if not self._is_behind:
            shutil.rmtree(self.folder, ignore_errors=True)
