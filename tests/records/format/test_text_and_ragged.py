"""Text, and arrays of unequal length, as columns of records."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pytest

from tfdist.errors import DataError
from tfdist.records.format.columns import from_arrays
from tfdist.records.format.text_and_ragged import RaggedColumn, TextColumn, as_column

ALL = np.arange(3)

STRINGS = getattr(np.dtypes, "StringDType", lambda: object)()  # NumPy 1 has none.


@pytest.mark.parametrize(
    "values",
    [
        ["a", "bé", ""],
        np.array(["a", "bé", ""]),
        np.array(["a", "bé", ""], object),
        np.array(["a", "bé", ""], STRINGS),
        np.array([b"a", "bé".encode(), b""], object),
    ],
)
def test_text(values):
    column = as_column("x", values)
    assert isinstance(column, TextColumn)
    assert (len(column), column.shape) == (3, ())
    assert column[np.array([2, 1])] == [b"", "bé".encode()]


def test_several_texts_a_record():
    column = as_column("x", [["a", "b"], ["c", "d"], ["e", "f"]])
    assert column.shape == (2,)
    assert column[np.array([1])] == [[b"c", b"d"]]


@pytest.mark.parametrize(
    ("values", "inner"),
    [
        ([[1, 2], [], [3]], ()),
        ([[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]], []], (2,)),
        (np.array([np.zeros((2, 3)), np.ones((1, 3)), np.ones((4, 3))], object), (3,)),
    ],
)
def test_ragged_numbers(values, inner):
    column = as_column("x", values)
    assert isinstance(column, RaggedColumn)
    assert column.longest == max(map(len, values))
    for found, value in zip(column[ALL], values, strict=True):
        np.testing.assert_array_equal(found, np.reshape(value, (len(value), *inner)))


@pytest.mark.parametrize("made", [list, lambda row: np.array(row, STRINGS)])
def test_ragged_text(made):
    values = [made(row) for row in (["a"], [], ["b", "c"])]
    assert [list(texts) for texts in as_column("x", values)[ALL]] == [
        [b"a"],
        [],
        [b"b", b"c"],
    ]


def test_labels_that_differ_in_the_nuls_at_their_end():
    columns = from_arrays("arrays", {"x": ALL}, {"y": np.array(["b\0", "b", "a"], object)})
    assert columns.schema.features[1].classes == ("a", "b", "b\0")
    assert columns.columns["y"].tolist() == [2, 1, 0]


def test_ragged_tensor():
    import tensorflow as tf

    column = as_column("x", tf.ragged.constant([[1, 2], [], [3]]))
    assert [part.tolist() for part in column[ALL]] == [[1, 2], [], [3]]
    with pytest.raises(DataError, match="2 ragged dimensions"):
        as_column("x", tf.ragged.constant([[[1], [2, 3]], [[4]]]))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["a", None], "NoneType None in record 1"),
        ([1, "a"], "text beside numbers: 'a' in record 1, 1 in record 0"),
        ([1, 1 << 70], "int 1180591620717411303424 in record 1, which no number of 64 bits is"),
        ([{"a": 1}], "dict"),
        ([[1, 2], [[3], [4]]], r"\[1\] in record 1 where others have \[\]"),
        ([[1, 2], ["a"], [[1], [2, 3]]], "in record 2"),
        ([[1, 2], ["a", None, "b"]], "in record 1"),
        ([0.5, 2**53 + 1], "9007199254740993 in record 1"),
        ([5, 2**63 + 1], "9223372036854775809 in record 1"),
        ([[0.5], [0.5, 2**53 + 1]], "9007199254740993 in record 1"),
        ([[0.5, 0.5], [2**53 + 1]], "9007199254740993 in record 1"),
        ([[1, 2], [3, None], [4, 5]], "NoneType None in record 1"),
        ([["a", "b"], [], [1]], r"\[1\] in record 2 where others have \['a', 'b'\]"),
        ([[True], [], ["a", "b"]], r"\['a', 'b'\] in record 2 where others have \[True\]"),
        ([Decimal("1.5")], r"but found Decimal Decimal\('1.5'\) in record 0\."),
    ],
)
def test_bad_values(values, message):
    with pytest.raises(DataError, match=message):
        as_column("x", values)


def test_objects_that_are_all_numbers():
    assert as_column("x", np.array([1, 2.5, True], object)).tolist() == [1, 2.5, 1]
    with pytest.raises(DataError, match="9007199254740993 in record 0"):
        as_column("x", np.array([2**53 + 1, 2.5], object))


def test_features_of_arrays():
    columns = from_arrays(
        "arrays",
        {"words": ["a", "b", "c"], "tokens": [[1], [2, 3], []], "boxes": [np.ones((2, 4))] * 3},
        {"kind": ["dog", "cat", "dog"], "spans": [[0.5], [], [0.25, 0.5]]},
    )
    found = {
        feature.name: (feature.dtype, feature.shape, feature.encoding, feature.longest)
        for feature in columns.schema.features
    }
    assert found == {
        "words": ("string", (), "bytes", None),
        "tokens": ("int64", (None,), "int64", 2),
        "boxes": ("float64", (2, 4), "raw", None),
        "kind": ("int64", (), "int64", None),
        "spans": ("float32", (None,), "float", 2),
    }
    assert columns.schema.class_label is None  # There are two labels.
    assert columns.schema.features[3].classes == ("cat", "dog")
    assert columns.columns["kind"].tolist() == [1, 0, 1]


def test_missing_numbers_are_found():
    with pytest.raises(DataError, match="NaN in array 'x', record 1"):
        from_arrays("arrays", {"x": [[1.0], [np.nan, 2.0]]}, {})
