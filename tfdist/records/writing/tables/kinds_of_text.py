"""What the values of a file of text are: numbers, truth values, dates, or text indeed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfdist.errors import spelt
from tfdist.records.writing.tables.dates import dates_of
from tfdist.records.writing.tables.table import (
    BOOLEAN,
    DATE,
    EMPTY,
    ENOUGH,
    INTEGER,
    NUMBER,
    SHOWN,
    TEXT,
    Cells,
    Written,
    objects,
)

#: What stands for a value that is missing, where nobody has said that a column is text.
MISSING = frozenset(("", "na", "n/a", "nan", "null", "none"))
_TRUTH = {"true": True, "yes": True, "false": False, "no": False}
_NEARLY = 0.5
# So many values tell whether a column may be of a kind.
_LOOKED_AT = 1000
_DTYPES = {NUMBER: np.float64, BOOLEAN: bool, DATE: np.int64}
_WORDS = {NUMBER: "numbers", DATE: "dates"}
_DECIMAL_COMMA = re.compile(r"[+-]?(\d+,\d*|,\d+)(e[+-]?\d+)?", re.IGNORECASE)
_THOUSANDS = re.compile(r"[+-]?(\d{1,3}(,\d{3})+(\.\d*)?|\d{1,3}([. ']\d{3})+,\d*)")

#: What texts are, None for what is not of the kind; and notes of it.
_Read = tuple[list[Any], tuple[str, ...]]


def kind_of_texts(column: Written) -> Cells:
    """Returns the values, of the kind that at least 95 % of those have that are not missing."""
    texts = column.texts
    quick = _only_numbers(texts)
    if quick is not None:
        return quick
    stripped = [text.strip() for text in texts]
    missing = np.array([text.lower() in MISSING for text in stripped], bool)
    rows = np.flatnonzero(~missing)
    present = [stripped[row] for row in rows]
    if not present:
        return Cells(EMPTY, objects(texts), missing)
    readers: dict[str, Callable[[Sequence[str]], _Read]] = {
        NUMBER: lambda some: _numbers_of(some, column.decimal_comma),
        BOOLEAN: lambda some: ([_TRUTH.get(text.lower()) for text in some], ()),
        DATE: dates_of,
    }
    note: tuple[str, ...] = ()
    sample = present[:: max(1, len(present) // _LOOKED_AT)]
    for kind, read in readers.items():
        values, found = read(sample)
        # Else it is not worth reading all; of dates, one can tell what the others are.
        if found or values.count(None) <= len(values) * _NEARLY:
            values, found = read(present)
        share = 1 - values.count(None) / len(values)
        if share >= ENOUGH:
            return _placed(kind, values, present, rows, missing, found)
        if share >= _NEARLY and kind in _WORDS:
            odd = present[values.index(None)]
            note = (
                f"is text, though {share:.0%} of its values are {_WORDS[kind]}: "
                f"one is '{odd:.{SHOWN}}'",
            )
        elif kind == DATE and values.count(None) == len(values):
            note += found  # Why they are no dates.
    marked = [text for text in sample if _THOUSANDS.fullmatch(text)]
    numbers = sum(_number(text) is not None for text in sample)
    if not note and marked and len(marked) + numbers >= len(sample) * _NEARLY:
        note = (
            f"is text, though values such as '{marked[0]:.{SHOWN}}' are numbers with marks between "
            "thousands: take these out to have numbers",
        )
    return Cells(TEXT, objects(texts), missing, notes=note)


def _only_numbers(texts: Sequence[str]) -> Cells | None:
    """Returns a column that has nothing but numbers; None for any other: the quick way."""
    try:
        values = np.array(texts, np.float64)
    except ValueError:
        return None
    if not len(values) or np.isnan(values).any() or "_" in "".join(texts):
        return None
    return _whole_or_not(values, texts, np.zeros(len(values), bool))


def _numbers_of(present: Sequence[str], decimal_comma: bool) -> _Read:
    numbers: list[Any] = [_number(text) for text in present]
    if not decimal_comma:
        return numbers, ()
    commas = [
        _number(text.replace(",", ".")) if _DECIMAL_COMMA.fullmatch(text) else found
        for text, found in zip(present, numbers, strict=True)
    ]
    if commas.count(None) == numbers.count(None):
        return numbers, ()
    return commas, ("has decimal commas",)


def _number(text: str) -> float | None:
    """Returns the number that a text is; None for any other text."""
    try:
        found = float(text)
    except ValueError:
        return None
    # Python reads 1_000 as a number, and hardly another program does.
    return None if "_" in text or found != found else found


def _whole_or_not(values: np.ndarray, texts: Sequence[str], missing: np.ndarray) -> Cells:
    """Returns float64 ``values`` as integers where all are written as such."""
    with np.errstate(invalid="ignore"):
        is_whole = bool((values == np.floor(values)).all())
    if is_whole:
        try:
            whole = np.array([int(text) for text in texts], np.int64)
            are_codes = any(text[:1] == "0" and text[1:2].isdigit() for text in texts)
            return Cells(INTEGER, whole, missing, notes=_like_codes() if are_codes else ())
        except (ValueError, OverflowError):  # 1.0, or beyond int64.
            pass
    return Cells(NUMBER, values, missing)


def _placed(
    kind: str,
    values: Sequence[Any],
    present: Sequence[str],
    rows: np.ndarray,
    missing: np.ndarray,
    notes: tuple[str, ...],
) -> Cells:
    """Returns the values in their rows, and what is not of the kind beside them."""
    bad = {}
    placed = np.zeros(len(missing), _DTYPES[kind])
    texts = ["0"] * len(missing)
    for row, value, text in zip(rows.tolist(), values, present, strict=True):
        if value is None:
            bad[row] = f"{text:.{SHOWN}}"
        else:
            placed[row], texts[row] = value, text
    if kind == NUMBER:
        found = _whole_or_not(placed, texts, missing)
        kind, placed, notes = found.kind, found.values, (*notes, *found.notes)
    return Cells(kind, placed, missing, bad, notes)


def _like_codes() -> tuple[str, ...]:
    return (
        "has numbers that begin with 0, which is lost: if they are codes, say "
        f"{spelt('text')} or {spelt('categories')}",
    )
