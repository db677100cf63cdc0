"""What values of Python's own are, as of JSON and of DataFrames."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist.errors import DataError, spelt
from tfdist.records.writing.tables.dates import dates_of, seconds_of
from tfdist.records.writing.tables.table import (
    BOOLEAN,
    DATE,
    EMPTY,
    ENOUGH,
    INTEGER,
    LISTS,
    NUMBER,
    SHOWN,
    TEXT,
    Cells,
    objects,
)

_INT64 = np.iinfo(np.int64)
_DTYPES = {INTEGER: np.int64, NUMBER: np.float64, BOOLEAN: bool}


def kind_of_values(values: Sequence[Any], is_text: bool = False) -> Cells:
    """Returns the values, of the kind that at least 95 % of those have that are not missing.

    Text that is a date in every row is dates; text that looks like numbers stays text, as whoever
    wrote it could have written numbers.

    Args:
        is_text: whether all are wanted as text.

    Raises:
        DataError: values that are neither numbers, text, dates, nor lists.
    """
    quick = None if is_text else _only_numbers(values)
    if quick is not None:
        return quick
    missing = np.array([_is_missing(value) for value in values], bool)
    rows = np.flatnonzero(~missing)
    present = [values[row] for row in rows]
    if not present:
        return Cells(EMPTY, objects(values), missing)
    kinds = [_kind_of(value) for value in present]
    if None in kinds:
        odd = present[kinds.index(None)]
        raise DataError(
            "each value must be a number, text, a truth value, a date or a list of such",
            received=f"a {type(odd).__name__}, {odd!r:.60}",
            mend=f"Leave the column out with {spelt('drop')}",
        )
    if set(kinds) == {INTEGER, NUMBER}:
        kinds = [NUMBER] * len(kinds)
    most = max(dict.fromkeys(kinds), key=kinds.count)
    is_mixed = kinds.count(most) < ENOUGH * len(kinds)
    if is_text or (is_mixed and LISTS not in kinds):
        several = ", ".join(dict.fromkeys(map(str, kinds)))
        note = f"is text, as it has values of several kinds: {several}"
        texts = ["" if gone else str(v) for v, gone in zip(values, missing, strict=True)]
        return Cells(TEXT, objects(texts), missing, notes=() if is_text else (note,))
    bad = {
        row: f"{values[row]!s:.{SHOWN}}"
        for row, kind in zip(rows.tolist(), kinds, strict=True)
        if kind != most
    }
    good = [row for row in rows.tolist() if row not in bad]
    return _of_one_kind(str(most), [values[row] for row in good], good, missing, bad)


def _only_numbers(values: Sequence[Any]) -> Cells | None:
    """Returns a column that has nothing but Python's numbers; None for any other: the quick way."""
    types = set(map(type, values))
    if not types or not types <= {int, float}:
        return None
    try:
        numbers = np.array(values, np.int64 if types == {int} else np.float64)
    except OverflowError:
        return None
    missing = np.isnan(numbers)
    if missing.all():
        return None
    numbers[missing] = 0
    return Cells(INTEGER if types == {int} else NUMBER, numbers, missing)


def _of_one_kind(
    kind: str, values: list[Any], rows: list[int], missing: np.ndarray, bad: dict[int, str]
) -> Cells:
    notes: tuple[str, ...] = ()
    if kind == TEXT:
        dates, notes = dates_of([text.strip() for text in values])
        if None in dates:
            notes = notes if dates.count(None) == len(dates) else ()
            placed = [""] * len(missing)
            for row, text in zip(rows, values, strict=True):
                placed[row] = text
            return Cells(TEXT, objects(placed), missing, bad, notes)
        kind, found = DATE, np.array(dates, np.int64)
    elif kind == LISTS:
        lists: list[Any] = [[]] * len(missing)
        for row, value in zip(rows, values, strict=True):
            lists[row] = value
        return Cells(LISTS, objects(lists), missing, bad)
    elif kind == DATE:
        found = np.array([seconds_of(value) for value in values], np.int64)
    else:
        if kind == INTEGER and not all(_INT64.min <= v <= _INT64.max for v in values):
            kind = NUMBER
        found = np.array([_as(_DTYPES[kind], value) for value in values], _DTYPES[kind])
    whole = np.zeros(len(missing), found.dtype)
    whole[rows] = found
    return Cells(kind, whole, missing, bad, notes)


def _as(dtype: type, value: Any) -> Any:
    try:
        return dtype(value)
    except OverflowError:  # A whole number of hundreds of digits: as text it is infinite, too.
        return np.inf if value > 0 else -np.inf


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, (float, np.floating)) and value != value)


def _kind_of(value: Any) -> str | None:
    if isinstance(value, (bool, np.bool_)):
        return BOOLEAN
    if isinstance(value, (int, np.integer)):
        return INTEGER
    if isinstance(value, (float, np.floating, decimal.Decimal)):
        return NUMBER
    if isinstance(value, str):
        return TEXT
    if isinstance(value, datetime.date):
        return DATE
    return LISTS if isinstance(value, (list, tuple, np.ndarray)) else None
