"""The files of a folder of checkpoints: which are whole, and which a dead writer left behind.

TensorFlow writes ``ckpt-N_temp/``, renames what is in it to ``ckpt-N.data-*``, writes
``ckpt-N.index``, and at last names the checkpoint in the file ``checkpoint``, which it replaces as
a whole. That list is believed only as far as the files beside it bear it out. No TensorFlow is
imported here.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tfdist.errors import OptionError

PREFIX = "ckpt"
LOCK = ".tfdist-lock"
LIST = "checkpoint"
_NAME = re.compile(rf"{PREFIX}-\d{{1,18}}", re.ASCII)
_LINE = re.compile(r'(?:all_)?model_checkpoint_paths?: "([^"]*)"')
_OTHER_LINE = re.compile(r"(?:all_model_checkpoint_timestamps|last_preserved_timestamp): \S+")
_PART = re.compile(rf"({PREFIX}-\d{{1,18}})\.(?:index|data-\d{{5}}-of-\d{{5}})", re.ASCII)
_TEMPORARY = re.compile(rf"{PREFIX}-\d+_temp|{LIST}\.(?:tmp[0-9a-f]+|tfdist)", re.ASCII)


def check_path(folder: Path) -> None:
    """Raises OptionError for a path in which TensorFlow would see a pattern.

    It would then read, and remove, the files of other folders that the pattern names.
    """
    path = str(folder)
    found = [character for character in "*?[\\" if character in path]
    if found:
        raise OptionError(
            "the path of a folder of checkpoints must have none of the characters * ? [ \\, with "
            "which TensorFlow would find files of other folders",
            received=f"{' '.join(found)} in {path}",
            mend="Rename the folder, what is in it stays, or choose another",
        )


def finished(folder: Path) -> list[str]:
    """Returns the names of the checkpoints of a folder, such as "ckpt-12", the oldest first.

    Those that have an index count, whether or not TensorFlow's list names them; where none has one,
    those that are listed, all of which are lost.
    """
    return _by_number(_indexed(folder) or _listed(folder) or set())


def mend_list(folder: Path, newest: str | None = None) -> None:
    """Has TensorFlow's list name the checkpoints that are there.

    TensorFlow cannot bear a damaged one, and removes what a wrong one names.

    Args:
        newest: what it names as the newest, however it was; None: the highest number, where the
            list was wrong.
    """
    there = _indexed(folder)
    if newest is None and _listed(folder) == there:
        return
    if not there:  # It may be another program's, or tell what has become of them.
        if os.path.lexists(folder / LIST):
            os.replace(folder / LIST, folder / f"{LIST}.before")
        return
    names = _by_number(there - {newest}) + ([newest] if newest is not None else [])
    lines = [f'model_checkpoint_path: "{names[-1]}"']
    lines += [f'all_model_checkpoint_paths: "{name}"' for name in names]
    # TensorFlow removes in the order of the list, and only what is later than the last line says.
    lines += ["all_model_checkpoint_timestamps: 1"] * len(names) + ["last_preserved_timestamp: 0"]
    partial = folder / f"{LIST}.tfdist"
    partial.write_text("\n".join(lines) + "\n")
    os.replace(partial, folder / LIST)


def check_regular(folder: Path, name: str) -> None:
    """Raises OSError when a file of a checkpoint is none: reading a pipe may never end."""
    for path in _children(folder):
        part = _PART.fullmatch(path.name)
        if part and part[1] == name and not path.is_file():
            raise OSError(f"{path.name} is no regular file")


def remove_unfinished(folder: Path, failed: str | None = None) -> None:
    """Removes what a writer that was killed or met a full disk has left half-written.

    Args:
        failed: name of a checkpoint whose writing has just failed.
    """
    whole = _indexed(folder)
    if failed not in (_listed(folder) or set()):
        whole.discard(failed)
    for path in _children(folder):
        part = _PART.fullmatch(path.name)
        is_half = part and part[1] not in whole  # Without an index nothing can be read.
        if is_half or _TEMPORARY.fullmatch(path.name):
            remove(path)


def keep_last(folder: Path, name: str, keep: int) -> None:
    """Has TensorFlow's list name a new checkpoint, and removes all but the last ``keep``.

    Those of higher numbers go first: the training that wrote them was broken, and has gone on from
    an earlier one.

    Args:
        name: of the new one.
    """
    mend_list(folder, newest=name)
    order = sorted(
        _indexed(folder), key=lambda each: (number_of(each) <= number_of(name), number_of(each))
    )
    for old in order[:-keep]:
        (folder / f"{old}.index").unlink()  # First: without it a checkpoint is none.
    remove_unfinished(folder)
    mend_list(folder, newest=name)


def temporary(number: int) -> str:
    """Returns the name of a folder to write in, which ``remove_unfinished`` removes."""
    return f"{PREFIX}-{number}_temp"


def remove_all(folder: Path) -> None:
    """Removes the checkpoints, and the folder when nothing else is in it."""
    for path in _children(folder):
        if is_ours(path.name):
            remove(path)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def whole(names: Iterable[str]) -> dict[str, list[str]]:
    """Returns the files of each checkpoint that has all of its own: name -> files, index last.

    Args:
        names: of the files there are.
    """
    parts: dict[str, list[str]] = {}
    for name in names:
        if match := _PART.fullmatch(name):
            parts.setdefault(match[1], []).append(name)
    found = {}
    for name in _by_number(set(parts)):
        data = sorted(part for part in parts[name] if not part.endswith(".index"))
        # One that took the place of another may have left files "-of-00003" of that.
        of_each = Counter(part[-5:] for part in data)
        complete = [part for part in data if of_each[part[-5:]] == int(part[-5:])]
        if len(data) < len(parts[name]) and complete:
            found[name] = [*complete, f"{name}.index"]
    return found


def index_first(names: Iterable[str]) -> list[str]:
    """Returns names of files of checkpoints in the order to remove them: without its index a
    checkpoint is none."""
    return sorted(names, key=lambda name: (not name.endswith(".index"), name))


def is_part(name: str) -> bool:
    """Whether a file of that name is a part of a checkpoint."""
    return bool(_PART.fullmatch(name))


def is_ours(name: str) -> bool:
    """Whether a file of that name in a folder of checkpoints is one that a training wrote."""
    return name in (LIST, LOCK) or bool(_PART.fullmatch(name) or _TEMPORARY.fullmatch(name))


def _children(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def remove(path: Path) -> None:
    """Removes a file, a link, or a folder with what is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _by_number(names: set[str]) -> list[str]:
    return sorted(names, key=number_of)


def number_of(name: str) -> int:
    """Returns the number in the name of a checkpoint, such as "ckpt-12"."""
    return int(name.rpartition("-")[2])


def _indexed(folder: Path) -> set[str]:
    return {
        path.name.removesuffix(".index")
        for path in _children(folder)
        if path.name.endswith(".index") and _PART.fullmatch(path.name) and path.is_file()
    }


def _listed(folder: Path) -> set[str] | None:
    """Returns what TensorFlow's own file names; None when it is not as TensorFlow writes it."""
    if not (folder / LIST).is_file():
        return None
    try:
        lines = (folder / LIST).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    named = [match[1] for line in lines if (match := _LINE.fullmatch(line))]
    others = sum(bool(_OTHER_LINE.fullmatch(line)) for line in lines)
    # The newest comes first and, again, last: a file that was cut short shows.
    is_whole = named and named[0] == named[-1] and len(named) > 1 and others
    if not is_whole or len(named) + others != len(lines):
        return None
    return set(named) if all(map(_NAME.fullmatch, named)) else None
