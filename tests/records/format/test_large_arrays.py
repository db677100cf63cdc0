"""Rows of arrays in files: the values of the array, whatever way they are read."""

from __future__ import annotations

import numpy as np
import pytest

from tfdist.errors import DataError
from tfdist.records.format import large_arrays
from tfdist.records.format.columns import from_arrays
from tfdist.records.format.large_arrays import LargeArray, chunks, large

VALUES = np.arange(5000 * 6, dtype=np.int32).reshape(5000, 2, 3)
ROWS = np.array([4999, 0, 7, 8, 9, 9, 3, 2500])


@pytest.fixture
def small_limits(monkeypatch):
    """Every map counts as large, and is given back again and again."""
    monkeypatch.setattr(large_arrays, "_SMALL_BYTES", 1000)
    monkeypatch.setattr(large_arrays, "_CHUNK_BYTES", 5000)


def saved(tmp_path, values=VALUES):
    np.save(tmp_path / "x.npy", values)
    return tmp_path / "x.npy"


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x[100:4000],
        lambda x: x[::2],
        lambda x: x[:, :, 1:],
        lambda x: x[5:].reshape(-1, 6),
    ],
)
@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_rows_are_those_of_the_array(tmp_path, small_limits, view, mode):
    array = view(np.load(saved(tmp_path), mmap_mode=mode))
    if mode == "c":
        array[3] = -1  # Of a private copy the file knows nothing.
    rows = large(array)
    chosen = ROWS % len(array)
    for _ in range(20):
        np.testing.assert_array_equal(rows[chosen], np.asarray(array)[chosen])
    np.testing.assert_array_equal(rows[2:30], np.asarray(array)[2:30])
    assert (rows.shape, rows.dtype, rows.nbytes) == (array.shape, array.dtype, array.nbytes)
    assert (rows.min(), rows.max()) == (array.min(), array.max())


def test_columns_in_the_order_of_fortran(tmp_path, small_limits):
    path = saved(tmp_path, np.asfortranarray(VALUES))
    rows = large(np.load(path, mmap_mode="r"))
    np.testing.assert_array_equal(rows[ROWS], VALUES[ROWS])


def test_a_file_that_another_has_replaced(tmp_path, small_limits):
    path = saved(tmp_path)
    array = np.load(path, mmap_mode="r")
    path.unlink()
    saved(tmp_path, VALUES[::-1])
    np.testing.assert_array_equal(large(array)[ROWS], VALUES[ROWS])


def test_a_file_that_becomes_shorter(tmp_path, small_limits):
    path = saved(tmp_path)
    rows = large(np.load(path, mmap_mode="r"))
    with open(path, "r+b") as file:
        file.truncate(2000)
    with pytest.raises(DataError, match="become shorter"):
        rows[ROWS]


def test_parts_and_another_dtype(tmp_path, small_limits):
    parts = [np.load(saved(tmp_path), mmap_mode="r"), VALUES[:10] + 1, LargeArray([VALUES[:1]])]
    rows = LargeArray(parts).astype(np.float32)
    whole = np.concatenate([VALUES, VALUES[:10] + 1, VALUES[:1]])
    chosen = np.array([5010, 5000, 4999, 0, 5009])
    np.testing.assert_array_equal(rows[chosen], whole[chosen])
    assert rows[chosen].dtype == np.float32
    assert len(rows) == 5011
    read = list(chunks(rows))
    assert len(read) > 10
    np.testing.assert_array_equal(np.concatenate([chunk for _, chunk in read]), whole)


def test_what_is_small_stays_an_array(tmp_path):
    assert large(VALUES) is None
    assert large(np.load(saved(tmp_path, np.arange(9)), mmap_mode="r")) is None


def test_columns_convert_when_rows_are_read(tmp_path, small_limits):
    path = saved(tmp_path, np.linspace(0, 1, 12000).reshape(4000, 3).astype(">f8"))
    array = np.load(path, mmap_mode="r")
    columns = from_arrays("arrays", {"x": array}, {"target": array})
    assert [feature.dtype for feature in columns.schema.features] == ["float64", "float32"]
    block = columns.block(ROWS % 4000)
    np.testing.assert_array_equal(block["x"], array[ROWS % 4000])
    np.testing.assert_array_equal(block["target"], array[ROWS % 4000].astype(np.float32))


def test_a_missing_value_far_inside(tmp_path, small_limits):
    values = np.ones((4000, 3), np.float32)
    values[3777, 1] = np.nan
    array = np.load(saved(tmp_path, values), mmap_mode="r")
    with pytest.raises(DataError, match="record 3777"):
        from_arrays("arrays", {"x": array}, {})
