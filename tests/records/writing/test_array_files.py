"""Arrays in files: .npy, folders of them, .npz, and the layouts of Keras' data sets."""

from __future__ import annotations

import zipfile

import numpy as np
import pytest

from tfdist.errors import DataError
from tfdist.records import check, load_manifest, write
from tfdist.records.writing import array_files
from tfdist.records.writing.raw_sources import read_raw
from tfdist.records.writing.roles import Asked

X = np.arange(40 * 12, dtype=np.uint8).reshape(40, 4, 3)
Y = np.arange(40) % 3


def rows_of(columns, numbers=None):
    return columns.block(np.arange(columns.num_records) if numbers is None else numbers)


def save(tmp_path, **arrays):
    np.savez(tmp_path / "a.npz", **arrays)
    return tmp_path / "a.npz"


def test_one_array_has_no_label(tmp_path):
    np.save(tmp_path / "photos.npy", X)
    columns = read_raw(tmp_path / "photos.npy")
    assert [(f.name, f.role) for f in columns.schema.features] == [("x", "input")]
    assert "no label" in columns.notes[0]
    np.testing.assert_array_equal(rows_of(columns)["x"], X)


def test_a_folder_of_arrays(tmp_path):
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", Y)
    np.save(tmp_path / "age.npy", Y * 2.0)
    with pytest.raises(DataError, match="array age"):
        read_raw(tmp_path)
    columns = read_raw(tmp_path, Asked(label="y", inputs="x,age"))
    assert [(f.name, f.role) for f in columns.schema.features] == [
        ("x", "input"),
        ("age", "input"),
        ("y", "label"),
    ]


SPLITS = {"x_train": X, "y_train": Y, "x_test": X[:10] + 1, "y_test": Y[:10]}
NAMES = [
    (SPLITS, ["train", "test"], ["x", "label"]),
    ({**SPLITS, "x_val": X[:5], "y_val": Y[:5]}, ["train", "test", "validation"], ["x", "label"]),
    (
        {
            "train_images": X,
            "train_labels": Y,
            "val_images": X[:10] + 1,
            "val_labels": Y[:10],
        },
        ["train", "validation"],
        ["images", "labels"],
    ),
    (
        {"x_train": X, "y_train": Y, "x_eval": X[:10] + 1, "y_eval": Y[:10]},
        ["train", "validation"],
        ["x", "label"],
    ),
]


def test_two_words_for_one_split(tmp_path):
    with pytest.raises(DataError, match=r"'validation' must have one array 'x', .*x_dev beside"):
        read_raw(save(tmp_path, x_train=X, x_val=X[:5], x_dev=X[:5]))


@pytest.mark.parametrize(("arrays", "splits", "names"), NAMES)
def test_splits_of_keras(tmp_path, arrays, splits, names):
    columns = read_raw(save(tmp_path, **arrays))
    assert list(columns.splits) == splits
    assert [feature.name for feature in columns.schema.features] == names
    assert columns.schema.class_label is not None
    second = rows_of(columns, columns.splits[splits[1]])
    np.testing.assert_array_equal(second[names[0]], X[:10] + 1)
    np.testing.assert_array_equal(second[names[1]], Y[:10])


def test_mnist_npz_keeps_its_test_set(tmp_path):
    manifest = write(save(tmp_path, **SPLITS), tmp_path / "data")
    assert {name: split.records for name, split in manifest.splits.items()} == {
        "train": 40,
        "test": 10,
    }
    assert check(tmp_path / "data") == []
    manifest = write(tmp_path / "a.npz", tmp_path / "anew", split="train=4,validation=1")
    assert [split.records for split in manifest.splits.values()] == [40, 10]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x_test": X[:9]}, "'y of test' 10"),
        ({"x_test": X[:10, :2]}, r"'x' .* alike in all splits.*\[4, 3\].*\[2, 3\]"),
        ({"x_test": X[:10].astype(np.float32)}, "uint8 .* float32"),
        ({"z_test": Y[:10]}, "x, y in train, x, y, z in test"),
    ],
)
def test_splits_that_do_not_match(tmp_path, changed, message):
    with pytest.raises(DataError, match=message):
        read_raw(save(tmp_path, **{**SPLITS, **changed}))


