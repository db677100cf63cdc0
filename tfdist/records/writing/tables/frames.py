"""DataFrames of pandas. pandas is not imported: only who has a table has it."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfdist.records.sources.dataframes import series_of
from tfdist.records.wording import no_record
from tfdist.records.writing.tables.dates import whole_seconds
from tfdist.records.writing.tables.table import (
    BOOLEAN,
    DATE,
    INTEGER,
    NUMBER,
    Cells,
    Table,
    Values,
)


def from_dataframe(frame: Any) -> Table:
    """Returns the rows of a DataFrame, without its index.

    Raises:
        DataError: two columns have one name, or there are no rows.
    """
    columns = series_of(frame)
    if not len(frame):
        raise no_record("an empty DataFrame", "a source")
    is_plain = type(frame.index).__name__ == "RangeIndex"
    return Table(
        kind="dataframe",
        place="the DataFrame",
        unit="row",
        columns={name: _column(series) for name, series in columns},
        lines=np.arange(len(frame), dtype=np.int64),
        notes=() if is_plain else ("the index of the DataFrame is left out",),
    )


def _column(series: Any) -> Cells | Values:
    missing = series.isna().to_numpy(dtype=bool)
    kind = getattr(series.dtype, "kind", "O")
    if kind == "M":
        known = series.dropna()
        if not len(known):
            return Cells(DATE, np.zeros(len(series), np.int64), missing)
        if missing.any():  # pyarrow's dates have no NaT.
            series = series.fillna(known.iloc[0])
        of_zone = getattr(series.dtype, "unit", None)
        unit = of_zone or np.datetime_data(getattr(series.dtype, "numpy_dtype", series.dtype))[0]
        seconds, notes = whole_seconds(series.to_numpy(dtype=f"datetime64[{unit}]"), missing)
        return Cells(DATE, seconds, missing, notes=notes)
    if kind == "b":
        return Cells(BOOLEAN, series.fillna(False).to_numpy(dtype=bool), missing)
    is_beyond = kind == "u" and series.fillna(0).max() > np.iinfo(np.int64).max
    if kind == "f" or is_beyond:
        values = series.to_numpy(dtype=np.float64, na_value=np.nan)
        return Cells(NUMBER, values, missing | np.isnan(values))  # NaN is a value to pyarrow.
    if kind in "iu":
        return Cells(INTEGER, series.fillna(0).to_numpy(dtype=np.int64), missing)
    values = series.astype(object).tolist()
    return Values([None if gone else value for gone, value in zip(missing, values, strict=True)])
