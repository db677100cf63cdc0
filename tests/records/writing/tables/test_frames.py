"""DataFrames of pandas as tables."""

from __future__ import annotations

import datetime

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from tfdist.errors import DataError
from tfdist.records import load_manifest, read, write
from tfdist.records.writing.raw_sources import read_raw
from tfdist.records.writing.roles import Asked


def frame(rows=6):
    return pd.DataFrame(
        {
            "n": np.arange(rows, dtype=np.float32),
            "text": [f"text {n}" for n in range(rows)],
            "when": pd.date_range("1970-01-01", periods=rows, tz="Europe/Berlin"),
            "kind": pd.Categorical(["u", "v"] * (rows // 2)),
            "ok": [True, False] * (rows // 2),
            "label": np.arange(rows) % 3,
        }
    )


def test_each_type_keeps_its_meaning():
    columns = read_raw(frame())
    assert (columns.kind, columns.notes) == ("dataframe", ())
    found = columns.block(np.array([1, 2]))
    np.testing.assert_array_equal(found["features"], [[1, 0], [2, 1]])
    assert found["text"] == [b"text 1", b"text 2"]
    # Midnight in Berlin is 23 o'clock in London.
    np.testing.assert_array_equal(found["when"], [86400 - 3600, 2 * 86400 - 3600])
    np.testing.assert_array_equal(found["kind"], [1, 0])
    np.testing.assert_array_equal(found["label"], [1, 2])
    assert dict(columns.roles)["kind"] == "input (2 categories)"


@pytest.mark.parametrize("year", [1, 1600, 3000, 9999])
def test_years_that_nanoseconds_cannot_count(year):
    days = np.array([f"{year:04}-01-01"], "datetime64[D]")
    table = pd.DataFrame({"when": days.astype("datetime64[us]"), "label": [0]})
    table["second"] = days.astype("datetime64[s]")
    table["zone"] = table["when"].dt.tz_localize("UTC")
    columns = read_raw(table)
    seconds = int((days[0] - np.datetime64("1970-01-01", "D")).astype(int)) * 86400
    for name in ("when", "second", "zone"):
        assert columns.columns[name].tolist() == [seconds]
    assert columns.notes == ()


def test_the_first_second_of_nanoseconds():
    table = pd.DataFrame({"when": [pd.Timestamp.min, pd.Timestamp(0)], "label": [0, 1]})
    assert read_raw(table).columns["when"].tolist() == [-9223372037, 0]


def test_columns_of_pyarrow_with_missing_values():
    day = datetime.date(2024, 1, 1)
    arrow = pd.arrays.ArrowExtensionArray
    table = pd.DataFrame(
        {
            "day": arrow(pa.array([None, day, day], pa.date32())),
            "c": arrow(pa.array([1.0, float("nan"), 3.0])),
            "label": [0, 1, 0],
        }
    )
    columns = read_raw(table, Asked(missing="drop"))
    assert columns.columns["day"].tolist() == [1704067200]
    assert columns.columns["features"].tolist() == [[3.0]]


def test_fractions_of_times_among_objects_are_told():
    times = [datetime.datetime(1970, 1, 1, 0, 0, 1, 500_000)]
    columns = read_raw(pd.DataFrame({"when": pd.Series(times, dtype=object), "label": [0]}))
    assert columns.columns["when"].tolist() == [1]
    assert columns.notes == ("column 'when' has fractions of seconds, which are cut off",)


def test_nullable_types_and_an_index():
    table = pd.DataFrame(
        {
            "s": pd.array([1, None, 3], dtype="Int64"),
            "t": ["a", None, "c"],
            "b": pd.array([True, None, False], dtype="boolean"),
            "when": pd.to_datetime(["1970-01-02", None, "1970-01-03"]),
            "label": [0, 1, 0],
        },
        index=["i", "j", "k"],
    )
    with pytest.raises(DataError, match="no value in row 1, column 's'; no value in row 1"):
        read_raw(table)
    columns = read_raw(table, Asked(missing="mask"))
    found = columns.block(np.arange(3))
    np.testing.assert_array_equal(found["features"], [[1, 1], [0, 0], [3, 0]])
    assert found["t"] == [b"a", b"", b"c"]
    np.testing.assert_array_equal(found["when"], [86400, 0, 2 * 86400])
    np.testing.assert_array_equal(found["missing"], [[0] * 4, [1] * 4, [0] * 4])
    assert columns.notes[0] == "the index of the DataFrame is left out"


@pytest.mark.parametrize("dtype", ["uint64", "UInt64"])
def test_unsigned_labels_are_classes_where_int64_holds_them(dtype):
    frame = pd.DataFrame({"a": [0.5, 1.5], "label": pd.Series([3, 1], dtype=dtype)})
    label = read_raw(frame).schema.class_label
    assert (label.dtype, label.is_class_id) == ("int64", True)
    frame["label"] = pd.Series([2**64 - 1, 1], dtype=dtype)
    columns = read_raw(frame)
    assert columns.schema.class_label is None
    assert "rounded to float32: 'label'" in columns.notes[0]


def test_its_label_is_never_guessed_by_its_place():
    with pytest.raises(DataError, match="label column called label, target, class or y"):
        read_raw(frame().rename(columns={"label": "goal"}))
    with pytest.raises(DataError, match="a name of its own, but found a, a"):
        read_raw(pd.DataFrame([[1, 2]], columns=["a", "a"]))
    with pytest.raises(DataError, match="an empty DataFrame"):
        read_raw(frame()[:0])


def test_written_and_read(tmp_path):
    write(
        frame(12), tmp_path / "data", label="ok", drop="when,label", split="train=1", num_shards=1
    )
    assert load_manifest(tmp_path / "data").schema.of_role("label")[0].classes == ("false", "true")
    x, y = next(iter(read(tmp_path / "data", batch_size=12)))
    order = np.argsort(x["features"][:, 0])
    assert x["text"].numpy()[order].tolist() == [f"text {n}".encode() for n in range(12)]
    np.testing.assert_array_equal(x["kind"].numpy()[order], [0, 1] * 6)
    np.testing.assert_array_equal(y.numpy()[order], [1, 0] * 6)


def test_what_is_left_out_is_told_in_python_too(tmp_path, capsys):
    table = frame(12)
    table.loc[3, "n"] = np.nan
    manifest = write(table, tmp_path / "data", missing="drop", split="train=1", num_shards=1)
    assert manifest.splits["train"].records == 11
    assert capsys.readouterr().out == "tfdist: 1 row is left out for missing values: 1 in 'n'\n"


def test_whole_numbers_of_a_frame_that_are_others_beside_floats():
    table = pd.DataFrame({"a": [1, 2**53 + 1], "b": [0.5, 0.5]})
    with pytest.raises(DataError, match="found 9007199254740993 in record 1"):
        read_raw((table, [0, 1]))


def test_a_frame_beside_its_labels():
    columns = read_raw((frame()[["n", "text"]], frame()["label"]))
    assert [f.name for f in columns.schema.of_role("input")] == ["n", "text"]
    assert columns.block(np.array([4]))["text"] == [b"text 4"]
