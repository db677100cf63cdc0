"""Parquet, Arrow and Feather files, by way of pyarrow."""

from __future__ import annotations

import datetime
import subprocess
import sys

import numpy as np
import pytest

from tfdist.errors import DataError, EngineMissingError
from tfdist.records.writing.raw_sources import read_raw
from tfdist.records.writing.roles import Asked

ROWS = 12


def save(tmp_path, kind):
    import pyarrow as pa
    from pyarrow import feather, ipc, parquet

    hours = [datetime.datetime(1970, 1, 1, n) for n in range(ROWS)]
    table = pa.table(
        {
            "a": pa.array([None, *range(1, ROWS)], pa.int32()),
            "on": [n % 2 == 0 for n in range(ROWS)],
            "price": pa.array(range(ROWS), pa.decimal128(5, 2)),
            "when": pa.array(hours, pa.timestamp("ns")),
            "day": pa.array([datetime.date(1969, 12, 31)] * ROWS),
            "city": pa.array(["x", "y"] * (ROWS // 2)).dictionary_encode(),
            "words": [f"t {n}" for n in range(ROWS)],
            "tokens": [[7] * (n % 3 + 1) for n in range(ROWS)],
            "y": pa.array([n % 2 for n in range(ROWS)], pa.uint8()),
        }
    )
    path = tmp_path / f"t.{kind}"
    if kind == "parquet":
        parquet.write_table(table, path)
    elif kind == "feather":
        feather.write_feather(table, path)
    elif kind == "arrow":
        with ipc.new_stream(path, table.schema) as file:
            file.write_table(table)
    return path


@pytest.mark.parametrize("kind", ["parquet", "feather", "arrow"])
def test_every_type(tmp_path, kind):
    columns = read_raw(save(tmp_path, kind), Asked(missing="mean"))
    assert columns.kind == kind
    assert [(f.name, f.dtype, f.shape) for f in columns.schema.features] == [
        ("features", "float32", (3,)),
        ("when", "int64", ()),
        ("day", "int64", ()),
        ("city", "int64", ()),
        ("words", "string", ()),
        ("tokens", "int64", (None,)),
        ("label", "int64", ()),
    ]
    found = columns.block(np.array([0, 3]))
    np.testing.assert_array_equal(found["features"], [[6, 1, 0], [3, 0, 3]])
    np.testing.assert_array_equal(found["when"], [0, 3 * 3600])
    np.testing.assert_array_equal(found["day"], [-86400, -86400])
    np.testing.assert_array_equal(found["city"], [0, 1])
    assert found["words"] == [b"t 0", b"t 3"]
    assert [row.tolist() for row in found["tokens"]] == [[7], [7]]
    np.testing.assert_array_equal(found["label"], [0, 1])


def test_missing_values_are_told_by_row(tmp_path):
    with pytest.raises(DataError, match="no value in row 0, column 'a'"):
        read_raw(save(tmp_path, "parquet"))


def test_whole_numbers_beyond_int64_are_rounded(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    largest = pa.array([2**64 - 1, 2**53 + 1, 5], pa.uint64())
    parquet.write_table(pa.table({"a": largest, "y": [0, 1, 0]}), tmp_path / "t.parquet")
    classes = pa.array([3, 1, 3], pa.uint64())
    parquet.write_table(pa.table({"a": [0.5, 1, 2], "y": classes}), tmp_path / "c.parquet")
    assert read_raw(tmp_path / "c.parquet").schema.class_label.dtype == "int64"
    columns = read_raw(tmp_path / "t.parquet")
    found = columns.block(np.arange(3))["features"][:, 0]
    np.testing.assert_array_equal(found, np.float32([2**64, 2**53, 5]))
    assert columns.notes == ("whole numbers beyond 16,777,216 are rounded to float32: 'a'",)


def test_types_of_extensions_are_not_read_as_their_storage(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    tensors = pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.float32(), [2, 2]),
        pa.array([[1.0] * 4] * 3, pa.list_(pa.float32(), 4)),
    )
    parquet.write_table(pa.table({"a": tensors, "y": [0, 1, 0]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"each value must be a number, .* found .*Tensor"):
        read_raw(tmp_path / "t.parquet")


def test_times_keep_their_unit(tmp_path):
    import pyarrow as pa
    from pyarrow import ipc

    table = pa.table(
        {
            "far": pa.array([10**15, -(10**15)]).cast(pa.timestamp("s")),
            "before": pa.array([-1, -1_000_000_001]).cast(pa.timestamp("ns", "Asia/Tokyo")),
            "label": [0, 1],
        }
    )
    with ipc.new_file(tmp_path / "t.arrow", table.schema) as file:
        file.write_table(table)
    columns = read_raw(tmp_path / "t.arrow")
    assert columns.columns["far"].tolist() == [10**15, -(10**15)]
    assert columns.columns["before"].tolist() == [-1, -2]
    assert columns.notes == ("column 'before' has fractions of seconds, which are cut off",)


@pytest.mark.parametrize("kind", ["parquet", "feather", "arrow"])
def test_no_such_file(tmp_path, kind):
    path = tmp_path / f"t.{kind}"
    path.write_bytes(b"no table, but bytes")
    with pytest.raises(DataError, match=f"a {kind} file that pyarrow reads"):
        read_raw(path)


def test_in_a_process_of_its_own(tmp_path):
    """Where nobody else has imported any part of pyarrow."""
    path = save(tmp_path, "parquet")
    arguments = ["shard", str(path), str(tmp_path / "out"), "--missing", "mean"]
    done = subprocess.run(
        [sys.executable, "-m", "tfdist", *arguments], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "t.parquet").touch()
    with pytest.raises(EngineMissingError, match=r"pip install 'tfdist\[tables\]'"):
        read_raw(tmp_path / "t.parquet")


def test_dates_of_a_type_name_classes_as_they_are_written(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    days = np.array(["2024-01-02", "2023-12-31", "2024-01-02"], "datetime64[D]")
    for kind, dates in (("day", days), ("time", days.astype("datetime64[ms]") + 3_600_000)):
        path = tmp_path / f"{kind}.parquet"
        parquet.write_table(pa.table({"a": [0.5, 1.5, 2.5], "label": dates}), path)
        columns = read_raw(path)
        time = "" if kind == "day" else "T01:00:00"
        assert columns.schema.features[-1].classes == (f"2023-12-31{time}", f"2024-01-02{time}")
        assert columns.block(np.arange(3))["label"].tolist() == [1, 0, 1]
