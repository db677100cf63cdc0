"""The values of a labels file as features: numbers, classes, several classes at once, boxes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdist.errors import DataError
from tfdist.records.format.columns import from_arrays
from tfdist.records.format.schema import Feature
from tfdist.records.format.text_and_ragged import as_classes

_MOST = 1 << 63
_MISSING = ("", "na", "n/a", "nan", "null", "none")


@dataclass(frozen=True)
class LabelColumn:
    """A feature of role label and its values, which can be indexed by record numbers."""

    feature: Feature
    values: np.ndarray


def missing(value: Any) -> bool:
    """Whether a table's value stands for none."""
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or (isinstance(value, str) and value.strip().lower() in _MISSING)


def label_columns(
    columns: Mapping[str, Sequence[Any]],
    place: str,
    classes: Mapping[str, Collection[str]] | None = None,
) -> list[LabelColumn]:
    """Returns the labels of a table.

    Integers and booleans are class ids, int64; other numbers targets, float32; text is the number
    of its class, whose names are sorted. A list of texts is several classes at once, float32
    [classes] of 0 and 1. A list of lists of k numbers has any length, float32 [None, k], as boxes
    have; a list of numbers is a vector where all are as long, else of any length too. Where there
    are boxes, and each record has as many texts or integers as boxes, those are their classes,
    int64 [None].

    Args:
        columns: the values of the records by name: one name alone becomes "label".
        place: the file, for messages.
        classes: by name, texts that are classes whether a record has them or not.

    Raises:
        DataError: a column of values of several kinds; all such columns are named.
    """
    kinds = {name: _kind(values) for name, values in columns.items()}
    wrong = [f"'{name}' {kind[4:]}" for name, kind in kinds.items() if kind.startswith("not ")]
    if wrong:
        raise DataError(
            f"each label of {place} must be a number, a text, or a list of either, the same in all "
            "rows",
            received=f"{', '.join(wrong)}",
        )
    lengths = [_lengths(columns[name]) for name, kind in kinds.items() if kind == "boxes"]
    found = []
    for name, values in columns.items():
        feature = "label" if len(columns) == 1 else name
        kind = kinds[name]
        of_boxes = kind in ("names", "integers") and _lengths(values) in lengths
        known = (classes or {}).get(name, ())
        found.append(_column(feature, name, kind, values, of_boxes, known))
    return found


def _kind(values: Sequence[Any]) -> str:
    """Returns what all values are, or "not ..." with what they are instead."""
    if all(isinstance(value, list) for value in values):
        return _kind_of_lists(values)
    if any(isinstance(value, (list, dict)) for value in values):
        odd = {type(value).__name__ for value in values}
        return f"not holds {' and '.join(sorted(odd))}"
    return "scalars"


def _kind_of_lists(values: Sequence[list]) -> str:
    items = [item for value in values for item in value]
    if not items:
        return "not is empty in every row"
    if all(isinstance(item, str) for item in items):
        return "names"
    if all(type(item) is int and abs(item) < _MOST for item in items):
        return "integers"
    if all(_is_number(item) for item in items):
        return "numbers"
    are_lists = all(isinstance(item, list) for item in items)
    sizes = {len(item) for item in items} if are_lists else set()
    numeric = are_lists and all(_is_number(part) for item in items for part in item)
    if numeric and len(sizes) == 1 and 0 not in sizes:
        return "boxes"
    if numeric:
        return f"not holds lists of {' and '.join(map(str, sorted(sizes)))} numbers"
    return "not holds lists of several kinds, or numbers that are not finite"


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _lengths(values: Sequence[list]) -> list[int]:
    return [len(value) for value in values]


def _column(
    feature: str,
    name: str,
    kind: str,
    values: Sequence[Any],
    of_boxes: bool,
    known: Collection[str],
) -> LabelColumn:
    if kind == "scalars":
        return _scalars(feature, name, values)
    if kind == "names":
        classes = sorted({item for value in values for item in value} | set(known))
        numbers = {item: number for number, item in enumerate(classes)}
        ids = [[numbers[item] for item in value] for value in values]
        if of_boxes:
            return _ragged(feature, name, ids, np.int64, (), classes)
        hot = np.zeros((len(values), len(classes)), np.float32)
        for row, chosen in enumerate(ids):
            hot[row, chosen] = 1
        return _dense(feature, name, hot, classes)
    if kind == "boxes":
        width = next(len(item) for value in values for item in value)
        return _ragged(feature, name, values, np.float32, (width,))
    if kind == "integers" and of_boxes:
        return _ragged(feature, name, values, np.int64, ())
    if len(set(_lengths(values))) == 1:
        return _dense(feature, name, np.array(values, np.float32))
    dtype = np.int64 if kind == "integers" else np.float32
    return _ragged(feature, name, values, dtype, ())


def _scalars(feature: str, name: str, values: Sequence[Any]) -> LabelColumn:
    texts = [str(value).strip() for value in values]
    if all(isinstance(value, bool) for value in values):
        return _dense(feature, name, np.array(values, np.int64))
    # Python reads 1_000 as a number, and hardly another program does.
    for dtype, read in ((np.int64, int), (np.float64, float)) if "_" not in "".join(texts) else ():
        try:
            numbers = np.array([read(text) for text in texts], dtype)
        except (ValueError, OverflowError):
            continue
        if not np.isfinite(numbers).all():
            raise DataError(
                f"each number of label '{name}' must be finite",
                received=f"{numbers[~np.isfinite(numbers)][0]}",
            )
        return _dense(feature, name, numbers)
    classes, ids = as_classes(texts)
    return _dense(feature, name, ids, classes)


def _dense(
    feature: str, name: str, values: np.ndarray, classes: Sequence[str] | None = None
) -> LabelColumn:
    # An input there must be; what a label may be is checked for all sources alike.
    columns = from_arrays(
        "labels",
        {"": np.zeros(len(values), np.uint8)},
        {feature: values},
        classes=None if classes is None else {feature: classes},
        columns={feature: (name,)},
    )
    return LabelColumn(columns.schema.features[1], columns.columns[feature])


def _ragged(
    feature: str,
    name: str,
    values: Sequence[Sequence[Any]],
    dtype: type,
    inner: tuple[int, ...],
    classes: Sequence[str] | None = None,
) -> LabelColumn:
    arrays = np.empty(len(values), object)
    for row, value in enumerate(values):
        arrays[row] = np.array(value, dtype).reshape(-1, *inner)
    described = Feature(
        name=feature,
        dtype=np.dtype(dtype).name,
        shape=(None, *inner),
        encoding="int64" if dtype is np.int64 else "float",
        role="label",
        classes=None if classes is None else tuple(classes),
        columns=(name,),
        longest=max(_lengths(values)),
    )
    return LabelColumn(described, arrays)
