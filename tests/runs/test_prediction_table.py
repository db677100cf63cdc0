"""What becomes of outputs in a table: classes and their probabilities, or values."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
from tensorflow import keras

from tfdist.errors import EngineMissingError, ModelError
from tfdist.records.format.schema import Feature, Schema
from tfdist.runs import predicting
from tfdist.runs.prediction_table import (
    ALONE,
    check_dimensions,
    classes_of,
    columns_of,
    write_table,
)

_LOGITS = np.log(np.array([[1, 2, 5], [6, 3, 1]], np.float32))
_SHARES = np.exp(_LOGITS) / np.exp(_LOGITS).sum(axis=1, keepdims=True)
_ABC = {ALONE: ("a", "b", "c")}
_losses = keras.losses


def _columns(rows, loss=None, classes=None, name=ALONE):
    return columns_of({"row": range(len(rows))}, {name: rows}, {name: loss}, classes or {})


@pytest.mark.parametrize(
    ("rows", "loss"),
    [
        (_LOGITS, _losses.SparseCategoricalCrossentropy(from_logits=True)),
        (_LOGITS, _losses.CategoricalFocalCrossentropy(from_logits=True)),
        (_SHARES, "sparse_categorical_crossentropy"),
        (_SHARES, _losses.categorical_crossentropy),
        (_SHARES, lambda y, predicted: 0.0),
        (_SHARES, None),
    ],
)
def test_classes_have_names_and_probabilities(rows, loss):
    found = _columns(rows, loss, _ABC)
    assert list(found) == ["row", "class", "probability"]
    assert found["class"].tolist() == ["c", "a"]
    np.testing.assert_allclose(found["probability"], [5 / 8, 6 / 10], rtol=1e-6)


@pytest.mark.parametrize(
    ("rows", "loss"),
    [
        ([[0.25], [0.75]], "binary_crossentropy"),
        ([[-np.log(3)], [np.log(3)]], _losses.BinaryCrossentropy(from_logits=True)),
        ([-np.log(3), np.log(3)], _losses.BinaryFocalCrossentropy(from_logits=True)),
    ],
)
def test_yes_or_no_is_a_class_of_two(rows, loss):
    found = _columns(np.array(rows, np.float32), loss, {ALONE: ("no", "yes")})
    assert found["class"].tolist() == ["no", "yes"]
    np.testing.assert_allclose(found["probability"], [0.75, 0.75], rtol=1e-6)


def test_classes_without_names_are_numbers():
    for classes in ({}, {ALONE: ()}, {ALONE: ("a", "b")}):
        assert _columns(_SHARES, "categorical_crossentropy", classes)["class"].tolist() == [2, 0]


def test_anything_else_is_values():
    rows = np.array([[1.5], [2]], np.float32)
    assert {name: v.tolist() for name, v in _columns(rows, "mse").items()} == {
        "row": [0, 1],
        "value": [1.5, 2],
    }
    assert list(_columns(_LOGITS, "mse", _ABC)) == ["row", "value_0", "value_1", "value_2"]
    assert list(_columns(_SHARES, "mse")) == ["row", "value_0", "value_1", "value_2"]
    tags = _columns(_LOGITS[:, :2], _losses.BinaryCrossentropy(from_logits=True))
    assert list(tags) == ["row", "probability_0", "probability_1"]
    np.testing.assert_allclose(tags["probability_1"], [2 / 3, 3 / 4], rtol=1e-6)


def test_a_loss_of_ones_own_says_nothing_of_outputs_whatever_it_is_called():
    def weighted_binary_crossentropy(y, predicted):
        return _losses.binary_crossentropy(y, predicted, from_logits=True)

    class OwnCrossentropy(_losses.Loss):
        def call(self, y, predicted):
            return weighted_binary_crossentropy(y, predicted)

    rows = np.array([[0.2], [-3.0]], np.float32)
    for loss in (weighted_binary_crossentropy, OwnCrossentropy()):
        assert list(_columns(rows, loss)) == ["row", "value"]


def test_several_outputs_name_their_columns():
    outputs = {"kind": _SHARES, "age": _LOGITS[:, :1], "place": _LOGITS[:, :2]}
    losses = {"kind": "categorical_crossentropy", "age": "mse", "place": "mse"}
    found = columns_of({"file": ["x", "y"]}, outputs, losses, {"kind": ("a", "b", "c")})
    names = ["file", "kind_class", "kind_probability", "age", "place_0", "place_1"]
    assert list(found) == names
    with pytest.raises(ModelError, match="'file' twice, once of output 'file'"):
        columns_of({"file": ["x", "y"]}, {"file": _LOGITS[:, :1]}, {}, {})
    with pytest.raises(ModelError, match=r"'kind', of 4 dimensions.*\.npz"):
        check_dimensions({"age": None, "kind": 4})


def test_the_names_of_classes_are_those_of_the_first_schema_with_labels():
    def label(name, classes):
        kind = {"dtype": "int64", "shape": (), "encoding": "int64"}
        return Feature(name=name, role="label", classes=classes, **kind)

    x = Feature(name="x", dtype="float32", shape=(2,), encoding="float", role="input")
    bare, named = Schema((x,)), Schema((x, label("kind", ("a", "b"))))
    assert classes_of([bare], [ALONE]) == {}
    assert classes_of([bare, named], [ALONE]) == {ALONE: ("a", "b")}
    assert classes_of([named], ["kind", "age"]) == {"kind": ("a", "b")}
    both = Schema((x, label("kind", ("a", "b")), label("age", None)))
    assert classes_of([both], ["kind", "age", "other"]) == {"kind": ("a", "b"), "age": ()}
    assert classes_of([both], [ALONE]) == {}


@pytest.fixture
def columns():
    return {
        "file": np.array(['a "b",c.jpg', "=ä.jpg"], object),
        "class": np.array(["cat", "dog"], object),
        "value": np.array([0.1, np.nan], np.float32),
        "exact": np.array([0.1, 1.0], np.float64),
        "row": np.array([7, 8]),
    }


def test_each_kind_of_file_gives_the_same_back(columns, tmp_path):
    from pyarrow import parquet

    for kind in ("csv", "jsonl", "parquet"):
        write_table(tmp_path / f"found.{kind}", columns)
    with (tmp_path / "found.csv").open(newline="", encoding="utf-8") as file:
        assert list(csv.DictReader(file)) == [
            dict(zip(columns, row, strict=True))
            for row in [
                ('a "b",c.jpg', "cat", "0.1", "0.1", "7"),
                ("=ä.jpg", "dog", "nan", "1.0", "8"),
            ]
        ]
    first, second = map(json.loads, (tmp_path / "found.jsonl").read_text("utf-8").splitlines())
    assert first == dict(zip(columns, ['a "b",c.jpg', "cat", 0.1, 0.1, 7], strict=True))
    assert second["value"] is None
    table = parquet.read_table(tmp_path / "found.parquet")
    assert [str(kind) for kind in table.schema.types] == [
        *("string", "string", "float", "double", "int64")
    ]
    for name, values in columns.items():
        np.testing.assert_array_equal(table[name].to_numpy(), values)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_nothing_half_written_is_left(kind, columns, tmp_path):
    columns["value"] = np.array([1 + 2j, object()], object)
    (tmp_path / f"found.{kind}").write_text("before")
    if kind == "csv":
        columns["value"] = columns["value"][:1]
    with pytest.raises((TypeError, ValueError)):
        write_table(tmp_path / f"found.{kind}", columns)
    assert [path.name for path in tmp_path.iterdir()] == [f"found.{kind}"]
    assert (tmp_path / f"found.{kind}").read_text() == "before"


def test_parquet_without_pyarrow_is_told_before_a_process_starts(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    (tmp_path / "model.keras").write_text("")
    with pytest.raises(EngineMissingError, match=r"pyarrow must be .*tfdist\[tables\]"):
        predicting._check(tmp_path / "model.keras", tmp_path / "x.parquet", overwrite=False)
