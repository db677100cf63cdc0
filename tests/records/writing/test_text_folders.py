"""Class folders of .txt files."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tfdist.errors import DataError
from tfdist.records import load_manifest, read, write
from tfdist.records.writing.raw_sources import read_raw
from tfdist.records.writing.roles import Asked


def fill(folder, **texts):
    """Writes texts by their paths, in which __ stands for a slash."""
    for name, text in texts.items():
        path = folder.joinpath(*name.split("__")).with_suffix(".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())


def test_texts_and_classes(tmp_path):
    fill(tmp_path, pos__b="gut\n", pos__a="größer", neg__c="")
    (tmp_path / "README.md").write_text("x")
    (tmp_path / "pos" / "Thumbs.db").write_text("x")
    columns = read_raw(tmp_path)
    assert [(f.name, f.dtype, f.classes) for f in columns.schema.features] == [
        ("text", "string", None),
        ("label", "int64", ("neg", "pos")),
    ]
    rows = columns.block(np.arange(3))
    assert rows["text"] == [b"", "größer".encode(), b"gut\n"]
    np.testing.assert_array_equal(rows["label"], [0, 1, 1])
    assert columns.splits is None
    assert columns.notes[0].startswith("2 files are left out as no text of a class: ")
    assert columns.notes[1] == "1 file is empty, and kept as such"


def test_splits(tmp_path):
    fill(tmp_path / "in", train__pos__a="1", train__neg__b="2", val__neg__c="3", test__pos__d="4")
    fill(tmp_path / "in", train__unsure__a="5")
    columns = read_raw(tmp_path / "in")
    assert list(columns.splits) == ["train", "validation", "test"]
    texts = columns.block(np.arange(columns.num_records))["text"]
    assert [texts[row] for row in columns.splits["validation"]] == [b"3"]
    assert any("class 'unsure'" in note and "in train alone" in note for note in columns.notes)
    write(tmp_path / "in", tmp_path / "out", num_shards=1)
    assert {n: s.records for n, s in load_manifest(tmp_path / "out").splits.items()} == {
        "train": 3,
        "validation": 1,
        "test": 1,
    }
    ((x, y),) = read(tmp_path / "out" / "test", batch_size=2)
    assert (x.numpy().tolist(), y.numpy().tolist()) == ([b"4"], [1])


def test_a_class_may_be_called_train(tmp_path):
    fill(tmp_path, train__a="1", plane__b="2")
    assert read_raw(tmp_path).schema.class_label.classes == ("plane", "train")


def test_encodings(tmp_path):
    fill(tmp_path, a__x="é".encode("cp1252"), a__y="é".encode("utf-16"), b__z="é")
    fill(tmp_path, b__zz="\ufeff\ufeffé")
    columns = read_raw(tmp_path)
    assert columns.block(np.arange(4))["text"] == ["é".encode()] * 4
    assert len(columns.notes) == 1
    assert columns.notes[0].startswith("1 file is not UTF-8, but read as Western European")


def test_what_is_no_text_is_listed(tmp_path):
    fill(tmp_path, **{f"a__{n:02d}": b"\0" for n in range(22)}, a__good="x")
    with pytest.raises(DataError, match=r"found 22 that are not, the first a/00\.txt \(bytes"):
        read_raw(tmp_path)
    columns = read_raw(tmp_path, Asked(skip_bad=True))
    assert columns.block(np.arange(1))["text"] == [b"x"]
    assert columns.notes[0].startswith("22 files are left out as bad")
    assert columns.left_out == {"unreadable text": 22}


@pytest.mark.timeout(60)
def test_a_pipe_is_no_text(tmp_path):
    """Reading it would wait for a writer for ever."""
    fill(tmp_path, a__x="1")
    os.mkfifo(tmp_path / "a/y.txt")
    with pytest.raises(DataError, match=r"a/y\.txt \(is no regular file\)"):
        read_raw(tmp_path)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"a__deep__x": "1", "a__y": "2"}, "the folder .*deep"),
        ({"train__a__x": "1", "other__a__y": "2"}, "no other, but found other, train"),
        ({"train__a__x": "1", "training__a__y": "2"}, "but found train, training"),
    ],
)
def test_folders_that_are_not_so(tmp_path, texts, message):
    fill(tmp_path, **texts)
    with pytest.raises(DataError, match=message):
        read_raw(tmp_path)


def test_a_class_without_a_text(tmp_path):
    fill(tmp_path, a__x="1")
    (tmp_path / "b").mkdir()
    with pytest.raises(DataError, match="every class folder must have a text, but found none in"):
        read_raw(tmp_path)


def test_hidden_classes_and_texts_are_told(tmp_path):
    fill(tmp_path, java__a="x", python__a="y")
    for name in (".net/a.txt", "java/.b.txt", "java/._a.txt", ".git/config", ".DS_Store"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("z")
    columns = read_raw(tmp_path)
    assert columns.num_records == 2
    (note,) = columns.notes
    assert note.startswith("2 files are left out as no text of a class: ")
    assert ".net" in note
    assert "java/.b.txt" in note
