"""A folder of class folders with .txt files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tfdist.errors import DataError, spelt
from tfdist.records.format.columns import Columns, from_arrays
from tfdist.records.format.files import open_regular, walk
from tfdist.records.format.splits import SPLITS, rows_of_splits, split_of_word
from tfdist.records.format.text_and_ragged import objects
from tfdist.records.wording import left_out
from tfdist.records.writing.text_files import decoded

_SUFFIX = ".txt"
_LOOKED_AT = 100
_SHOWN = 20


@dataclass
class _Found:
    """The texts of a folder.

    Attributes:
        texts, classes, splits: of each file, "" for no split.
        foreign: files that are left out, as they are no .txt of a class.
        bad: files that cannot be read, and why.
        empty: how many have no text.
        encodings: by encoding, the files that are not UTF-8.
    """

    texts: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    splits: list[str] = field(default_factory=list)
    foreign: list[Path] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    empty: int = 0
    encodings: dict[str, list[Path]] = field(default_factory=dict)


def holds_texts(folder: Path) -> bool:
    """Whether most of the files in the folders of a folder are .txt: some are looked at of each."""
    texts = others = 0
    for place, folders, files in walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if Path(place) == folder:
            continue
        for name in itertools.islice(files, _LOOKED_AT):
            is_text = name.lower().endswith(_SUFFIX)
            texts, others = texts + is_text, others + (not is_text)
    return texts > others


def from_text_folders(folder: Path, *, skip_bad: bool = False) -> Columns:
    """Returns "text", strings, and the numbers of the classes, sorted by name, as "label".

    The files are FOLDER/CLASS/NAME.txt, or FOLDER/SPLIT/CLASS/NAME.txt with folders for train,
    validation and test. Others are left out, and counted in a note.

    Args:
        skip_bad: whether files that cannot be read are left out, and counted too.

    Raises:
        DataError: a class without a text, a class folder in a class folder, or files that are
            no text.
    """
    found = _Found()
    for split, parent in _split_folders(folder, found).items():
        for path in sorted(parent.iterdir()):
            if path.is_dir() and not path.name.startswith("."):
                _read_class(path, split, found)
            else:
                found.foreign.append(path)
    if found.bad and not skip_bad:
        count = f"{len(found.bad):,} that are not, the first " if found.bad[_SHOWN:] else ""
        raise DataError(
            "every .txt file must be text that can be read",
            received=count + "; ".join(found.bad[:_SHOWN]),
            mend=f"Mend them, or leave them out with {spelt('skip_bad', True)}",
        )
    if not found.texts:
        raise DataError(
            f"the class folders of {folder} must hold .txt files",
            received="none",
            mend="Put texts in them, in files called .txt",
        )
    inputs, labels = {"text": objects(found.texts)}, {"label": objects(found.classes)}
    columns = from_arrays("folder", inputs, labels)
    return replace(
        columns,
        splits=rows_of_splits(found.splits),
        notes=tuple(_notes(folder, found)),
        left_out={"unreadable text": len(found.bad)} if found.bad else {},
    )


def _split_folders(folder: Path, found: _Found) -> Mapping[str, Path]:
    """Returns the folder of each split; the whole one as "" where it is not divided."""
    entries = [path for path in sorted(folder.iterdir()) if path.is_dir() and path.name[0] != "."]
    named = [(split_of_word(path.name), path) for path in entries]
    train = next((path for split, path in named if split == "train"), None)
    # A class may well be called "train", beside others: it holds texts, and no folders.
    if train is None or not any(path.is_dir() for path in train.iterdir()):
        return {"": folder}
    of_splits = {split: path for split, path in named if split is not None}
    if len(of_splits) < len(entries):
        raise DataError(
            f"{folder} must hold one folder for each of {', '.join(SPLITS)}, and no other",
            received=", ".join(path.name for path in entries),
            mend="Put those of one split together, and move others away",
        )
    found.foreign += [path for path in sorted(folder.iterdir()) if not path.is_dir()]
    return {name: of_splits[name] for name in SPLITS if name in of_splits}


def _read_class(folder: Path, split: str, found: _Found) -> None:
    count = len(found.texts) + len(found.bad)
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.name.startswith("."):
            raise DataError(
                "texts must lie in class folders, FOLDER/CLASS/TEXT.txt or "
                "FOLDER/SPLIT/CLASS/TEXT.txt",
                received=f"the folder {path}",
                mend="Give a folder that holds a folder for each class",
            )
        if path.suffix.lower() != _SUFFIX or path.name.startswith("."):
            found.foreign.append(path)
            continue
        try:
            with open_regular(path) as file:
                text, encoding = decoded(file.read(), path)
        except (OSError, DataError) as error:
            told = error.received if isinstance(error, DataError) else error.strerror
            found.bad.append(f"{folder.name}/{path.name} ({told or error})")
            continue
        if encoding is not None:
            found.encodings.setdefault(encoding, []).append(path)
        found.empty += not text.strip()
        found.texts.append(text)
        found.classes.append(folder.name)
        found.splits.append(split)
    if len(found.texts) + len(found.bad) == count:
        raise DataError(
            "every class folder must have a text",
            received=f"none in {folder}",
            mend="Put a .txt file in it, or remove the folder",
        )


def _notes(folder: Path, found: _Found) -> Iterator[str]:
    foreign = [path for path in found.foreign if not _is_of_a_system(path)]
    for paths, why in ((foreign, "as no text of a class"), (found.bad, "as bad")):
        if paths:
            yield left_out(len(paths), "file", why, map(str, paths), most=3)
    for encoding, paths in found.encodings.items():
        more = ", ..." if len(paths) > 1 else ""
        yield f"{_files(len(paths))} not UTF-8, but read as {encoding}: {paths[0]}{more}"
    if found.empty:
        yield f"{_files(found.empty)} empty, and kept as such"
    by_split = {
        split: {name for name, of in zip(found.classes, found.splits, strict=True) if of == split}
        for split in dict.fromkeys(found.splits)
    }
    for name in sorted(set(found.classes)):
        has = [split for split, names in by_split.items() if name in names]
        if len(has) < len(by_split):
            yield f"class '{name}' of {folder} is in {', '.join(has)} alone"


def _is_of_a_system(path: Path) -> bool:
    """Whether it is hidden, and no text, nor a folder that may be a class, as ".net"."""
    name = path.name
    if name[0] != "." or name.startswith(("._", ".ipynb_checkpoints")):
        return name[0] == "."
    return _SUFFIX not in (path.suffix.lower(), *(each.suffix for each in path.glob("*.*")))


def _files(count: int) -> str:
    return "1 file is" if count == 1 else f"{count:,} files are"
