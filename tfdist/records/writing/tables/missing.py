"""What becomes of values that are missing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tfdist.errors import DataError, OptionError, spelt
from tfdist.records.writing.tables.arrow_texts import ArrowTexts
from tfdist.records.writing.tables.table import LISTS, NUMBER, NUMERIC, TEXT, Cells

DROP, MASK = "drop", "mask"
_WORDS = (DROP, "mean", "median", MASK)


def parse_missing(given: str | float | None) -> str | float | None:
    """Returns "drop", "mean", "median", "mask", a number, or None, which is to refuse them.

    Raises:
        OptionError: anything else.
    """
    if given is None or given in _WORDS:
        return given
    try:
        number = float(given)
        if np.isfinite(number):
            return number
    except (TypeError, ValueError):
        pass
    raise OptionError(
        f"missing must be {', '.join(_WORDS)} or a number",
        received=repr(given),
        mend="Choose one of them, or leave it out to have missing values refused",
    )


def filled(name: str, cells: Cells, how: str | float) -> tuple[Cells, str]:
    """Returns the column with a value in each row, and a sentence that says with which.

    Numbers become the mean or the median of those that are there, the number that is given, or 0
    where a mask tells them apart; text becomes "", and a list an empty one.

    Raises:
        DataError: there is nothing to take a mean or a median of.
    """
    count = f"{int(cells.missing.sum()):,} missing in column '{name}'"
    if isinstance(cells.values, ArrowTexts):
        values = cells.values.blanked(cells.missing)
        done = "left empty"
    elif cells.kind in (TEXT, LISTS):
        values = cells.values.copy()
        nothing: object = "" if cells.kind == TEXT else []
        for row in np.flatnonzero(cells.missing):
            values[row] = nothing
        done = "left empty"
    else:
        values = np.array(cells.values[:])
        present = values[~cells.missing]
        if how == MASK:
            fill: float = 0
        elif isinstance(how, str):
            if not len(present):
                raise DataError(
                    f"column '{name}' must have values to take their {how}",
                    received="none in the rows that are kept",
                    mend=f"Give a number, or leave the column out, {spelt('drop', name)}",
                )
            fill = float(np.mean(present) if how == "mean" else np.median(present))
        else:
            fill = how
        done = f"filled with {fill:.6g}"
        if isinstance(how, str) and how != MASK:
            done += f", the {how} of all rows that have one"
        if cells.kind in NUMERIC:
            values = values.astype(np.float64)
        values[cells.missing] = fill
    kind = NUMBER if cells.kind in NUMERIC else cells.kind
    whole = replace(cells, kind=kind, values=values, missing=np.zeros(len(values), bool))
    return whole, f"{count}: {done}"
