"""Which files are adopted, and which split each belongs to."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from tfdist.errors import DataError, OptionError, spelt
from tfdist.records.format.files import walk
from tfdist.records.format.splits import SPLITS, check_split_name, split_of_word
from tfdist.records.wording import listed

DEFAULT_SPLIT = "train"
_GIVEN_AS = "TFRecord files must be given as a folder, a file, or a pattern of files"
_NUMBER = re.compile(r"(?P<stem>.*?)[-_.]?(?P<number>\d{3,})-of-(?P<total>\d{3,})(?P<rest>.*)")
# How Spark and Beam call what they have not finished.
_UNFINISHED = "_temp"
_KIND = re.compile(r"\.(tfrecords?|tfrec|tfr|tf_record|records?)(?=[-_.]|$)", re.IGNORECASE)
_ENDING = re.compile(r"(\.gz|\.gzip)$", re.IGNORECASE)


@dataclass(frozen=True)
class Files:
    """Files of one folder.

    Attributes:
        folder: that all are in, or in whose folders.
        names: from there, "train/a.tfrecord"; in the order of the numbers in them.
        aside: names of files that look like no TFRecord files.
    """

    folder: Path
    names: tuple[str, ...]
    aside: tuple[str, ...] = ()


def find_files(source: str | os.PathLike | Sequence[str | os.PathLike]) -> Files:
    """Returns the files of a folder and the folders in it, of a pattern, or of a list of both.

    Raises:
        DataError: there are none.
    """
    given = [source] if isinstance(source, str | os.PathLike) else list(source)
    if not given:
        raise DataError(
            _GIVEN_AS,
            received="an empty list",
            mend="Name one at least, or give the pattern itself",
        )
    if len(given) == 1 and Path(given[0]).is_dir():
        return _of_folder(Path(given[0]))
    paths: dict[Path, None] = {}
    for item in given:
        path = Path(item)
        if path.is_dir():
            inside = _of_folder(path)
            paths |= dict.fromkeys(Path(os.path.abspath(path / name)) for name in inside.names)
            continue
        matched = [item] if os.path.lexists(path) else glob.glob(os.fspath(item), recursive=True)
        found = [Path(os.path.abspath(match)) for match in matched if not Path(match).is_dir()]
        if not found:
            raise DataError(
                _GIVEN_AS,
                received=f"{item}, where there is none",
                mend="Check its spelling, or write the whole path",
            )
        paths |= dict.fromkeys(found)
    folder = Path(os.path.commonpath([path.parent for path in paths]))
    names = sorted((path.relative_to(folder).as_posix() for path in paths), key=_by_number)
    _check_once(folder, names)
    return Files(folder, tuple(names))


def _of_folder(folder: Path) -> Files:
    names, aside = [], []
    for root, folders, files in walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", _UNFINISHED))]
        for name in files:
            path = Path(root, name).relative_to(folder).as_posix()
            if name[0] == ".":
                continue
            is_ours = _KIND.search(name) or _NUMBER.fullmatch(name)
            is_other = name.endswith(".json") or name.startswith(_UNFINISHED)
            (names if is_ours and not is_other else aside).append(path)
    if not names:
        shown = listed(sorted(aside)) if aside else "no file"
        raise DataError(
            f"{folder} must have TFRecord files, such as a.tfrecord or train-00000-of-00010",
            received=shown,
            mend="Give a pattern that they match: tfdist adopt 'FOLDER/*.data'",
        )
    _check_once(folder, names)
    return Files(folder, tuple(sorted(names, key=_by_number)), tuple(sorted(aside)))


def _check_once(folder: Path, names: Sequence[str]) -> None:
    """Raises DataError for a file that has two of the names, as by a link."""
    seen: dict[tuple[int, int], str] = {}
    for name in sorted(names):
        with contextlib.suppress(OSError):  # It is told when it is read.
            found = os.stat(folder / name)
            first = seen.setdefault((found.st_dev, found.st_ino), name)
            if first != name and found.st_size:
                raise DataError(
                    f"each TFRecord file of {folder} must have one name, as its records count once",
                    received=f"{first} and {name}, which are one file",
                    mend="Remove the link, or give a pattern that one of them matches",
                )


def divide(
    files: Files, globs: Mapping[str, str] | None, dataset: str | None
) -> tuple[dict[str, list[str]], list[str]]:
    """Returns the files of each split, and what is to be said of it.

    Args:
        globs: what the user says: for each split the pattern of its files.
        dataset: the name of a TFDS dataset, with which names begin.

    Raises:
        OptionError: a pattern that cannot be.
    """
    if globs:
        return _as_said(files, globs)
    words = {name: _word(name, dataset) for name in files.names}
    known = {word for word in words.values() if split_of_word(word)}
    splits: dict[str, list[str]] = {}
    notes = []
    if not known:
        splits = {DEFAULT_SPLIT: list(files.names)}
        others = sorted({word for word in words.values() if word})
        if len(others) > 1:
            notes.append(
                f"no file is named after a split ({listed(others)}): all are the split "
                f"'{DEFAULT_SPLIT}'; say otherwise with {other_splits()}"
            )
    else:
        # Two words for one split, such as val and dev, stay apart.
        chosen = [split_of_word(word) for word in known]
        for name, word in words.items():
            split = split_of_word(word)
            if split is None or chosen.count(split) > 1:
                split = re.sub(r"\W+", "_", word).strip("_") or "other"
                split = split if split[0].isalpha() else f"split_{split}"
            splits.setdefault(split, []).append(name)
        renamed = sorted(known - splits.keys())
        if renamed:
            notes.append(", ".join(f"{w} is the split '{split_of_word(w)}'" for w in renamed))
        order = {name: place for place, name in enumerate(SPLITS)}
        splits = dict(sorted(splits.items(), key=lambda item: order.get(item[0], len(order))))
    return splits, [*notes, *_absent(files.names)]


def _as_said(files: Files, globs: Mapping[str, str]) -> tuple[dict[str, list[str]], list[str]]:
    splits: dict[str, list[str]] = {}
    taken: dict[str, str] = {}
    for split, pattern in globs.items():
        check_split_name(split, "Choose a name such as train, validation or test")
        matched = [n for n in files.names if fnmatchcase(n, pattern) or _ends_as(n, pattern)]
        if not matched:
            raise OptionError(
                f"the pattern of split '{split}' must match files",
                received=f"'{pattern}' for {listed(files.names)}",
                mend="Write a pattern that names of files match, where * stands for any letters",
            )
        twice = next((name for name in matched if name in taken), None)
        if twice is not None:
            raise OptionError(
                "each file must be of one split",
                received=f"{twice} of '{taken[twice]}' and '{split}'",
                mend="Change the patterns, so that each file matches one alone",
            )
        taken |= dict.fromkeys(matched, split)
        splits[split] = matched
    left = [name for name in files.names if name not in taken]
    notes = [f"{len(left):,} files are of no split: {listed(left)}"] if left else []
    return splits, [*notes, *_absent([name for name in files.names if name in taken])]


def _ends_as(name: str, pattern: str) -> bool:
    """Whether the file matches wherever it lies, unless the pattern names folders."""
    return "/" not in pattern and fnmatchcase(name.rpartition("/")[2], pattern)


def _word(name: str, dataset: str | None) -> str:
    """Returns what in a name may be the split: "train" of "mnist-train.tfrecord-00000-of-00001"."""
    folder, _, file = name.rpartition("/")
    stem = _stem(file)
    if dataset is not None and stem.startswith(f"{dataset}-"):
        return stem[len(dataset) + 1 :]
    words = [word for word in re.split(r"[-_.]", stem) if word and not word.isdigit()]
    words = [re.sub(r"\d+$", "", word) for word in words]  # As in train2017.
    split = next((word for word in reversed(words) if split_of_word(word)), None)
    if split is None:
        parts = [part for part in folder.split("/") if split_of_word(part)]
        split = parts[-1] if parts else stem
    return split


def _stem(file: str) -> str:
    stem = _ENDING.sub("", file)
    numbered = _NUMBER.fullmatch(stem)
    stem = numbered["stem"] if numbered else stem
    stem = _KIND.sub("", stem)
    return stem if numbered else re.sub(r"[-_.]?\d+$", "", stem)


def _absent(names: Sequence[str]) -> list[str]:
    """Returns what is to be said of numbered files of which some are not there."""
    found: dict[tuple[str, str, str], set[int]] = {}
    for name in names:
        if numbered := _NUMBER.fullmatch(name):
            key = (numbered["stem"], numbered["total"], numbered["rest"])
            found.setdefault(key, set()).add(int(numbered["number"]))
    return [
        f"of the {int(total):,} files {stem}-*-of-{total}{rest} only {len(there):,} are there"
        for (stem, total, rest), there in found.items()
        if len(there) < int(total)
    ]


def _by_number(name: str) -> list[tuple[bool, int, str]]:
    parts = re.split(r"(\d+)", name)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def other_splits() -> str:
    """Returns how files are said to be a split, for messages."""
    return spelt("split", {"NAME": "PATTERN"}, flag="--split NAME=PATTERN")