def test_arrays_that_are_named_are_not_splits(tmp_path):
    path = save(tmp_path, **{name: array[:10] for name, array in SPLITS.items()})
    columns = read_raw(path, Asked(label="y_train", inputs="x_train"))
    assert columns.splits is None
    assert [feature.name for feature in columns.schema.features] == ["x_train", "y_train"]
    columns = read_raw(path, Asked(label="y"))
    assert list(columns.splits) == ["train", "test"]


def test_text(tmp_path):
    words = np.array(["a", "bb", "ccc", "dd"] * 10)
    columns = read_raw(save(tmp_path, x=words, y=np.array(["cat", "dog"] * 20)))
    text, label = columns.schema.features
    assert (text.dtype, text.shape) == ("string", ())
    assert label.classes == ("cat", "dog")
    assert rows_of(columns)["x"][:3] == [b"a", b"bb", b"ccc"]


@pytest.mark.parametrize("kind", ["npz", "npy", "folder"])
def test_objects_are_refused_with_another_way(tmp_path, kind):
    ragged = np.empty(2, object)
    ragged[:] = [np.arange(2), np.arange(3)]
    if kind == "npz":
        source = save(tmp_path, x=ragged, y=Y[:2])
    else:
        (tmp_path / "d").mkdir()
        np.save(tmp_path / "d" / "x.npy", ragged)
        source = tmp_path / "d" / "x.npy" if kind == "npy" else tmp_path / "d"
    with pytest.raises(DataError, match=r"rows of unequal lengths.*\.jsonl"):
        read_raw(source)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_members_that_stay_in_their_file(tmp_path, monkeypatch, method):
    monkeypatch.setattr(array_files, "_SMALL_BYTES", 100)
    wide = np.asfortranarray(np.arange(600.0).reshape(40, 15))
    with zipfile.ZipFile(tmp_path / "a.npz", "w", method) as archive:
        for name, values in {"x": X, "wide": wide, "y": Y}.items():
            np.save(tmp_path / "one.npy", values)
            archive.write(tmp_path / "one.npy", f"{name}.npy")
    columns = read_raw(tmp_path / "a.npz", Asked(label="y"))
    read = rows_of(columns)
    np.testing.assert_array_equal(read["x"], X)
    np.testing.assert_array_equal(read["wide"], wide)
    np.testing.assert_array_equal(read["y"], Y)
    is_unpacked = any("temporary file" in note for note in columns.notes)
    assert is_unpacked == (method == zipfile.ZIP_DEFLATED)
    assert not isinstance(columns.columns["x"], np.ndarray)


def test_a_damaged_member_that_stays_in_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(array_files, "_SMALL_BYTES", 100)
    path = save(tmp_path, x=X, y=Y)
    data = bytearray(path.read_bytes())
    data[400] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="CRC-32"):
        read_raw(path)


def test_a_file_that_is_no_array(tmp_path):
    (tmp_path / "a.npy").write_text("hello")
    with pytest.raises(DataError, match="must be an array"):
        read_raw(tmp_path / "a.npy")


def test_shards_of_a_memory_map_are_those_of_the_array(tmp_path):
    values = np.random.default_rng(0).random((200, 8)).astype(np.float32)
    np.save(tmp_path / "x.npy", values)
    write((np.load(tmp_path / "x.npy", mmap_mode="r"), np.arange(200)), tmp_path / "a")
    write((values, np.arange(200)), tmp_path / "b")
    assert load_manifest(tmp_path / "a") == load_manifest(tmp_path / "b")
