"""Of which kind the values of a column are: numbers, truth values, dates, text or lists."""

from __future__ import annotations

import datetime
import decimal
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tfdist.errors import DataError, spelt
from tfdist.records.format.text_and_ragged import objects
from tfdist.records.writing.tables.arrow_texts import ArrowTexts, parts_of
from tfdist.records.writing.tables.dates import (
    CUT_OFF,
    dates_in_order,
    dates_of,
    order_of,
    seconds_of,
)
from tfdist.records.writing.tables.table import (
    BOOLEAN,
    DATE,
    EMPTY,
    INTEGER,
    LISTS,
    NUMBER,
    TEXT,
    WORDS,
    Cells,
    Texts,
    Values,
    Written,
)

#: What stands for a value that is missing, where nobody has said that a column is text.
MISSING_WORDS = frozenset(("", "na", "n/a", "nan", "null", "none"))
_TRUTH = {"true": True, "yes": True, "false": False, "no": False}
# Of a column of one kind, at least this share of the values is of it: the others are mistakes.
_ENOUGH = 0.95
_NEARLY = 0.5
# So many values tell whether a column of text may be of a kind.
_LOOKED_AT = 1000
# Letters of a bad value that are shown.
_SHOWN = 30
_INT64 = np.iinfo(np.int64)
# What stands in the rows that have no value of the kind; text and lists are objects.
_NOTHING = {
    INTEGER: np.int64(0),
    NUMBER: np.float64(0),
    BOOLEAN: np.bool_(False),
    DATE: np.int64(0),
    TEXT: "",
    LISTS: [],
}
_CODE = re.compile(r"\s*[+-]?0[0-9]")
_DECIMAL_COMMA = re.compile(r"[+-]?(\d+,\d*|,\d+)(e[+-]?\d+)?", re.IGNORECASE)
_POINTS = re.compile(r"[+-]?[1-9]\d{0,2}(\.\d{3})+")
_THOUSANDS = re.compile(r"[+-]?(\d{1,3}(,\d{3})+(\.\d*)?|\d{1,3}([. ']\d{3})+,\d*)")

#: Notes of a column of numbers; the second begins so.
DECIMAL_COMMAS = "has decimal commas"
POINTS = "has points before three digits alone, so that "

#: What texts are, None for what is not of the kind; and notes of it.
_Read = tuple[list[Any], tuple[str, ...]]


def _like_codes() -> tuple[str, ...]:
    return (
        "has numbers that begin with 0, which is lost: if they are codes, say "
        f"{spelt('text')} or {spelt('categories')}",
    )


def infer(column: Cells | Written | Values | Texts, *, is_text: bool = False) -> Cells:
    """Returns the values of a column, of the kind that at least 95 % of them have.

    What is missing counts for no kind. Of Python's own values, text that is a date in every row is
    dates; text that looks like numbers stays text, as whoever wrote it could have written numbers.

    Args:
        is_text: whether they are text whatever they look like; only nothing at all is then
            missing.

    Raises:
        DataError: values that are neither numbers, text, dates, nor lists.
    """
    if isinstance(column, Written):
        if not is_text:
            return _with_points_told(column, _of_texts(column))
        texts = _held(column.texts)
        missing = np.fromiter((not text.strip() for text in texts), bool, len(texts))
        return Cells(TEXT, texts, missing)
    if isinstance(column, Texts):
        return _of_large_texts(column, is_text)
    cells = _of_values(column.values, is_text) if isinstance(column, Values) else column
    if is_text and cells.texts is not None:
        return Cells(TEXT, cells.texts.blanked(cells.missing), cells.missing)
    if is_text and cells.kind != TEXT:
        return _as_text(cells.values.tolist(), cells.missing)
    return cells


def _with_points_told(column: Written, cells: Cells) -> Cells:
    """Adds a note where points may mark thousands, which only decimal commas leave them to do."""
    if not column.decimal_comma or cells.kind != NUMBER or DECIMAL_COMMAS in cells.notes:
        return cells
    first = None
    for row, text in enumerate(map(str.strip, column.texts)):
        if "." in text and row not in cells.bad:
            if not _POINTS.fullmatch(text):
                return cells
            first = first or text
    if first is None:
        return cells
    note = f"{POINTS}'{first}' is read as {_number(first):g}: take out what marks thousands"
    return replace(cells, notes=(*cells.notes, note))


