"""Tables whose columns have types: DataFrames of pandas, and Arrow's .parquet, .arrow and .feather.

Neither package is imported before it is needed: only who has a DataFrame has pandas.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.errors import DataError, package_missing
from tfdist.records.format.large_arrays import Store
from tfdist.records.sources.dataframes import series_of
from tfdist.records.wording import no_record, told_as
from tfdist.records.writing.tables.arrow_texts import cast, spooled
from tfdist.records.writing.tables.dates import whole_seconds
from tfdist.records.writing.tables.table import (
    BOOLEAN,
    DATE,
    INTEGER,
    NUMBER,
    Cells,
    ColumnsInFile,
    Table,
    Texts,
    Values,
)
from tfdist.records.writing.text_files import LARGE_BYTES

# Rows of a column of text that are read at once, by their bytes.
_BATCH_BYTES, _MOST_ROWS = 64 << 20, 1 << 16


def read_arrow(path: Path, kind: str, *, in_file: bool = False) -> Table:
    """Returns the rows of a file.

    Args:
        in_file: whether the values of a large .parquet file may stay in files, see
            ``Table.store``.

    Raises:
        EngineMissingError: pyarrow is not installed.
        DataError: the file cannot be read.
    """
    try:
        import pyarrow
        from pyarrow import feather, ipc, parquet
    except ImportError as error:
        raise package_missing("pyarrow", f"{kind} files", "tables", error) from None
    with _read_by_pyarrow(path, kind):
        if kind == "parquet":
            # Not read_table, which takes a folder's names for columns.
            file = parquet.ParquetFile(path)
            about = file.metadata
            in_file &= max(_bytes_in(about), about.num_rows * about.num_columns * 8) > LARGE_BYTES
            found = file.schema_arrow.empty_table() if in_file else file.read()
        elif kind == "feather":
            found = feather.read_table(path)
        else:
            found = _read_ipc(path, pyarrow, ipc)
        found.validate(full=True)  # Text may be bytes that are no UTF-8.
    in_file &= kind == "parquet"
    names = found.column_names
    if len(set(names)) != len(names):
        raise DataError(
            f"each column of {path} must have a name of its own",
            received=", ".join(names),
            mend="Rename one of them",
        )
    store = Store() if in_file else None
    columns: Mapping[str, Cells | Values | Texts] = (
        ColumnsInFile(names, lambda name: _column_of_parquet(path, file, name, store))
        if in_file
        else {name: _column(pyarrow, found.column(name)) for name in names}
    )
    return Table(
        kind=kind,
        place=str(path),
        unit="row",
        columns=columns,
        lines=np.arange(about.num_rows if in_file else found.num_rows, dtype=np.int64),
        store=store,
    )


def _column_of_parquet(path: Path, file: Any, name: str, store: Store) -> Cells | Values | Texts:
    import pyarrow

    if not _is_text(pyarrow.types, file.schema_arrow.field(name).type):
        with _read_by_pyarrow(path, "parquet"):
            column = file.read(columns=[name]).column(name)
            column.validate(full=True)
            return _column(pyarrow, column)
    missing: list[np.ndarray] = []
    rows = _BATCH_BYTES * file.metadata.num_rows // max(1, _bytes_in(file.metadata))
    rows = max(1, min(_MOST_ROWS, rows))

    def parts() -> Iterator[Any]:
        with _read_by_pyarrow(path, "parquet"):
            for batch in file.iter_batches(batch_size=rows, columns=[name]):
                batch.validate(full=True)
                texts = batch.column(name).cast(pyarrow.string())
                missing.append(np.asarray(texts.is_null()))
                yield texts.fill_null("")

    return Texts(spooled(parts(), store), np.concatenate(missing))


def _bytes_in(about: Any) -> int:
    return sum(about.row_group(n).total_byte_size for n in range(about.num_row_groups))


def _is_text(types: Any, kind: Any) -> bool:
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _read_by_pyarrow(path: Path, kind: str) -> contextlib.AbstractContextManager[None]:
    import pyarrow

    rule = f"{path} must be a {kind} file that pyarrow reads"
    mend = "Write it again with pyarrow or pandas, or get it again if it was cut"
    return told_as(rule, mend, OSError, pyarrow.ArrowException)


# Extension types whose values are what they are stored as.
_AS_STORED = ("arrow.bool8", "arrow.json")


def _read_ipc(path: Path, pyarrow: Any, ipc: Any) -> Any:
    """Reads both forms that Arrow has: the file, and the stream."""
    try:
        return ipc.open_file(path).read_all()
    except pyarrow.ArrowInvalid:
        return ipc.open_stream(path.read_bytes()).read_all()


def _column(pyarrow: Any, column: Any) -> Cells | Values:
    """Returns a column: typed where numpy has the type, else value by value."""
    types, kind = pyarrow.types, column.type
    if isinstance(kind, pyarrow.BaseExtensionType) and kind.extension_name not in _AS_STORED:
        return Values([kind] * len(column))  # Refused as such: its storage is something else.
    missing = np.asarray(column.is_null().to_numpy(), bool)
    if types.is_boolean(kind):
        values = np.asarray(column.fill_null(False).to_numpy(), bool)
        return Cells(BOOLEAN, values, missing)
    if kind == pyarrow.uint64() and cast(column, pyarrow.int64()) is not None:
        kind = pyarrow.int64()
    if types.is_integer(kind) and kind != pyarrow.uint64():
        return Cells(INTEGER, column.fill_null(0).to_numpy().astype(np.int64), missing)
    if types.is_floating(kind) or types.is_decimal(kind) or types.is_integer(kind):
        as_floats = column.cast(pyarrow.float64(), safe=False)  # Whole numbers may be rounded.
        values = np.asarray(as_floats.fill_null(np.nan).to_numpy(), float)
        return Cells(NUMBER, values, missing | np.isnan(values))
    if types.is_timestamp(kind) or types.is_date(kind):
        seconds, notes = whole_seconds(column.to_numpy(), missing)
        return Cells(DATE, seconds, missing, notes=notes)
    if types.is_dictionary(kind):
        column = column.cast(kind.value_type)
    return Values(column.to_pylist())


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
        columns={name: _of_series(series) for name, series in columns},
        lines=np.arange(len(frame), dtype=np.int64),
        notes=() if is_plain else ("the index of the DataFrame is left out",),
    )


def _of_series(series: Any) -> Cells | Values:
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
