"""A table in memory, whatever it was read from, and all that is wrong with it, in one error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tfdist.errors import DataError, spelt
from tfdist.records.format.large_arrays import LargeArray, Store
from tfdist.records.writing.tables.arrow_texts import ArrowTexts

INTEGER, NUMBER, BOOLEAN, DATE = "integer", "number", "boolean", "date"
TEXT, LISTS, EMPTY = "text", "lists", "empty"
#: Kinds that are packed into one input of float32.
NUMERIC = (INTEGER, NUMBER, BOOLEAN)
#: What values of a kind are called; those of others as the kind.
WORDS = {NUMBER: "numbers", INTEGER: "numbers", BOOLEAN: "truth values", DATE: "dates"}
_COMPLAINTS_SHOWN = 20
_PRESENT = "have a value in each column"


@dataclass(frozen=True)
class Cells:
    """The values of one column, all of one kind.

    Attributes:
        kind: one of those above.
        values: [rows] of int64, float64, bool, int64 seconds since 1970, text or lists; anything
            where there is none. Those of a large table lie in a file, text as ``ArrowTexts``.
        missing: bool [rows], where there is none.
        bad: by row, what stands there that is not of the column's kind.
        notes: what a user should know of how they were read.
        texts: the values as text, where they are numbers that do not tell it.
    """

    kind: str
    values: np.ndarray | LargeArray | ArrowTexts
    missing: np.ndarray
    bad: dict[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    texts: ArrowTexts | None = None

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class Written:
    """The values of one column as text, whose kind is still to be found."""

    texts: Sequence[str]
    decimal_comma: bool = False


@dataclass(frozen=True)
class Values:
    """The values of one column as Python's own, None where there is none."""

    values: Sequence[Any]


@dataclass(frozen=True)
class Texts:
    """The values of one column of a large table that are text, "" where there is none.

    Attributes:
        missing: bool [rows], where there is none.
    """

    texts: ArrowTexts
    missing: np.ndarray


class ColumnsInFile(Mapping):
    """The columns of a large file, each of which is read when it is asked for.

    Args:
        read: returns the column of a name; what it writes to a file, texts, is kept.
    """

    def __init__(self, names: Iterable[str], read: Callable[[str], Cells | Values | Texts]):
        self._names, self._read = dict.fromkeys(names), read
        self._found: dict[str, Texts] = {}

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> Cells | Values | Texts:
        if name not in self._names:
            raise KeyError(name)
        if name in self._found:
            return self._found[name]
        column = self._read(name)
        if isinstance(column, Texts):
            self._found[name] = column
        return column


@dataclass(frozen=True)
class Complaint:
    """What is wrong with a row.

    Attributes:
        line: where it is, as ``Table.lines`` counts.
        what: what was found there, without the place.
        must: what must hold of it, such as could follow "every row must".
        column: the column; None for the row as a whole.
    """

    line: int
    what: str
    must: str
    column: str | None = None


@dataclass(frozen=True)
class Table:
    """Rows of a file or of a DataFrame.

    Attributes:
        kind: "csv", "tsv", "jsonl", "parquet", "arrow", "feather" or "dataframe".
        place: its name, for messages.
        unit: what ``lines`` counts: "line" of a file, or "row".
        columns: by name, in order.
        lines: int64 [rows], where each row is.
        bad: rows that are not in ``columns``, as they are not whole.
        notes: what a user should know of how it was read.
        store: what is made of it lies there, as its texts lie in a file; None where it is held.
    """

    kind: str
    place: str
    unit: str
    columns: Mapping[str, Cells | Written | Values | Texts]
    lines: np.ndarray | LargeArray
    bad: tuple[Complaint, ...] = ()
    notes: tuple[str, ...] = ()
    store: Store | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.columns)

    def line_of(self, row: int) -> int:
        return int(self.lines[row : row + 1][0])


def complaints_of(table: Table, cells: Mapping[str, Cells]) -> list[Complaint]:
    """Returns what is wrong with the rows of a table, in their order."""
    found = list(table.bad)
    for name, column in cells.items():
        must = f"have {WORDS.get(column.kind, column.kind)} in column '{name}'"
        found += [
            Complaint(table.line_of(row), f"'{what}'", must, name)
            for row, what in column.bad.items()
        ]
    return sorted(found, key=lambda complaint: complaint.line)


def refuse(
    table: Table, complaints: Sequence[Complaint], missing: Mapping[str, np.ndarray]
) -> DataError:
    """Returns the error that names the first complaints, and how many there are in all.

    Args:
        missing: by column, the numbers of the rows that have no value, int64 [n].
    """
    musts = list(dict.fromkeys(complaint.must for complaint in complaints))
    if len(musts) > 3:
        musts = ["be whole", "have values of its columns' kinds"]
    musts += [_PRESENT] if missing else []
    shown = [
        f"{item.what} in {table.unit} {item.line}"
        + (f", column '{item.column}'" if item.column is not None else "")
        for item in complaints[:_COMPLAINTS_SHOWN]
    ]
    # First, as what is too long for a message is cut off its end.
    count = f"{len(complaints):,} that do not, the first " if len(complaints) > len(shown) else ""
    for name, rows in list(missing.items())[:_COMPLAINTS_SHOWN]:
        column = table.columns[name]
        nothing = f"'{column.texts[rows[0]]}'" if isinstance(column, Written) else "no value"
        place = f"{table.unit} {table.line_of(rows[0])}, column '{name}'"
        more = "" if len(rows) == 1 else f" ({len(rows):,} missing in that column)"
        shown.append(f"{nothing} in {place}{more}")
    if len(missing) > _COMPLAINTS_SHOWN:
        shown.append(f"{len(missing) - _COMPLAINTS_SHOWN} more columns")
    mended = (
        f"Mend the rows, or leave them out with {spelt('skip_bad', True)}; name columns of words "
        f"with {spelt('text')} or {spelt('categories')}"
    )
    none = (
        f"Leave rows without a value out with {spelt('missing', 'drop')}, fill them with "
        f"{spelt('missing', 'mean')}, median or a number, or tell the model of them with "
        f"{spelt('missing', 'mask')}"
    )
    return DataError(
        f"each row of {table.place} must {' and '.join(musts)}",
        received=count + "; ".join(shown),
        mend=none if not complaints else f"{mended}. {none}" if missing else mended,
    )