def beside_decimal_commas(
    cells: Mapping[str, Cells], columns: Mapping[str, Any]
) -> dict[str, Cells]:
    """Returns columns whose points may mark thousands as text, where others have decimal commas."""
    if not any(DECIMAL_COMMAS in found.notes for found in cells.values()):
        return dict(cells)
    note = "is text: beside decimal commas nobody can tell whether 1.000 is one or a thousand"
    return {
        name: replace(infer(columns[name], is_text=True), missing=found.missing, notes=(note,))
        if any(told.startswith(POINTS) for told in found.notes)
        else found
        for name, found in cells.items()
    }


def _as_text(values: Iterable[Any], missing: np.ndarray, *notes: str) -> Cells:
    texts = ["" if gone else str(value) for value, gone in zip(values, missing, strict=True)]
    return Cells(TEXT, objects(texts), missing, notes=notes)


# Text ------------------------------------------------------------------------------------------


def _held(texts: Sequence[str]) -> np.ndarray | ArrowTexts:
    """Returns texts as objects, those in a file as they are."""
    in_file = isinstance(texts, ArrowTexts) and texts.in_file
    return texts if in_file else objects(list(texts))


class _Present:
    """The texts of a column that are not missing, without space around them, some at a time.

    Args:
        missing: bool [texts]; None: those that are words for nothing.
    """

    def __init__(self, texts: np.ndarray | ArrowTexts, missing: np.ndarray | None = None):
        if missing is None:
            words = (text.strip().lower() in MISSING_WORDS for text in texts)
            missing = np.fromiter(words, bool, len(texts))
        self._texts, self.missing = texts, missing

    def __len__(self) -> int:
        return len(self.missing) - int(self.missing.sum())

    def rows(self) -> np.ndarray:
        """Returns which they are, int64 [n]."""
        return np.flatnonzero(~self.missing)

    def __iter__(self) -> Iterator[list[str]]:
        start = 0
        for part in parts_of(self._texts):
            gone = self.missing[start : start + len(part)].tolist()
            some = [text.strip() for text, is_gone in zip(part, gone, strict=True) if not is_gone]
            start += len(part)
            if some:
                yield some

    def placed(self, values: np.ndarray) -> np.ndarray:
        """Returns values of these texts in their rows, 0 in others."""
        if len(values) == len(self.missing):
            return values
        placed = np.zeros(len(self.missing), values.dtype)
        placed[~self.missing] = values
        return placed

    def at(self, rows: np.ndarray) -> list[str]:
        """Returns the texts of some rows, int64 [n] in their order."""
        return [text.strip() for text in self._texts[rows]]

    def sample(self) -> list[str]:
        return self.at(self.rows()[:: max(1, len(self) // _LOOKED_AT)])


def _of_texts(column: Written) -> Cells:
    texts = column.texts
    quick = _arrow_numbers(texts) if isinstance(texts, ArrowTexts) else _only_numbers_of(texts)
    if quick is not None:
        return quick
    texts = _held(texts)
    present = _Present(texts)
    missing, count = present.missing, len(present)
    if not count:
        return Cells(EMPTY, texts, missing)
    sample = present.sample()
    note: tuple[str, ...] = ()
    for kind in (NUMBER, BOOLEAN, DATE):
        values, is_good, found = _read(kind, [sample], len(sample), column.decimal_comma)
        # Else it is not worth reading all; of dates, one can tell what the others are.
        if found or np.count_nonzero(~is_good) <= len(is_good) * _NEARLY:
            values, is_good, found = _read(kind, present, count, column.decimal_comma)
        share = 1 - np.count_nonzero(~is_good) / len(is_good)
        if share >= _ENOUGH:
            wrong = present.rows()[~is_good] if share < 1 else np.empty(0, np.int64)
            bad = zip(wrong.tolist(), present.at(wrong), strict=True)
            if kind == NUMBER:
                kind, good, more = _whole_or_not(
                    values[is_good], partial(_good_of, present, is_good)
                )
                values = np.zeros(count, good.dtype)
                values[is_good] = good
                found += more
            told = {row: f"{text:.{_SHOWN}}" for row, text in bad}
            return Cells(kind, present.placed(values), missing, told, found)
        if share >= _NEARLY and kind in (NUMBER, DATE):
            odd = present.at(present.rows()[np.flatnonzero(~is_good)[:1]])[0]
            note = (
                f"is text, though {share:.0%} of its values are {WORDS[kind]}: "
                f"one is '{odd:.{_SHOWN}}'",
            )
        elif kind == DATE and not share:
            note += found[:1]  # Why they are no dates.
    numbers = sum(_number(text) is not None for text in sample)
    for written, marks in (
        (_THOUSANDS, "marks between thousands: take these out"),
        (_DECIMAL_COMMA, "decimal commas: write points"),
    ):
        marked = [text for text in sample if written.fullmatch(text)]
        if not note and marked and len(marked) + numbers >= len(sample) * _NEARLY:
            note = (
                f"is text, though values such as '{marked[0]:.{_SHOWN}}' are numbers with {marks} "
                "to have numbers",
            )
    return Cells(TEXT, texts, missing, notes=note)


def _good_of(parts: Iterable[list[str]], is_good: np.ndarray) -> Iterator[list[str]]:
    """Yields the texts for which ``is_good``, bool [texts], is True, in their parts."""
    start = 0
    for part in parts:
        chosen = is_good[start : start + len(part)].tolist()
        yield list(itertools.compress(part, chosen))
        start += len(part)


def _read(
    kind: str, parts: Iterable[list[str]], count: int, decimal_comma: bool
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Returns what texts are as values of a kind, and which are such, bool [count]; and notes.

    Args:
        parts: the texts some at a time, which are read more than once.
        count: how many they are.
    """
    read: Callable[[list[str]], _Read]
    if kind == NUMBER:
        has_commas = decimal_comma and any(
            any(map(_DECIMAL_COMMA.fullmatch, part)) for part in parts
        )
        read = partial(_numbers_of, has_commas=has_commas)
    elif kind == BOOLEAN:
        read = _truth_of
    else:
        read = partial(dates_in_order, order=order_of(parts))
    nothing = _NOTHING[kind]
    values, is_good = np.zeros(count, nothing.dtype), np.zeros(count, bool)
    notes: dict[str, None] = {}
    start = 0
    for part in parts:
        found, told = read(part)
        rows = slice(start, start + len(part))
        values[rows] = [nothing if value is None else value for value in found]
        is_good[rows] = [value is not None for value in found]
        notes |= dict.fromkeys(told)
        start = rows.stop
    return values, is_good, tuple(notes)


def _arrow_numbers(texts: ArrowTexts) -> Cells | None:
    found = texts.numbers(MISSING_WORDS)
    if found is None:
        return None
    values, missing, has_code = found
    kind = INTEGER if values.dtype == np.int64 else NUMBER
    return Cells(kind, values, missing, notes=_like_codes() if has_code else ())


def _only_numbers_of(texts: Sequence[str]) -> Cells | None:
    """Returns a column that has nothing but numbers; None for any other: the quick way."""
    try:
        values = np.array(texts, np.float64)
    except ValueError:
        return None
    if not len(values) or np.isnan(values).any() or "_" in "".join(texts):
        return None
    kind, values, notes = _whole_or_not(values, lambda: [texts])
    return Cells(kind, values, np.zeros(len(values), bool), notes=notes)


def _numbers_of(texts: Sequence[str], has_commas: bool) -> _Read:
    if not has_commas:
        return [_number(text) for text in texts], ()
    # Beside 1,5 nobody can tell whether 1.000 is one or a thousand.
    numbers = [
        None if _POINTS.fullmatch(text) else _number(text.replace(",", ".")) for text in texts
    ]
    return numbers, (DECIMAL_COMMAS,)


def _truth_of(texts: Sequence[str]) -> _Read:
    return [_TRUTH.get(text.lower()) for text in texts], ()


def _number(text: str) -> float | None:
    """Returns the number that a text is; None for any other text."""
    try:
        found = float(text)
    except ValueError:
        return None
    # Python reads 1_000 as a number, and hardly another program does.
    return None if "_" in text or found != found else found


def _whole_or_not(
    values: np.ndarray, parts: Callable[[], Iterable[Sequence[str]]]
) -> tuple[str, np.ndarray, tuple[str, ...]]:
    """Returns float64 ``values`` as integers where all are written as such; kind and notes too.

    Args:
        parts: returns their texts, some at a time.
    """
    with np.errstate(invalid="ignore"):
        is_whole = bool((values == np.floor(values)).all())
    notes = _like_codes() if any(any(map(_CODE.match, texts)) for texts in parts()) else ()
    if is_whole:
        try:
            whole = [np.array([int(text) for text in texts], np.int64) for texts in parts()]
            return INTEGER, np.concatenate(whole), notes
        except (ValueError, OverflowError):  # 1.0, or beyond int64.
            pass
    return NUMBER, values, notes


def _of_large_texts(column: Texts, is_text: bool) -> Cells:
    """Returns what ``_of_values`` does of text alone."""
    present = _Present(column.texts, column.missing)
    if is_text or not len(present):
        return Cells(TEXT if is_text else EMPTY, column.texts, column.missing)
    order = order_of(present)
    some, notes = dates_in_order(present.sample(), order)
    if None not in some:
        dates, is_date, notes = _read(DATE, present, len(present), False)
        if is_date.all():
            return Cells(DATE, present.placed(dates), column.missing, notes=notes)
    return Cells(TEXT, column.texts, column.missing, notes=notes if order is None else ())


# Values of Python's own, as of JSON and of DataFrames -----------------------------------------


def _of_values(values: Sequence[Any], is_text: bool) -> Cells:
    quick = None if is_text else _only_numbers(values)
    if quick is not None:
        return quick
    missing = np.array([_is_missing(value) for value in values], bool)
    rows = np.flatnonzero(~missing).tolist()
    if not rows:
        return Cells(EMPTY, objects(values), missing)
    kinds = [_kind_of(values[row]) for row in rows]
    if None in kinds:
        odd = values[rows[kinds.index(None)]]
        raise DataError(
            "each value must be a number, text, a truth value, a date or a list of such",
            received=f"a {type(odd).__name__}, {odd!r:.60}",
            mend=f"Leave the column out with {spelt('drop')}",
        )
    if set(kinds) == {INTEGER, NUMBER}:
        kinds = [NUMBER] * len(kinds)
    most = max(dict.fromkeys(kinds), key=kinds.count)
    if is_text:
        return _as_text(values, missing)
    if kinds.count(most) < _ENOUGH * len(kinds) and LISTS not in kinds:
        several = ", ".join(dict.fromkeys(map(str, kinds)))
        return _as_text(values, missing, f"is text, as it has values of several kinds: {several}")
    bad = {
        row: f"{values[row]!s:.{_SHOWN}}"
        for row, kind in zip(rows, kinds, strict=True)
        if kind != most
    }
    good = [row for row in rows if row not in bad]
    kind, found, notes = _of_one_kind(str(most), [values[row] for row in good])
    placed = objects([_NOTHING[kind]] * len(values))
    placed[good] = objects(found)
    if kind not in (TEXT, LISTS):
        placed = placed.astype(_NOTHING[kind].dtype)
    return Cells(kind, placed, missing, bad, notes)


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


def _of_one_kind(kind: str, values: list[Any]) -> tuple[str, Sequence[Any], tuple[str, ...]]:
    """Returns what values of one kind are at last, as that, and notes of it."""
    if kind == TEXT:
        dates, notes = dates_of([text.strip() for text in values])
        if None not in dates:
            return DATE, dates, notes
        return TEXT, values, notes if dates.count(None) == len(dates) else ()
    if kind == DATE:
        is_cut = any(getattr(value, "microsecond", 0) for value in values)
        return DATE, [seconds_of(value) for value in values], CUT_OFF if is_cut else ()
    if kind == INTEGER and not all(_INT64.min <= value <= _INT64.max for value in values):
        kind = NUMBER
    if kind == NUMBER:
        values = [_as_float(value) for value in values]
    return kind, values, ()


def _as_float(value: Any) -> float:
    try:
        return float(value)
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
