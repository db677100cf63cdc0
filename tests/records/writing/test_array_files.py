"""Arrays in files: .npy, folders of them, .npz, and the layouts of Keras' data sets."""

from __future__ import annotations

import codecs
import os
import pickle
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


TOKENS = [[1, 14, 300000], [], [7] * 200, [2**40, -5]]


def pickled(rows, protocol=4):
    """The bytes of an array of objects, as numpy.save writes them with a protocol of pickle."""
    array = np.empty(len(rows), object)
    array[:] = rows
    return pickle.dumps(array, protocol)


def save_objects(path, payload, num_rows=4):
    """Writes an .npy file whose array of objects is a payload."""
    with open(path, "wb") as file:
        header = {"descr": "|O", "fortran_order": False, "shape": (num_rows,)}
        np.lib.format.write_array_header_1_0(file, header)
        file.write(payload)
    return path


# As NumPy under Python 2 wrote it: "dtype" is called with numbers, not with booleans.
PYTHON_2 = (
    b"\x80\x02cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85U\x01b"
    b"\x87Rq\x03(K\x01K\x02\x85cnumpy\ndtype\nq\x04U\x02O8K\x00K\x01\x87Rq\x05(K\x03U\x01|NNN"
    b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK?tb\x89]q\x06(]q\x07(K\x01K\x02e]q\x08K\x07aetb."
)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_rows_of_unequal_lengths_are_read_without_running_anything(tmp_path, protocol):
    """Lists, arrays of either byte order, numbers of NumPy's and text, as each NumPy names them."""
    arrays = [np.arange(n, dtype=dtype) for n, dtype in enumerate(["<i8", ">i2", "f4", "u1"])]
    numbers = [[np.int64(3), 4], [np.float32(0.5)], [], [1]]
    words = ["one", "", "drei", "vier"]
    for rows in (TOKENS, arrays, numbers, words):
        payload = pickled(rows, protocol)
        for module in (b"numpy.core.multiarray", b"numpy._core.multiarray"):
            if protocol < 4:  # Later ones say how long the name is.
                known = [b"numpy.core.multiarray", b"numpy._core.multiarray"]
                (there,) = [name for name in known if name in payload]
                payload = payload.replace(there, module)
            columns = read_raw(save_objects(tmp_path / "x.npy", payload))
            found = rows_of(columns)["x"]
            if rows is words:
                assert found == [word.encode() for word in words]
            else:
                for row, wanted in zip(found, rows, strict=True):
                    np.testing.assert_array_equal(row, wanted)


def test_keras_imdb(tmp_path):
    """Its layout: lists of word numbers in arrays of objects, of which Keras reads them."""
    rows = np.empty(4, object)
    rows[:] = TOKENS
    path = save(tmp_path, x_train=rows, y_train=Y[:4], x_test=rows[:2], y_test=Y[:2])
    manifest = write(path, tmp_path / "data", num_shards=1)
    assert {name: split.records for name, split in manifest.splits.items()} == {
        "train": 4,
        "test": 2,
    }
    assert [feature.name for feature in manifest.schema.features] == ["x", "label"]
    assert check(tmp_path / "data") == []
    columns = read_raw(save_objects(tmp_path / "x.npy", PYTHON_2, 2))
    assert [row.tolist() for row in rows_of(columns)["x"]] == [[1, 2], [7]]


class _Runs:
    def __init__(self, call, *arguments):
        self.made = (call, arguments)

    def __reduce__(self):
        return self.made


@pytest.mark.parametrize(
    ("payload", "told"),
    [
        (pickled([_Runs(os.system, "touch struck")] * 4), r"calls (posix|nt)\.system"),
        (pickled([_Runs(eval, "open('struck', 'w')")] * 4), r"calls builtins\.eval"),
        (pickle.dumps(_Runs(codecs.open, "struck", "w")), r"calls codecs\.open"),
        (pickle.dumps(_Runs(np.memmap, "struck", "u1", "w+")), r"calls numpy\.memmap"),
        (b"\x80\x04\x8c\x05numpy\x8c\x0cndarray.dump\x93.", r"calls numpy\.ndarray\.dump"),
        (b"c_codecs\nencode\n(Va\nVzip\ntR.", "bytes in 'zip'"),
        # The state of a dtype, or of what is called, is not the file's to set.
        (b"cnumpy\ndtype\n}Vx\nI1\nsb.", "changes what it calls"),
        (b"cnumpy\ndtype\n(VV8\nI0\nI1\ntR.", "dtype 'V8'"),
        (pickled([{"a": 1}] * 4), "a row with a dict"),
        (pickled([1, 2, 3]), r"3 rows where the header says \[4\]"),
        (pickled([[7] * 100] * 4), "more values than the file has bytes"),
        (pickled(TOKENS)[:-9], "no pickle of an array"),
        (b"I1\n.", "a pickled int"),
        (b"", "no pickle of an array"),
    ],
)
@pytest.mark.parametrize("is_npz", [True, False])
def test_every_other_pickle_is_refused_and_none_is_run(
    tmp_path, monkeypatch, payload, told, is_npz
):
    monkeypatch.chdir(tmp_path)
    source = save_objects(tmp_path / "x.npy", payload)
    if is_npz:
        with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
            archive.write(source, "x.npy")
        source = tmp_path / "a.npz"
    with pytest.raises(DataError, match=rf"{told}.*\.jsonl.*allow_pickle=True"):
        read_raw(source)
    assert not (tmp_path / "struck").exists()


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


def test_two_members_of_one_name(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 3)), y=np.arange(2))
    np.save(tmp_path / "x.npy", np.ones((2, 3)))
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive:
        archive.write(tmp_path / "x.npy", "x")
    with pytest.raises(DataError, match="an error in 'x': two arrays are called 'x'"):
        read_raw(tmp_path / "a.npz")


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
