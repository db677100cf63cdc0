"""The files of a folder of checkpoints: which are whole, and which a dead writer left behind.

TensorFlow writes ``ckpt-N_temp/``, renames what is in it to ``ckpt-N.data-*``, writes
``ckpt-N.index``, and at last names the checkpoint in the file ``checkpoint``, which it replaces as
a whole. So what that file does not name was never finished. No TensorFlow is imported here.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

PREFIX = "ckpt"
_STATE = "checkpoint"
_PATH = r'checkpoint_path{}: "(?:[^"]*/)?([^"/]+)"$'
_NEWEST = re.compile("^model_" + _PATH.format(""), re.MULTILINE)
_NAMED = re.compile("^all_model_" + _PATH.format("s"), re.MULTILINE)
_PART = re.compile(rf"({PREFIX}-\d+)\.(?:index|data-\d{{5}}-of-\d{{5}})")
_TEMPORARY = re.compile(rf"{PREFIX}-\d+_temp|{_STATE}\.tmp[0-9a-f]+")


def finished(folder: Path) -> list[str]:
    """Returns the names of the checkpoints of a folder, such as "ckpt-12", the oldest first.

    Where the file that names them is gone or damaged, those that have an index count.
    """
    return _named(folder) or sorted(_indexed(folder), key=lambda name: int(name.split("-")[-1]))


def remove_unfinished(folder: Path, failed: str | None = None) -> None:
    """Removes what a writer that was killed or met a full disk has left half-written.

    And TensorFlow's list of the checkpoints, should it be damaged, which TensorFlow cannot bear.

    Args:
        failed: name of a checkpoint whose writing has just failed.
    """
    named = _named(folder)
    if not named:
        (folder / _STATE).unlink(missing_ok=True)
    whole = {*named, *_indexed(folder)} - ({failed} - {*named})
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        part = _PART.fullmatch(path.name)
        is_half = part and part[1] not in whole  # Without an index nothing can be read.
        if is_half or _TEMPORARY.fullmatch(path.name):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _indexed(folder: Path) -> set[str]:
    found = (path.name for path in folder.glob(f"{PREFIX}-*.index"))
    return {name.removesuffix(".index") for name in found if _PART.fullmatch(name)}


def _named(folder: Path) -> list[str]:
    """Returns what TensorFlow's own file names; nothing when it is gone or damaged."""
    try:
        text = (folder / _STATE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    newest, named = _NEWEST.search(text), _NAMED.findall(text)
    # The newest comes first and, again, last: a file that was cut short shows.
    return named if newest and named[-1:] == [newest[1]] else []
