"""One training at a time in a folder: a lock that the kernel takes back when its process ends.

The lock is held by the process that took it, on a file that stays; its text tells who that is. A
program that it starts does not hold it, nor does a process that it forks. No TensorFlow is imported
here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
import weakref
from datetime import datetime
from pathlib import Path

from tfdist.errors import InUseError, cannot_write, read_json

_POLL_S = 0.1
_MOST_BYTES = 4096
_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
_WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)

_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


class FolderLock:
    """The right to write in a folder, until ``release`` or the end of the process.

    Args:
        path: the lock's file; made when missing, never removed.
        patience_s: how long to wait for a holder, such as a process that is being ended.

    Attributes:
        excludes: whether others cannot have it meanwhile; some file systems have no locks.

    Raises:
        InUseError: another holds it; the message names that process.
        WriteError: the file cannot be made.
    """

    def __init__(self, path: Path, patience_s: float = 0.0):
        self._path = path
        self.excludes = True
        deadline = time.monotonic() + patience_s
        while True:
            descriptor = self._opened()
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _TAKEN and time.monotonic() >= deadline:
                    raise self._taken(descriptor) from None
                if error.errno in _WITHOUT_LOCKS:
                    self.excludes = False
                    break  # A file system without locks: no training is to fail for that.
                os.close(descriptor)
                if error.errno not in _TAKEN:
                    raise cannot_write(path, error) from error
                time.sleep(_POLL_S)
                continue
            if _is_at(descriptor, path):
                break
            os.close(descriptor)  # Its folder was removed between the two calls.
        self._descriptor: int | None = descriptor
        _held.add(self)
        self._sign()

    def release(self) -> None:
        """Lets others have the folder; may be called again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # It may never have been taken.
            self.release()

    def _opened(self) -> int:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            return os.open(self._path, flags, 0o666)
        except OSError as error:
            raise cannot_write(self._path, error) from error

    def _sign(self) -> None:
        since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        who = {"process": os.getpid(), "host": socket.gethostname(), "since": since}
        with contextlib.suppress(OSError):  # A full disk: the lock holds all the same.
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, (json.dumps(who) + "\n").encode(), 0)

    def _taken(self, descriptor: int) -> InUseError:
        try:
            who = read_json(os.pread(descriptor, _MOST_BYTES, 0))
            named = f"process {who['process']} on {who['host']} since {who['since']}"
        except (OSError, ValueError, TypeError, KeyError):
            named = "another training"  # It has not signed yet.
        finally:
            os.close(descriptor)
        return InUseError(
            "a folder must be written by one training at a time",
            received=f"{self._path.parent} in use by {named}",
            mend="Wait until that has ended, end it, or choose another folder",
        )


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except OSError:
        return False


def _leave_to_parent() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_leave_to_parent)
