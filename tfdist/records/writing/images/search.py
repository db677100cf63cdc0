"""Which files of a folder are images, and what their folders say: class and split."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tfdist.errors import DataError, spelt
from tfdist.records.format.exif import IMAGE_BEGINNINGS
from tfdist.records.format.files import open_regular, walk
from tfdist.records.format.splits import SPLITS, split_of_word
from tfdist.records.wording import listed

SUFFIXES = frozenset(
    f".{name}"
    for names in ("jpg jpeg jpe jfif png bmp dib gif", "tif tiff webp ppm pgm pbm pnm tga")
    for name in names.split()
)

_HIDDEN = (".", "__MACOSX")


def _mend() -> str:
    return (
        "Give a folder that holds a folder for each class; or say what the images are, with "
        f"{spelt('labels', 'FILE')} (a table, such as .csv, with a row for each) or "
        f"{spelt('masks', 'FOLDER')}"
    )


@dataclass(frozen=True)
class FoundImage:
    """A file that is an image, by its name or its first bytes.

    Attributes:
        name: its path below the folder, with slashes.
        class_name: the name of its class folder; None where there is none.
        split: one of ``SPLITS``; None where the folder is not divided.
    """

    path: Path
    name: str
    class_name: str | None
    split: str | None


@dataclass
class Listing:
    """What a folder holds.

    Attributes:
        images: in the order of splits, classes and names.
        foreign: the names of files and folders that are no images.
        empty: the names of class folders without an image.
    """

    images: list[FoundImage] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)


def split_name(text: str) -> str | None:
    """Returns which of ``SPLITS`` a folder's name, or a word in a table, stands for."""
    return split_of_word(text.strip())


def find_images(folder: Path, *, loose: bool = False, without: str | Path | None = None) -> Listing:
    """Returns the images of FOLDER/CLASS/ or FOLDER/SPLIT/CLASS/.

    Args:
        loose: whether they may lie in FOLDER or FOLDER/SPLIT too, without classes.
        without: a folder whose images are none of them, as that of masks; None: there is none.

    Raises:
        DataError: none, or some that lie elsewhere.
    """
    listing = Listing()
    left_out = None if without is None else Path(without).resolve()
    scan = _scan(folder, folder, listing, left_out)
    splits = _split_folders(folder, *scan, listing)
    if splits is None:
        _add(folder, *scan, None, listing, loose, left_out)
    else:
        for split, path in splits.items():
            scan = _scan(folder, path, listing, left_out)
            _add(folder, *scan, split, listing, loose, left_out)
    if not listing.images and not loose and _are_texts(folder, listing):
        raise DataError(
            "texts must lie in class folders, FOLDER/CLASS/TEXT.txt or FOLDER/SPLIT/CLASS/TEXT.txt",
            received=f"{listed(listing.foreign, 5)} in {folder}, in no class folder",
            mend="Put them into a folder for each class, or write a .jsonl file with an object "
            '{"text": ..., "label": ...} in each line',
        )
    if not listing.images:
        others = listed([*listing.empty, *listing.foreign], 5)
        beside = f" beside {others}" if others else ""
        raise DataError(
            "every class folder must have an image"
            if listing.empty
            else "a folder of images must hold some",
            received=f"none in {folder}{beside}" if others else f"nothing in {folder}",
            mend=_mend(),
        )
    return listing


def all_images(place: Path) -> list[FoundImage]:
    """Returns an image, or those anywhere in a folder by their names, whatever they are of."""
    root, paths = (place.parent, [place]) if place.is_file() else (place, _files_in(place))
    return [FoundImage(p, _name(root, p), None, None) for p in paths if _is_image(p)]


def _files_in(folder: Path) -> list[Path]:
    found = (Path(at) / name for at, _, names in walk(folder) for name in names)
    parts = ((path, path.relative_to(folder).parts) for path in found)
    return sorted(path for path, own in parts if not any(n.startswith(_HIDDEN) for n in own))


def _are_texts(folder: Path, listing: Listing) -> bool:
    """Whether most of what lies in a folder itself is called .txt."""
    texts = [name for name in listing.foreign if name.lower().endswith(".txt")]
    return len(texts) * 2 > len(listing.foreign)


def _scan(
    root: Path, path: Path, listing: Listing, without: Path | None
) -> tuple[list[Path], list[Path]]:
    """Returns the folders and the images of one folder, sorted by name."""
    folders, images = [], []
    for entry in sorted(path.iterdir()):
        is_hidden = entry.name.startswith(_HIDDEN)
        if entry.is_dir() and not is_hidden:
            if entry.resolve() != without:
                folders.append(entry)
        elif not is_hidden and _is_image(entry):
            images.append(entry)
        else:
            listing.foreign.append(_name(root, entry))
    return folders, images


def _name(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()


def _is_image(path: Path) -> bool:
    if path.suffix.lower() in SUFFIXES:
        return True
    try:
        with open_regular(path) as file:
            return file.read(8).startswith(IMAGE_BEGINNINGS)
    except OSError:
        return False


def _split_folders(
    root: Path, folders: Sequence[Path], images: Sequence[Path], listing: Listing
) -> dict[str, Path] | None:
    """Returns the folder of each split; None when the folders are not called so."""
    named = [(split_name(path.name), path) for path in folders]
    known = [split for split, _ in named if split is not None]
    others = [path for split, path in named if split is None]
    # One class may well be called "train", beside others.
    if "train" not in known or (others and len(known) < 2):
        return None
    if len(set(known)) != len(known):
        raise DataError(
            "each split must have one folder",
            received=", ".join(path.name for _, path in named),
            mend="Put those of one split together",
        )
    misplaced = [*images, *(path for path in others if _holds_images(path))]
    if misplaced:
        raise DataError(
            f"a folder with splits ({', '.join(sorted(known))}) must hold no other images",
            received=listed((str(path) for path in misplaced), 5),
            mend="Move them away, or into a split",
        )
    listing.foreign.extend(_name(root, path) for path in others)
    found = {split: path for split, path in named if split is not None}
    return {split: found[split] for split in SPLITS if split in found}


def _holds_images(folder: Path) -> bool:
    return any(
        Path(name).suffix.lower() in SUFFIXES
        for _, _, files in os.walk(folder)
        for name in files
        if not name.startswith(".")
    )


def _add(
    root: Path,
    folders: Sequence[Path],
    images: Sequence[Path],
    split: str | None,
    listing: Listing,
    loose: bool,
    without: Path | None,
) -> None:
    """Adds the images of a folder of classes, or of images alone."""
    if images and loose and not any(map(_holds_images, folders)):
        listing.foreign.extend(_name(root, path) for path in folders)
        listing.images.extend(FoundImage(path, _name(root, path), None, split) for path in images)
        return
    if images:
        raise _misplaced(f"the file {images[0]}, in no class folder")
    for folder in folders:
        deeper, inner = _scan(root, folder, listing, without)
        for path in deeper:
            if _holds_images(path):
                raise _misplaced(f"the folder {path}, with images")
            listing.foreign.append(_name(root, path))
        if not inner:
            listing.empty.append(_name(root, folder))
        listing.images.extend(
            FoundImage(path, _name(root, path), folder.name, split) for path in inner
        )


def _misplaced(received: str) -> DataError:
    return DataError(
        "images must lie in class folders, FOLDER/CLASS/IMAGE or FOLDER/SPLIT/CLASS/IMAGE",
        received=received,
        mend=_mend(),
    )
