"""All that is wrong with a table, in one error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tfdist.errors import DataError, spelt
from tfdist.records.writing.tables.table import WORDS, Cells, Complaint, Table, Written

_COMPLAINTS_SHOWN = 20
_PRESENT = "have a value in each column"


def complaints_of(table: Table, cells: Mapping[str, Cells]) -> list[Complaint]:
    """Returns what is wrong with the rows of a table, in their order."""
    found = list(table.bad)
    for name, column in cells.items():
        must = f"have {WORDS.get(column.kind, column.kind)} in column '{name}'"
        found += [
            Complaint(int(table.lines[row]), f"'{what}'", must, name)
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
        place = f"{table.unit} {table.lines[rows[0]]}, column '{name}'"
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
