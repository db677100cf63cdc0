"""The lists of a labels file as features: several classes at once, boxes, vectors."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.errors import DataError, spelt
from tfdist.records.format.text_and_ragged import objects
from tfdist.records.format.whole_numbers import notes_of_float32
from tfdist.records.writing.tables.packing import Packed
from tfdist.records.writing.tables.table import LISTS, Cells

_MOST = 1 << 63


def packed_labels(
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


def is_number(value: Any) -> bool:
    """Whether it is a number that a float can be: JSON has whole ones of any size."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


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
