"""What --class-weight is given."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tfdist.errors import DataError, OptionError, TfdistError
from tfdist.records.writing.writer import write
from tfdist.runs.class_weights import class_weights, readable_again

_WHOLE = {"split": "train=1", "num_shards": 1}


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> str:
    """Records of the classes 0, 1 and 3: 2, 6 and 4 of them."""
    folder = tmp_path_factory.mktemp("data")
    write(
        (np.zeros((12, 2), np.float32), np.repeat([0, 1, 3], [2, 6, 4])), folder / "data", **_WHOLE
    )
    return str(folder / "data" / "train")


def test_balanced_classes_count_alike(split):
    weights = class_weights("balanced", split)
    assert weights == {"0": 2.0, "1": pytest.approx(2 / 3), "3": 1.0}
    assert sum(weights[c] * n for c, n in (("0", 2), ("1", 6), ("3", 4))) == pytest.approx(12)


def test_ways_to_write_them(split, tmp_path):
    (tmp_path / "weights.json").write_text(json.dumps({"0": 1, "1": 2, "3": 2.5}))
    for given in ("0=1, 1=2, 3=2.5", str(tmp_path / "weights.json"), {0: 1, 1: 2, 3: 2.5}):
        assert class_weights(given, split) == {"0": 1.0, "1": 2.0, "3": 2.5}


def test_classes_by_name(tmp_path):
    rows = [{"x": float(n), "kind": "cat" if n % 3 else "dog"} for n in range(12)]
    write(rows, tmp_path / "data", label="kind", **_WHOLE)
    split = str(tmp_path / "data" / "train")
    assert class_weights("dog=2,cat=1", split) == {"0": 1.0, "1": 2.0}
    with pytest.raises(OptionError, match=r"found 'cow'. Choose of cat, dog"):
        class_weights("cow=2", split)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("4=1", "must name classes of the data, 0 to 3, but found 4"),
        ("-1=1", "must name classes"),
        ("0=1,3=2", "a weight for each class of the data, but found none for 1. Add 1=1"),
        ("0=much", "class_weight of 0 must be a number"),
        ("0=-1", "class_weight of 0 must be a number"),
        ("nowhere.json", "must be balanced, CLASS=WEIGHT"),
        (3, "must be balanced, CLASS=WEIGHT"),
        ({}, "must name classes of the data"),
    ],
)
def test_what_cannot_be(given, words, split):
    with pytest.raises(TfdistError, match=words):
        class_weights(given, split)


@pytest.mark.parametrize(
    ("text", "words"), [('{"0": 1, "0": 2}', "'0' twice"), ("0=1,0=2", "class 0 twice")]
)
def test_a_class_that_is_told_twice_is_refused(text, words, split, tmp_path):
    (tmp_path / "twice.json").write_text(text)
    given = str(tmp_path / "twice.json") if text[0] == "{" else text
    with pytest.raises(OptionError, match=words):
        class_weights(given, split)


def test_a_file_nested_without_end_is_unreadable(split, tmp_path):
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(TfdistError, match=r"of which reading says: too many levels"):
        class_weights(str(tmp_path / "deep.json"), split)


def test_labels_that_are_no_classes_have_no_balance(tmp_path):
    write((np.zeros((4, 2), np.float32), np.zeros(4, np.float32)), tmp_path / "data", **_WHOLE)
    with pytest.raises(DataError, match="no numbers of classes"):
        class_weights("balanced", str(tmp_path / "data" / "train"))


def test_classes_whose_names_are_numbers_of_others_are_written_by_name(tmp_path):
    rows = [{"x": float(n), "stars": f"{n % 11}"} for n in range(22)]
    write(rows, tmp_path / "data", label="stars", **_WHOLE)
    split = str(tmp_path / "data" / "train")
    given = {str(name): 1.0 + name for name in range(11)}
    again = ",".join(f"{name}={value}" for name, value in readable_again(given, split).items())
    assert class_weights(again, split) == class_weights(given, split)
    commas = [{"x": float(n), "kind": "a, b" if n % 2 else "c"} for n in range(12)]
    write(commas, tmp_path / "other", label="kind", **_WHOLE)
    weights = readable_again({"a, b": 2, "c": 1}, str(tmp_path / "other" / "train"))
    assert weights == {"0": 2.0, "c": 1.0}
    mixed = [{"x": float(n), "kind": "a, b" if n % 2 else "1"} for n in range(12)]
    write(mixed, tmp_path / "mixed", label="kind", **_WHOLE)
    with pytest.raises(OptionError, match="that can be told by name or number"):
        readable_again({"a, b": 2, "1": 1}, str(tmp_path / "mixed" / "train"))
