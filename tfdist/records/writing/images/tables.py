"""The labels of images from a table beside them, see ``labels``; also of lists, such as boxes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.errors import DataError, spelt
from tfdist.records.format.columns import Column, from_arrays
from tfdist.records.format.schema import Feature
from tfdist.records.format.splits import SPLITS
from tfdist.records.format.text_and_ragged import objects
from tfdist.records.format.whole_numbers import notes_of_float32
from tfdist.records.wording import placed
from tfdist.records.writing.images.coco import is_number
from tfdist.records.writing.images.files import Header
from tfdist.records.writing.images.labels import match, read_label_rows
from tfdist.records.writing.images.options import ImageOptions
from tfdist.records.writing.images.search import FoundImage, split_name
from tfdist.records.writing.roles import Asked, Roles, assign, mentioned, named
from tfdist.records.writing.tables.packing import Packed
from tfdist.records.writing.tables.records import (
    cells_of,
    index_columns,
    notes_of,
    taken,
    words_of,
)
from tfdist.records.writing.tables.table import LISTS, WORDS, Cells

_SPLIT = "split"
_MOST = 1 << 63


class ImageTable:
    """A labels file, and the row of each image.

    Attributes:
        path: of the file, or of the folder with COCO's.
        files: those that it was read from.
        astray: the rows without an image.
        bad: the rows that are not whole.

    Raises:
        DataError: a file that is no such table, or a column that it does not have.
    """

    def __init__(self, path: str | Path, folder: Path, images: Sequence[FoundImage], asked: Asked):
        if asked.inputs is not None:
            raise DataError(
                "the images must be the only inputs",
                received="inputs beside labels",
                mend=f"Leave {spelt('inputs')} out; {spelt('drop', 'NAME')} leaves out columns",
            )
        self._found = read_label_rows(path, folder)
        self.path, self.files, table = self._found.path, self._found.files, self._found.table
        names = [image.name for image in images]
        self._column, self._rows, self.astray = match(self._found, names)
        self.bad = [
            f"{table.unit} {bad.line}: {bad.what}, where every row must {bad.must}"
            for bad in table.bad
        ]
        is_divided = any(image.split is not None for image in images)
        self._split = None if is_divided else self._split_column(asked)
        index = [
            name
            for name in index_columns(table, asked, last_is_label=len(table.names) == 2)
            if name != self._column
        ]
        self._details = dict.fromkeys(index, "it numbers the rows")
        self._roles = self._assigned(asked)
        self._cells = cells_of(table, self._roles, words_of(table, asked))
        self._notes: list[str] = []

    def faults(self, headers: Sequence[Header | str]) -> Iterator[tuple[int, str]]:
        """Yields images, by their numbers, that have no whole row, or one of another size."""
        for image, row in enumerate(self._rows):
            if row is None:
                yield image, f"has no row in {self.path.name}"
                continue
            place = self._found.places[row]
            gaps = [name for name, cells in self._cells.items() if cells.missing[row]]
            odd = [
                f"'{cells.bad[row]}' in column '{name}' of {WORDS.get(cells.kind, cells.kind)}"
                for name, cells in self._cells.items()
                if row in cells.bad
            ]
            if gaps:
                yield image, f"{place} has no {', '.join(gaps)}"
            elif odd:
                yield image, f"{place} has {', '.join(odd)}"
            elif self._found.sizes is not None and isinstance(headers[image], Header):
                size, (height, width) = headers[image], self._found.sizes[row]
                if (size.height, size.width) != (height, width):
                    yield (
                        image,
                        f"{size.width}x{size.height} pixels where {place} has {width}x{height}",
                    )

    def labels(self, kept: Sequence[int]) -> dict[str, tuple[Feature, Column]]:
        """Returns the labels of some images by name, and their weights."""
        rows, roles = np.array([self._rows[image] for image in kept]), self._roles
        cells = {name: taken(column, rows) for name, column in self._cells.items()}
        packed = _packed(
            {name: cells[name] for name in roles.labels}, str(self.path), self._found.classes
        )
        # An input there must be; what a label may be is checked for all sources alike.
        try:
            columns = from_arrays(
                "labels",
                {"": np.zeros(len(rows), np.uint8)},
                packed.labels,
                {} if roles.weight is None else {roles.weight: cells[roles.weight].values},
                classes=packed.classes,
                columns=packed.columns,
            )
        except DataError as error:
            raise placed(error, lambda n: self._found.places[rows[n]], f"{self.path}: ") from None
        self._notes = [*columns.notes, *packed.notes, *notes_of(cells)]
        return {f.name: (f, columns.columns[f.name]) for f in columns.schema.features[1:]}

    def owners(self, kept: Sequence[int]) -> np.ndarray | None:
        return None if self._roles.client is None else objects(self._of(self._roles.client, kept))

    def splits(self, kept: Sequence[int]) -> list[str] | None:
        """Returns the split of each image where a column names it."""
        return None if self._split is None else list(map(split_name, self._of(self._split, kept)))

    def roles(self) -> tuple[tuple[str, str], ...]:
        """Returns (name, what it has become) of each column."""
        known = {self._column: "name of the file", self._split: _SPLIT}
        listed = self._roles.listed(self._found.table.names, self._details)
        return tuple((name, known.get(name, role)) for name, role in listed)

    def _of(self, name: str, images: Sequence[int]) -> list[str]:
        texts = self._found.texts(name)
        return [texts[self._rows[image]] for image in images]

    def _split_column(self, asked: Asked) -> str | None:
        """Returns the column called "split", unless it is a label, the client or left out."""
        table = self._found.table
        called = [name for name in table.names if name.lower() == _SPLIT]
        if not called or called[0] in mentioned(table.place, "column", table.names, asked):
            return None
        words = self._found.texts(called[0])
        others = [row for row, word in enumerate(words) if split_name(word) not in SPLITS]
        if 0 < len(others) < len(words):
            raise DataError(
                f"each row of {self.path} must name one of {', '.join(SPLITS)} in column "
                f"'{called[0]}', or none",
                received=f"'{words[others[0]]}' in {self._found.places[others[0]]}",
                mend=f"Mend it, or say that the column is a label: {spelt('label')}",
            )
        return None if others else called[0]

    def _assigned(self, asked: Asked) -> Roles:
        place, names = self._found.table.place, self._found.table.names
        drop = named(place, "column", spelt("drop"), asked.drop, names) or ()
        aside = dict.fromkeys([*drop, self._column, *filter(None, [self._split]), *self._details])
        roles = assign(place, "column", names, replace(asked, drop=list(aside)), are_labels=True)
        if not roles.labels:
            raise DataError(
                f"{self.path} must have a label beside the column '{self._column}'",
                received=f"columns {', '.join(names)}",
                mend="Add a column of labels, or leave fewer out",
            )
        return roles

    def notes(
        self, found: Mapping[str, tuple[Feature, Column]], options: ImageOptions
    ) -> Iterator[str]:
        yield from (*self._found.table.notes, *self._notes)
        boxes = [
            feature.name
            for feature, _ in found.values()
            if feature.role == "label"
            and feature.is_ragged
            and len(feature.shape) == 2
            and not feature.is_boxes  # Those are looked at.
        ]
        if boxes and options.is_resized:
            yield f"a resize leaves the numbers of {', '.join(boxes)} as they are"


def _packed(
    columns: Mapping[str, Cells], place: str, classes: Mapping[str, Collection[str]]
) -> Packed:
    """Returns the labels of a table, of which each record has a value.

    What is no list is packed as of any table. A list of texts is several classes at once, float32
    [classes] of 0 and 1. A list of lists of k numbers has any length, float32 [None, k], as boxes
    have; a list of numbers is a vector where all are as long, else of any length too. Where there
    are boxes, and each record has as many texts or integers as boxes, those are their classes,
    int64 [None].

    Args:
        columns: the values of the records by name: one name alone becomes "label".
        place: the file, for messages.
        classes: by name, texts that are classes whether a record has them or not.

    Raises:
        DataError: lists that are of several kinds; all such columns are named.
    """
    lists = {name: cells.values.tolist() for name, cells in columns.items() if cells.kind == LISTS}
    kinds = {name: _kind_of(values) for name, values in lists.items()}
    wrong = [f"'{name}' {kind[4:]}" for name, kind in kinds.items() if kind.startswith("not ")]
    if wrong:
        raise DataError(
            f"each label of {place} must be a number, a text, or a list of either, the same in all "
            "rows",
            received=f"{', '.join(wrong)}",
            mend=f"Mend them, or leave columns out with {spelt('drop', 'NAME')}",
        )
    lengths = [_lengths(lists[name]) for name, kind in kinds.items() if kind == "boxes"]
    packed = Packed(place)
    for name, cells in columns.items():
        feature = "label" if len(columns) == 1 else name
        if name not in lists:
            packed.add_label(name, feature, cells)
            continue
        values, kind = lists[name], kinds[name]
        may_be_of_boxes = kind in ("names", "integers")
        of_boxes = may_be_of_boxes and _lengths(values) in lengths
        if may_be_of_boxes and not of_boxes:
            packed.notes += _nearly_of_boxes(name, _lengths(values), lengths)
        packed.columns[feature] = (name,)
        if kind == "names":
            found = sorted({item for value in values for item in value} | {*classes.get(name, ())})
            packed.classes[feature] = found
            numbers = {item: number for number, item in enumerate(found)}
            values = [[numbers[item] for item in value] for value in values]
            packed.labels[feature] = _ragged(values) if of_boxes else _hot(values, len(found))
        else:
            packed.labels[feature] = _numbers(values, kind, of_boxes)
            if kind != "integers" or packed.labels[feature].dtype == np.float32:
                packed.notes += notes_of_float32([(name, _flat(values))])
    return packed


def _kind_of(values: Sequence[Sequence[Any]]) -> str:
    """Returns what all lists hold, or "not ..." with what they are instead."""
    items = [item for value in values for item in value]
    if not items:
        return "not is empty in every row"
    if all(isinstance(item, str) for item in items):
        return "names"
    if all(type(item) is int and abs(item) < _MOST for item in items):
        return "integers"
    if all(is_number(item) for item in items):
        return "numbers"
    are_lists = all(isinstance(item, list) for item in items)
    sizes = {len(item) for item in items} if are_lists else set()
    numeric = are_lists and all(is_number(part) for item in items for part in item)
    if numeric and len(sizes) == 1 and 0 not in sizes:
        return "boxes"
    if numeric:
        return f"not holds lists of {' and '.join(map(str, sorted(sizes)))} numbers"
    return "not holds lists of several kinds, or numbers that are not finite"


def _flat(values: Sequence[Sequence[Any]]) -> np.ndarray:
    items = (item if isinstance(item, list) else (item,) for value in values for item in value)
    return np.array([part for item in items for part in item], np.float64)


def _nearly_of_boxes(
    name: str, sizes: Sequence[int], of_boxes: Sequence[Sequence[int]]
) -> list[str]:
    for boxes in of_boxes:
        alike = sum(a == b > 0 for a, b in zip(sizes, boxes, strict=True))
        with_boxes = sum(b > 0 for b in boxes)
        if alike * 2 > with_boxes:
            return [
                f"'{name}' has a value for each box in {alike:,} of {with_boxes:,} rows with boxes"
                ", and not in the others: so it is of the image as a whole"
            ]
    return []


def _lengths(values: Sequence[Sequence[Any]]) -> list[int]:
    return [len(value) for value in values]


def _hot(values: Sequence[Sequence[int]], num_classes: int) -> np.ndarray:
    hot = np.zeros((len(values), num_classes), np.float32)
    for row, chosen in enumerate(values):
        hot[row, chosen] = 1
    return hot


def _numbers(values: Sequence[Sequence[Any]], kind: str, of_boxes: bool) -> np.ndarray:
    if kind == "boxes":
        width = next(len(item) for value in values for item in value)
        return _ragged(values, np.float32, (width,))
    if not of_boxes and len(set(_lengths(values))) == 1:
        return np.array(values, np.float32)
    return _ragged(values, np.int64 if kind == "integers" else np.float32)


def _ragged(
    values: Sequence[Sequence[Any]], dtype: type = np.int64, inner: tuple[int, ...] = ()
) -> np.ndarray:
    return objects([np.array(value, dtype).reshape(-1, *inner) for value in values])
