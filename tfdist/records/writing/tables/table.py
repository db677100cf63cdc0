"""A table in memory, whatever it was read from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

INTEGER, NUMBER, BOOLEAN, DATE = "integer", "number", "boolean", "date"
TEXT, LISTS, EMPTY = "text", "lists", "empty"
#: Kinds that are packed into one input of float32.
NUMERIC = (INTEGER, NUMBER, BOOLEAN)
#: What values of a kind are called; those of others as the kind.
WORDS = {NUMBER: "numbers", INTEGER: "numbers", BOOLEAN: "truth values", DATE: "dates"}


@dataclass(frozen=True)
class Cells:
    """The values of one column, all of one kind.

    Attributes:
        kind: one of those above.
        values: [rows] of int64, float64, bool, int64 seconds since 1970, text or lists; anything
            where there is none.
        missing: bool [rows], where there is none.
        bad: by row, what stands there that is not of the column's kind.
        notes: what a user should know of how they were read.
    """

    kind: str
    values: np.ndarray
    missing: np.ndarray
    bad: dict[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

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
    """

    kind: str
    place: str
    unit: str
    columns: dict[str, Cells | Written | Values]
    lines: np.ndarray
    bad: tuple[Complaint, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.columns)
