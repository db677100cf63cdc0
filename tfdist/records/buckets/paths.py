"""Paths on this machine, before anything is looked for there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from tfdist.errors import DataError

_IS_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def possible(path: str | os.PathLike) -> Path:
    """Returns a path. Raises DataError where there can be no such path, or none may look there."""
    try:
        os.lstat(path)
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) in _IS_NOT_THERE:
            return Path(path)
        reason = getattr(error, "strerror", None) or "a name with a NUL"
        raise DataError(
            "a path must be one that can be looked at",
            received=f"'{os.fspath(path)!s:.80}', {len(os.fspath(path))} letters: {reason}",
            mend="Choose another place or a shorter name",
        ) from None
    return Path(path)
