"""Annotations as COCO has them: files instances_*.json, with the boxes of all images of a split.

The format is that of https://cocodataset.org/#format-data.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfdist.errors import DataError, read_json
from tfdist.records.format.splits import split_of_word
from tfdist.records.wording import listed, told_as

FILE, SPLIT, BOXES, KINDS, CROWD = "file_name", "split", "boxes", "kinds", "crowd"
FOLDER = "annotations"
# Boxes may end a little outside of their image.
MOST_RELATIVE = 1.5
_BAD_SHOWN = 20
_MOST_PIXELS = 1 << 31


def annotation_files(folder: Path) -> list[Path]:
    """Returns the files of a folder that are called as COCO calls those of boxes."""
    return sorted(path for path in folder.glob("instances_*.json") if path.is_file())


def is_coco(value: Any) -> bool:
    """Whether what a JSON file holds are annotations."""
    return isinstance(value, dict) and {"images", "annotations"} <= set(value)


@dataclass
class Annotations:
    """The images of some files of annotations.

    Attributes:
        rows: for each image its file, its split where the file's name says one, its boxes
            [[ymin, xmin, ymax, xmax]] from 0 to 1, and of each box the name of its category, and
            whether it is around a crowd (1, else 0).
        places: where each row stands, for messages.
        sizes: height and width of each image.
        kinds: the names of all categories.
        has_masks: whether there are outlines, which are not read.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    has_masks: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that say something."""
        is_divided = all(row[SPLIT] is not None for row in self.rows)
        are_crowds = any(any(row[CROWD]) for row in self.rows)
        split, crowd = (SPLIT,) if is_divided else (), (CROWD,) if are_crowds else ()
        return (FILE, *split, BOXES, KINDS, *crowd)


def read_annotations(paths: Sequence[Path]) -> Annotations:
    """Returns the annotations of files together.

    Raises:
        DataError: a file that is none, or entries that are not whole; all of those are named.
    """
    found, wrong = Annotations(), []
    for path in paths:
        mend = "Get the file again, or mend what it says"
        with told_as(f"{path} must be a JSON file", mend, OSError, ValueError):
            value = read_json(path.read_text(encoding="utf-8-sig"), keys_once=True)
        if not is_coco(value):
            raise DataError(
                f"{path} must hold COCO's images, annotations and categories",
                received="others",
                mend="Name a file such as instances_train2017.json",
            )
        _add(found, path, value, wrong)
    if wrong:
        raise DataError(
            f"every annotation of {paths[0].parent} must be of one of its images and categories, "
            "each with an id of its own and each category with a name of its own, and have a box "
            "in its image, and iscrowd 0 or 1 if at all",
            received=f"{len(wrong):,} that are not: {listed(wrong, _BAD_SHOWN)}",
            mend="Mend or remove these entries",
        )
    return found


def _add(found: Annotations, path: Path, value: Mapping[str, Any], wrong: list[str]) -> None:
    kinds: dict[Any, str] = {}
    for number, category in enumerate(_list(value, "categories")):
        if _is_new(category, kinds) and isinstance(category.get("name"), str):
            kinds[category["id"]] = category["name"]
        else:
            wrong.append(f"{path.name}: category {number}")
    found.kinds.update(kinds.values())
    split = split_of(path)
    rows: dict[Any, tuple[dict[str, Any], tuple[int, int]]] = {}
    for number, image in enumerate(_list(value, "images")):
        size = _size(image) if _is_new(image, rows) else None
        if size is None:
            wrong.append(f"{path.name}: image {number}")
            continue
        row = {FILE: image[FILE], SPLIT: split, BOXES: [], KINDS: [], CROWD: []}
        rows[image["id"]] = row, size
        found.rows.append(row)
        found.places.append(f"{path.name}, image {image['id']}")
        found.sizes.append(size)
    known: set[int | str | None] = set()
    # Of categories of one name, one may stand for a group of them, which no box has.
    used: dict[str, Any] = {}
    for number, annotation in enumerate(_list(value, "annotations")):
        box = annotation.get("bbox") if isinstance(annotation, dict) else None
        if (
            not _is_box(box)
            or _id(annotation, "image_id") not in rows
            or _id(annotation, "category_id") not in kinds
            or annotation.get("iscrowd") not in (None, 0, 1)
            or _id(annotation) in known
            or used.setdefault(kinds[annotation["category_id"]], annotation["category_id"])
            != annotation["category_id"]
        ):
            wrong.append(f"{path.name}: annotation {number}")
            continue
        known.update({_id(annotation)} - {None})
        row, (height, width) = rows[annotation["image_id"]]
        left, top, wide, high = map(float, box)
        relative = [top / height, left / width, (top + high) / height, (left + wide) / width]
        if max(map(abs, relative)) > MOST_RELATIVE:
            wrong.append(f"{path.name}: annotation {number}")
            continue
        row[BOXES].append(relative)
        row[KINDS].append(kinds[annotation["category_id"]])
        row[CROWD].append(int(bool(annotation.get("iscrowd"))))
        found.has_masks |= bool(annotation.get("segmentation"))


def _list(value: Mapping[str, Any], name: str) -> list[Any]:
    items = value.get(name)
    return items if isinstance(items, list) else []


def _id(item: Mapping[str, Any], name: str = "id") -> int | str | None:
    found = item.get(name)
    return found if type(found) in (int, str) else None


def _is_new(item: Any, known: Mapping[Any, Any]) -> bool:
    """Whether it is an object with an id that no other has."""
    return isinstance(item, dict) and _id(item) is not None and _id(item) not in known


def split_of(path: Path) -> str | None:
    """Returns the split of instances_train2017.json; None where the name says none."""
    word = re.sub(r"\d+$", "", path.stem.partition("_")[2])
    return split_of_word(word)


def _size(image: Any) -> tuple[int, int] | None:
    if not isinstance(image, dict) or not isinstance(image.get(FILE), str):
        return None
    size = image.get("height"), image.get("width")
    return size if all(type(each) is int and 0 < each < _MOST_PIXELS for each in size) else None


def _is_box(box: Any) -> bool:
    if not isinstance(box, list) or len(box) != 4:
        return False
    return all(map(is_number, box)) and min(box[2:]) >= 0


def is_number(value: Any) -> bool:
    """Whether it is a number that a float can be: JSON has whole ones of any size."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max
