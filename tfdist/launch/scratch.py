"""The folders for temporary files of one job, which go with it however it ends.

TensorFlow's autograph and Open MPI remove their files only where they end by themselves. In a
folder that is the job's alone they can be told from those of others, and from the user's own, which
stay where they are.

The kernel releases a job's lock on its folders with the last of its processes. Where all of them
were killed at once, the next job finds the folders without one, and removes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Mapping

_PREFIX = "tfdist-job-"
_MEMORY_PREFIX = "tfdist-memory-"
# Named by autograph, Open MPI, tfdist.
_OURS = ("__autograph_generated_file*", "ompi.*", "tfdist-*")
# Where Keras writes a model first. When that fails they stay, and are empty.
_OF_KERAS = ("tmp*/assets", "tmp*")
_MEMORY = "/dev/shm"
# In each folder, and locked for as long as anything of the job lives.
_LOCK = "tfdist-lock"
# Names the folder for the memory that Open MPI's ranks share.
_SHARED = "OMPI_MCA_btl_vader_backing_directory"


class Scratch:
    """The folders of one job.

    Attributes:
        paths: for other files, and for shared memory where this system has a place for it.
        locks: file descriptors that every process of the job may keep open.
    """

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.locks: list[int] = []
        self._make(tempfile.gettempdir(), _PREFIX)
        with contextlib.suppress(OSError):
            self._make(_MEMORY, _MEMORY_PREFIX)

    def _make(self, place: str, prefix: str) -> None:
        _remove_those_of_nobody(place, prefix)
        path = tempfile.mkdtemp(prefix=prefix, dir=place)
        self.paths.append(path)
        # Locked before it has its name: without one the folder is nobody else's to remove.
        early = os.path.join(path, f"{_LOCK}.new")
        with contextlib.suppress(OSError):  # Some file systems know no locks.
            lock = os.open(early, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            self.locks.append(lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(early, os.path.join(path, _LOCK))

    def close(self) -> None:
        """Removes the folders, and lets go of them."""
        remove(self.paths)
        for lock in self.locks:
            os.close(lock)

    def given_to(self, environ: Mapping[str, str], *, is_local: bool) -> dict[str, str]:
        """Returns ``environ`` for the job.

        Args:
            is_local: whether all of its ranks are on this machine: mpirun tells each of them the
                folder for shared memory, which other machines do not have.
        """
        folder, *memory = self.paths
        shared = {_SHARED: memory[0]} if memory and is_local else {}
        return {**shared, **environ, "TMPDIR": folder}


def remove(paths: Iterable[str]) -> None:
    """Removes the folders of a job that has ended, but for what its user has left there."""
    for folder in paths:
        if os.path.basename(folder).startswith(_MEMORY_PREFIX):  # Open MPI's alone.
            shutil.rmtree(folder, ignore_errors=True)
            continue
        for pattern in _OURS:
            for path in glob.glob(os.path.join(glob.escape(folder), pattern)):
                with contextlib.suppress(OSError):
                    os.remove(path) if not os.path.isdir(path) else shutil.rmtree(path)
        for pattern in _OF_KERAS:
            for path in glob.glob(os.path.join(glob.escape(folder), pattern)):
                with contextlib.suppress(OSError):  # Not empty: the user's.
                    os.rmdir(path)
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def _remove_those_of_nobody(place: str, prefix: str) -> None:
    """Removes the folders of this user's jobs of which no process is left."""
    for path in glob.glob(os.path.join(glob.escape(place), f"{prefix}*")):
        with contextlib.suppress(OSError):  # Another's, another job's, or removed meanwhile.
            status = os.lstat(path)
            if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
                continue
            lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove([path])
            finally:
                os.close(lock)
