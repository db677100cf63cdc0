"""What a user gave is told by one piece of code, and read alike wherever it is given."""

from __future__ import annotations

from types import SimpleNamespace

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from tfdist.errors import DataError
from tfdist.records import open_records, write
from tfdist.records.sources.recognise import recognise

X = np.arange(12, dtype=np.float32).reshape(6, 2)


class OfAnyKeras(keras.utils.PyDataset):  # Not that of tf.keras.
    def __len__(self):
        return 2

    def __getitem__(self, number):
        return X[number * 3 : number * 3 + 3], np.arange(3)


class Loader:
    def __iter__(self):
        return iter(zip(X, range(6), strict=True))


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ("data/train", "files"),
        (tf.data.Dataset.range(3), "dataset"),
        (SimpleNamespace(as_dataset=0, download_and_prepare=0, info=0), "tfds"),
        (OfAnyKeras(), "sequence"),
        (lambda: X, "function"),
        (iter(X), "iterator"),
        (Loader(), "iterable"),
        ([{"x": 1}], "dicts"),
        ([(1, 2), (3, 4)], "tuples"),
        (pd.DataFrame({"a": [1]}), "table"),
        (pd.Series([1]), "arrays"),
        ((X, X), "arrays"),
        ({"a": X}, "arrays"),
        ([1, 2], "arrays"),
        (Loader, "unknown"),
        (b"data", "unknown"),
        (keras.layers.Dense(1), "unknown"),
        (3, "unknown"),
    ],
)
def test_kinds(given, kind):
    assert recognise(given).kind == kind


@pytest.mark.parametrize("make", [OfAnyKeras, Loader, lambda: lambda: list(Loader())])
def test_the_same_is_read_and_written(tmp_path, make):
    assert open_records(make()).num_records == 6
    assert write(make(), tmp_path / "data", split="all=1").splits["all"].records == 6


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda n: X, "without arguments, but found '<lambda>', which needs some"),
        (lambda: (X, X), "which returns a tuple"),
        # Its keys were written, as records of text.
        (lambda: {"x": X}, "which returns a dict"),
        (lambda: pd.DataFrame({"a": [1]}), "which returns a DataFrame"),
    ],
)
def test_a_function_that_gives_no_records(tmp_path, function, message):
    for take in (open_records, lambda source: write(source, tmp_path / "data")):
        with pytest.raises(DataError, match=message):
            take(function)
    assert list(tmp_path.iterdir()) == []


class WithoutNumber(keras.utils.PyDataset):
    __getitem__ = OfAnyKeras.__getitem__


class OfTwoBatches(WithoutNumber):
    num_batches = 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (WithoutNumber(), "a Sequence must have a number of batches, but found 'WithoutNumber'"),
        (b"data", "but found a bytes"),
        (keras.Sequential([keras.layers.Dense(1)]), "but found a Sequential"),
    ],
)
def test_what_is_no_data_is_one_line(tmp_path, given, message):
    for take in (open_records, lambda source: write(source, tmp_path / "data")):
        with pytest.raises(DataError, match=message):
            take(given)


def test_batches_that_a_py_dataset_says_otherwise():
    assert open_records(OfTwoBatches()).num_records == 6


def test_a_dict_of_datasets_by_split():
    data = SimpleNamespace(features=0, cast_column=0, __iter__=0)
    with pytest.raises(DataError, match=r"Give one of its datasets: data\['train'\]"):
        open_records({"train": data})


def test_a_list_of_arrays_is_x_and_y(tmp_path):
    def lists():
        yield from ([x, x[:1]] for x in X)

    (x, y), *_ = open_records(lists, batched=False).batches(0, 6, 6, shuffle=False, seed=0, epoch=0)
    assert (x.shape, y.shape) == ((6, 2), (6, 1))
    schema = write(lists, tmp_path / "data", split="all=1", batched=False).schema
    assert [(each.name, each.shape) for each in schema.features] == [("x", (2,)), ("label", (1,))]
