"""Tables of pandas as arrays. pandas is not imported: only who has a table has it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from tfdist.errors import DataError
from tfdist.records.format.whole_numbers import check_kept


def is_frame(value: Any) -> bool:
    """Whether ``value`` is a DataFrame or a Series of pandas."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, (pandas.DataFrame, pandas.Series))


def plain(value: Any) -> Any:
    """Returns tables as arrays, and anything else as it is.

    A Series becomes an array [rows]. A DataFrame of numbers becomes one array [rows, columns]; one
    that has text too becomes a dict of arrays [rows] by column, since one array has one dtype.

    Raises:
        DataError: a value is missing, neither a number nor text, or a whole number that is another
            beside the floats.
    """
    if not is_frame(value):
        return value
    if value.ndim == 1:
        return _column(value.name, value)
    columns = {name: _column(name, series) for name, series in series_of(value)}
    if columns and all(column.dtype.kind in "biuf" for column in columns.values()):
        array = np.stack(list(columns.values()), axis=-1)
        for name, column in columns.items():
            if column.dtype.kind in "iu":
                check_kept(name, column, column.astype(array.dtype))
        return array
    return columns


def series_of(frame: Any) -> list[tuple[str, Any]]:
    """Returns the columns of a DataFrame with their names. Raises DataError for one name of two."""
    names = [str(name) for name in frame.columns]
    if len(set(names)) != len(names):
        raise DataError(
            "each column of a DataFrame must have a name of its own",
            received=", ".join(names),
            mend="Name them anew: frame.columns = [...]",
        )
    return [(name, frame.iloc[:, number]) for number, name in enumerate(names)]


def _column(name: Any, series: Any) -> np.ndarray:
    missing = np.flatnonzero(series.isna().to_numpy())
    is_float = getattr(series.dtype, "kind", "O") == "f" and isinstance(series.dtype, np.dtype)
    if len(missing) and not is_float:
        raise DataError(
            "no value of a table must be missing",
            received=f"an empty one in column '{name}', row {missing[0]}",
            mend="Fill it in, or remove the row",
        )
    array = np.asarray(series)
    if array.dtype.kind != "O":
        return array
    values = array.tolist()
    if all(isinstance(value, (str, bytes)) for value in values):
        return array
    if all(isinstance(value, (bool, int, float, np.number, np.bool_)) for value in values):
        array = np.array(values)
        check_kept(str(name), values, array)
        return array
    is_text = isinstance(values[0], (str, bytes))
    odd = next((n for n, v in enumerate(values) if isinstance(v, (str, bytes)) != is_text), 0)
    raise DataError(
        "a column of a table must hold numbers or text alone",
        received=f"{values[odd]!r:.60} in column '{name}', row {odd}",
        mend="Convert the column first",
    )
