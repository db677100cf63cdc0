"""The file of a model: noticed when it was replaced, and copied whole."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

from tfdist.errors import DataError
from tfdist.serving.served import newest

#: Beside the copy of a version: what it must answer at the gate.
EXPECTED = "expected.npz"
_PATIENCE = 10
# JSON-able, and another one for another file: its name, inode, time in ns, and bytes.
Mark = list[Any]


class Watched:
    """What a training writes its best model to.

    Args:
        source: its folder, or a file.
        mark: that of the file that was copied last.
    """

    def __init__(self, source: Path, mark: Mark):
        self._source, self._known, self._seen, self._restless = source, mark, mark, 0

    def look(self) -> Path | None:
        """Returns the file, once, when it is another one than before and has come to rest.

        That is when it is as it was at the look before: who writes slowly is not done. One that is
        another one at each of ``_PATIENCE`` looks is replaced as often, by a training.
        """
        file = seen = None
        with contextlib.suppress(OSError):  # It has just gone, or must not be looked at.
            file = newest(self._source)
            seen = None if file is None else _mark(file, file.stat())
        is_at_rest = seen == self._seen
        self._restless = 0 if is_at_rest else self._restless + 1
        self._seen = seen
        if seen in (None, self._known) or not (is_at_rest or self._restless == _PATIENCE):
            return None
        self._restless, self._known = 0, seen
        return file

    def copy(self, file: Path, to: Path) -> None:
        """As ``copy``: what is copied is not looked for any more."""
        self._known = copy(file, to)


def place_of(folder: Path, number: int, file: Path) -> Path:
    """Returns where the copy of a version is; its name tells the format."""
    return folder / f"version-{number}" / file.name


def copy(file: Path, to: Path) -> Mark:
    """Copies a file into a new folder. Returns the mark of what was copied.

    Raises:
        DataError: it cannot be read or written, or somebody writes it.
    """
    try:
        to.parent.mkdir()
        with file.open("rb") as source, to.open("wb") as target:
            mark = _mark(file, os.fstat(source.fileno()))
            shutil.copyfileobj(source, target, 1 << 20)
            is_whole = mark == _mark(file, os.fstat(source.fileno()))
    except OSError as error:
        raise _cannot_copy(file, to, str(error.strerror)) from error
    if not is_whole:
        raise _cannot_copy(file, to, "that it changed meanwhile")
    return mark


def _cannot_copy(file: Path, to: Path, found: str) -> DataError:
    return DataError(
        "a model must be copied before it is served",
        received=f"{file} to {to.parents[1]}: {found}",
        mend="Let it be read, and make room there, or elsewhere: TFDIST_CACHE=DIR",
    )


def _mark(file: Path, stat: os.stat_result) -> Mark:
    return [os.path.abspath(file), stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size]
