"""What is read once, record by record: every record is there, each in its split and its order."""

from __future__ import annotations

import io
import itertools
import sys
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tfdist.errors import DataError, OptionError
from tfdist.records import check, load_manifest, write
from tfdist.records.reading.reader import open_records
from tfdist.records.writing.streams import writer as stream_writer

NUM = 60
X = np.arange(NUM * 3, dtype=np.float32).reshape(NUM, 3)
Y = np.arange(NUM) % 7
DATASET = tf.data.Dataset.range(8)


def read(folder, split="train"):
    """Returns the records of a split as x, y, ... in whole arrays."""
    records = open_records(f"{folder}/{split}")
    batches = records.batches(0, records.num_records, 16, shuffle=False, seed=0, epoch=0)
    read = [tf.nest.map_structure(lambda leaf: leaf.numpy(), batch) for batch in batches]
    return tf.nest.map_structure(lambda *parts: np.concatenate(parts), *read)


def by_first(x, *others):
    order = np.argsort(x.reshape(len(x), -1)[:, 0])
    return [part[order] for part in (x, *others)]


@pytest.fixture(params=["whole", "streamed"])
def size(request, monkeypatch):
    """Streams that fit into memory, and the same where next to nothing does."""
    if request.param == "streamed":
        monkeypatch.setattr(stream_writer, "HEAD_BYTES", 200)
    return request.param


def records():
    yield from zip(X, Y, strict=True)


class Batches(keras.utils.Sequence):  # Keras 3 calls the same class PyDataset.
    def __len__(self):
        return -(-NUM // 8)

    def __getitem__(self, n):
        return X[n * 8 : n * 8 + 8], Y[n * 8 : n * 8 + 8]


SOURCES = {
    "function": lambda: records,
    "generator": records,
    "dicts": lambda: ({"x": x, "y": y} for x, y in zip(X, Y, strict=True)),
    "list of dicts": lambda: [{"x": x.tolist(), "y": int(y)} for x, y in zip(X, Y, strict=True)],
    "list of tuples": lambda: [(x.tolist(), int(y)) for x, y in zip(X, Y, strict=True)],
    "sequence": Batches,
    "dataset": lambda: tf.data.Dataset.from_tensor_slices((X, Y)),
    "batches": lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(8),
    "output_types": lambda: tf.data.Dataset.from_generator(
        records, output_types=(tf.float32, tf.int64)
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_every_record_once(tmp_path, size, name):
    manifest = write(SOURCES[name](), tmp_path / "data", split="train=4,test=1", num_shards=2)
    assert check(tmp_path / "data") == []
    assert {name: split.records for name, split in manifest.splits.items()} == {
        "train": 48,
        "test": 12,
    }
    assert all(len(split.shards) == 2 for split in manifest.splits.values())
    parts = [read(tmp_path / "data", split) for split in ("train", "test")]
    x, y = by_first(*(np.concatenate(both) for both in zip(*parts, strict=True)))
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)
    total = {}
    for split in manifest.splits.values():
        for number, count in split.class_counts.items():
            total[number] = total.get(number, 0) + count
    assert total == dict(enumerate(np.bincount(Y).tolist()))
    assert manifest.layout is not None
    assert (manifest.mixing is not None) == (size == "streamed")
    assert load_manifest(tmp_path / "data") == manifest


def test_the_seed_decides_where_records_go(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_writer, "HEAD_BYTES", 200)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write(records, tmp_path / name, seed=seed, num_shards=2)
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "abc"
    ]
    assert files[0] == files[1]
    assert files[0] != files[2]


def photo(number, size=(6, 4), mode="RGB", kind="JPEG"):
    file = io.BytesIO()
    Image.new(mode, size, number if mode == "L" else (number, number, 0)).save(file, kind)
    return file.getvalue()


def test_files_of_images_are_kept_byte_for_byte(tmp_path, size):
    files = [photo(n, (6 + n % 2, 4), kind="PNG") for n in range(20)]
    source = ({"image": file, "label": "ab"[n % 2]} for n, file in enumerate(files))
    manifest = write(source, tmp_path / "data", split="train=1", num_shards=2)
    image, label = manifest.schema.features
    assert (image.encoding, image.shape, image.dtype) == ("png", (None, None, 3), "uint8")
    assert label.classes == ("a", "b")
    data = b"".join(path.read_bytes() for path in (tmp_path / "data").glob("*.tfrecord"))
    assert all(data.count(file) == 1 for file in files)
    assert check(tmp_path / "data") == []


def test_images_of_one_size_and_those_of_pillow(tmp_path, size):
    source = ((Image.new("P", (5, 3)), n) for n in range(20))
    image = write(source, tmp_path / "data").schema.features[0]
    assert (image.encoding, image.shape) == ("png", (3, 5, 3))


def test_lengths_that_differ_and_text(tmp_path, size):
    source = [
        {
            "tokens": list(range(n % 5)),
            "words": [f"w{n}\0"] * (n % 3),
            "pair": [f"p{n}\0", ""],
            "title": f"t{n}",
            "y": n,
        }
        for n in range(30)
    ]
    manifest = write(source, tmp_path / "data", label="y", split="train=1", num_shards=2)
    found = {f.name: (f.dtype, f.shape, f.longest) for f in manifest.schema.features}
    assert found == {
        "tokens": ("int64", (None,), 4),
        "words": ("string", (None,), 2),
        "pair": ("string", (2,), None),
        "title": ("string", (), None),
        "y": ("int64", (), None),
    }
    x, y = read(tmp_path / "data")
    assert sorted(y) == list(range(30))
    parts = (x["tokens"], x["words"], x["pair"], x["title"])
    for tokens, words, pair, title, n in zip(*parts, y, strict=True):
        assert tokens.tolist() == [*range(n % 5)] + [0] * (4 - n % 5)
        assert words.tolist() == [f"w{n}\0".encode()] * (n % 3) + [b""] * (2 - n % 3)
        assert pair.tolist() == [f"p{n}\0".encode(), b""]
        assert title == f"t{n}".encode()


@pytest.mark.parametrize("kind", ["map", "ragged tensor"])
def test_datasets_whose_records_differ_in_length(tmp_path, size, kind):
    if kind == "map":
        dataset = tf.data.Dataset.range(1, 21).map(lambda n: (tf.range(n % 4 + 1), n))
    else:
        rows = tf.ragged.constant([[*range(n % 4 + 1)] for n in range(1, 21)], dtype=tf.int64)
        dataset = tf.data.Dataset.from_tensor_slices((rows, tf.range(1, 21)))
    manifest = write(dataset, tmp_path / "data", split="train=1", num_shards=1)
    assert manifest.schema.features[0].longest == 4
    x, y = read(tmp_path / "data")
    for row, n in zip(x, y, strict=True):
        assert row.tolist() == [*range(n % 4 + 1)] + [0] * (3 - n % 4)


def test_a_larger_number_than_all_before(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_writer, "HEAD_BYTES", 200)
    numbers = [*range(600), 1 << 40, -5]
    source = ({"x": np.array([n]), "y": 0.5} for n in numbers)
    manifest = write(source, tmp_path / "data", split="train=1", num_shards=2)
    assert manifest.layout is None  # Not all records are as long.
    assert check(tmp_path / "data") == []
    x, y = read(tmp_path / "data")
    assert sorted(x[:, 0]) == sorted(numbers)
    assert set(y) == {0.5}


def test_classes_that_come_late(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_writer, "HEAD_BYTES", 200)
    source = ({"x": float(n), "label": f"c{n // 300}"} for n in range(900))
    manifest = write(source, tmp_path / "data", split="train=1", num_shards=2)
    assert manifest.schema.class_label.classes == ("c0", "c1", "c2")
    assert manifest.splits["train"].class_counts == {0: 300, 1: 300, 2: 300}
    x, y = read(tmp_path / "data")
    np.testing.assert_array_equal(y, x // 300)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ((np.zeros(4, np.float32), 0), r"shape \[3\] of float32.*shape \[4\].*record 570"),
        ((np.zeros(3), 0), r"float32.*float64 in record 570"),
        (([0.5, 2**53 + 1, 1], 0), r"9007199254740993 in record 570"),
        ((np.zeros(3, np.float32), -1), r"-1 in 'label', record 570"),
        ((np.full(3, np.nan, np.float32), 0), r"NaN in array 'x', record 570"),
        ((np.full(3, np.inf, np.float32), 0), r"finite.* inf in array 'x', record 570"),
        ((np.zeros(3, np.float32), "a"), r"text in record 570"),
        ((np.zeros(3, np.float32),), r"2 parts.*1 in record 570"),
    ],
)
def test_a_record_that_is_not_as_the_first(tmp_path, monkeypatch, record, message):
    monkeypatch.setattr(stream_writer, "HEAD_BYTES", 200)

    def source():
        for n in range(600):
            yield record if n == 570 else (X[n % NUM], n % 3)

    with pytest.raises(DataError, match=message):
        write(source, tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("odd", [photo(0)[:200], [1], np.zeros(3), "a"])
def test_an_image_that_is_none(tmp_path, monkeypatch, odd):
    monkeypatch.setattr(stream_writer, "HEAD_BYTES", 200)
    source = ({"image": photo(0) if n != 300 else odd} for n in range(301))
    with pytest.raises(DataError, match="record 300"):
        write(source, tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("first", [[1, 2], ["a", "b"]])
@pytest.mark.parametrize("odd", [3, "abc", [[1], [2]]])
def test_a_list_that_is_none(tmp_path, monkeypatch, first, odd):
    monkeypatch.setattr(stream_writer, "HEAD_BYTES", 200)
    source = ({"x": first[: n % 3] if n != 570 else odd, "a": n} for n in range(600))
    with pytest.raises(DataError, match=r"\[n\].*record 570"):
        write(source, tmp_path / "data")


def test_what_the_source_raises_is_passed_on(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_writer, "HEAD_BYTES", 200)

    def source():
        for n in range(400):
            yield X[n % NUM], 0
        raise FileNotFoundError("theirs")

    with pytest.raises(FileNotFoundError, match="theirs"):
        write(source, tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        (lambda: iter(()), {}, DataError, "at least one record"),
        (lambda: iter([X[:3], X[3:6]]), {}, DataError, "batched=True or batched=False"),
        (records, {"label": "y"}, DataError, "must go with records that are dicts"),
        (records, {"stratify": True}, OptionError, "stratify must go with a source whose records"),
        (records, {"clients": 3}, OptionError, "clients and partition must go with"),
        (lambda: [{"x": 1.0, "y1": 1, "y2": 2}], {}, DataError, "y1, y2"),
        (lambda: 3, {}, DataError, "must return a generator"),
        (lambda: iter([(1, 2, 3, 4)]), {}, DataError, "a tuple of 4"),
        (lambda: iter([{0: 1.0}]), {}, DataError, "names of text, but found the names 0"),
        (lambda: iter([({"label": 1.0}, 1)] * 9), {}, DataError, "name of its own.* label, label"),
        (lambda: iter([(1.0, 1)]), {"batched": True}, DataError, "a number alone.* in batch 0"),
        (lambda: iter([("\ud83d", 0)] * 9), {}, DataError, "half of a pair of surrogates"),
        (lambda: iter([(1.0, b"\xff")]), {}, DataError, "label 'label' must be UTF-8"),
        (lambda: DATASET.map(lambda x: ({"a": {"b": x}}, x)), {}, DataError, "a dict as 'a'"),
        (lambda: DATASET.window(2), {}, DataError, "a dataset as 'x'"),
        (records, {"num_shards": 51}, DataError, "50 records for 51 shards"),
        (records, {"split": "train=1,tiny=0.0001"}, DataError, "split 'tiny'"),
    ],
)
def test_streams_that_cannot_be_written(tmp_path, monkeypatch, source, options, error, message):
    monkeypatch.setattr(stream_writer, "HEAD_BYTES", 200)
    with pytest.raises(error, match=message):
        write(source, tmp_path / "data", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_stream_that_fits_into_memory_can_be_stratified_and_dealt(tmp_path):
    manifest = write(records, tmp_path / "a", clients=3, stratify=True)
    assert len(manifest.splits["train"].clients) == 3
    source = ({"x": x, "y": int(y), "user": f"u{n % 3}"} for n, (x, y) in enumerate(records()))
    manifest = write(source, tmp_path / "b", partition="by:user", split="train=1")
    assert list(manifest.splits["train"].clients) == ["u0", "u1", "u2"]
    assert [feature.name for feature in manifest.schema.features] == ["x", "y"]


def test_progress_of_what_has_no_known_length(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_writer, "HEAD_BYTES", 200)
    seen = []
    write(records, tmp_path / "a", progress=lambda *now: seen.append(now))
    assert seen[-1] == (NUM, None)
    dataset = tf.data.Dataset.from_tensor_slices((X, Y))
    write(dataset, tmp_path / "b", progress=lambda *now: seen.append(now))
    assert seen[-1] == (NUM, NUM)


class FakeImage:
    """A feature of Hugging Face's ``datasets``."""

    def __init__(self, decode=True):
        self.decode = decode


FakeImage.__name__ = "Image"


class FakeClasses:
    dtype, names = "int64", ["cat", "dog"]


class FakeDataset:
    """What tfdist uses of a ``datasets.Dataset``, which the tests do not install."""

    def __init__(self, rows):
        self.rows = rows
        self.features = {"image": FakeImage(), "label": FakeClasses()}

    def cast_column(self, name, feature):
        assert not feature.decode
        cast = FakeDataset(self.rows)
        cast.features[name] = feature
        return cast

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        assert "image" not in self.features or not self.features["image"].decode
        return iter(self.rows)


def test_hugging_face(tmp_path, size):
    rows = [{"image": {"bytes": photo(n), "path": None}, "label": n % 2} for n in range(20)]
    source = {"train": FakeDataset(rows[:15]), "test": FakeDataset(rows[15:])}
    manifest = write(source, tmp_path / "data", num_shards=1)
    assert {name: split.records for name, split in manifest.splits.items()} == {
        "train": 15,
        "test": 5,
    }
    assert manifest.schema.class_label.classes == ("cat", "dog")
    data = (tmp_path / "data/test-00000-of-00001.tfrecord").read_bytes()
    assert all(data.count(row["image"]["bytes"]) == 1 for row in rows[15:])
    manifest = write(source, tmp_path / "anew", num_shards=1, split="train=1,validation=1")
    assert manifest.splits["validation"].records == 10
    manifest = write(source, tmp_path / "of its own", num_shards=1, split="train=1,test=1")
    assert manifest.splits["test"].records == 10


@pytest.mark.parametrize("word", ["dev", "eval", "valid"])
def test_splits_of_hugging_face_are_called_as_everywhere(tmp_path, size, word):
    """Else a training would have no validation."""
    rows = [{"image": {"bytes": photo(n), "path": None}, "label": n % 2} for n in range(4)]
    source = {"train": FakeDataset(rows), word: FakeDataset(rows)}
    assert list(write(source, tmp_path / "data", num_shards=1).splits) == ["train", "validation"]


def test_splits_beside_a_validation_stay_their_own(tmp_path, size):
    rows = [{"image": {"bytes": photo(n), "path": None}, "label": n % 2} for n in range(4)]
    source = {name: FakeDataset(rows) for name in ("train", "validation", "eval")}
    assert list(write(source, tmp_path / "data", num_shards=1).splits) == list(source)


@pytest.mark.parametrize("kind", ["bool", "int64", "float32"])
def test_missing_values_of_a_column_are_no_values(tmp_path, size, kind):
    rows = [{"x": float(n), "label": None if n % 4 == 3 else n % 2} for n in range(8)]
    source = FakeDataset([])
    source.rows = rows
    source.features = {"x": SimpleNamespace(dtype="float32"), "label": SimpleNamespace(dtype=kind)}
    with pytest.raises(DataError, match=r"'?label'?.*(None|missing|NaN|nan)"):
        write(source, tmp_path / "data", split="train=1", num_shards=1)


def test_a_missing_value_in_a_late_list(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_writer, "HEAD_BYTES", 1)
    rows = iter([{"x": [True, False], "label": 0}, {"x": [True], "label": 1}] * 4)
    rows = itertools.chain(rows, [{"x": [True, None], "label": 0}])
    with pytest.raises(DataError, match=r"'x'.*record 8"):
        write(rows, tmp_path / "data", split="train=1", num_shards=1)


def test_two_datasets_of_one_split(tmp_path):
    source = {"val": FakeDataset([]), "validation": FakeDataset([])}
    with pytest.raises(DataError, match="each split must have one dataset"):
        write(source, tmp_path / "data")


class ClassLabel:
    names = ("cat", "dog")


class Sequence:
    def __init__(self):
        self.feature = {"bbox": "BBoxFeature", "kind": ClassLabel()}


class FakeBuilder:
    """What tfdist uses of a builder of TensorFlow Datasets, which the tests do not install."""

    def __init__(self, sizes, supervised=("image", "label")):
        features = {
            "id": "Text",
            "image": FakeImage(),
            "label": ClassLabel(),
            "objects": Sequence(),
        }
        splits = {name: SimpleNamespace(num_examples=size) for name, size in sizes.items()}
        self.info = SimpleNamespace(
            name="pets", splits=splits, features=features, supervised_keys=supervised
        )

    def download_and_prepare(self):
        raise AssertionError("this is the user's to do")

    def as_dataset(self, *, split, shuffle_files, decoders):
        assert not shuffle_files
        assert decoders == {"image": "as it is"}
        size = self.info.splits[split].num_examples

        def elements():
            for n in range(size):
                boxes = {"bbox": np.full((n % 3, 4), n / 20, np.float32), "kind": [1] * (n % 3)}
                yield {"id": f"{n}", "image": photo(n), "label": n % 2, "objects": boxes}

        boxes = {"bbox": tf.TensorSpec((None, 4)), "kind": tf.TensorSpec((None,), tf.int64)}
        signature = {
            "id": tf.TensorSpec((), tf.string),
            "image": tf.TensorSpec((), tf.string),
            "label": tf.TensorSpec((), tf.int64),
            "objects": boxes,
        }
        return tf.data.Dataset.from_generator(elements, output_signature=signature)


@pytest.fixture
def tfds(monkeypatch):
    decode = SimpleNamespace(SkipDecoding=lambda: "as it is")
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", SimpleNamespace(decode=decode))


def test_tensorflow_datasets(tmp_path, size, tfds):
    builder = FakeBuilder({"train": 12, "val": 6})
    manifest = write(builder, tmp_path / "data", num_shards=1)
    assert check(tmp_path / "data") == []
    counts = {name: split.records for name, split in manifest.splits.items()}
    assert counts == {"train": 12, "validation": 6}
    assert [(f.name, f.role) for f in manifest.schema.features] == [
        ("image", "input"),
        ("label", "label"),
    ]
    assert manifest.schema.class_label.classes == ("cat", "dog")
    data = (tmp_path / "data/validation-00000-of-00001.tfrecord").read_bytes()
    assert all(data.count(photo(n)) == 1 for n in range(6))
    options = {"inputs": "image", "label": ["objects/bbox", "objects/kind"]}
    manifest = write(builder, tmp_path / "boxes", num_shards=1, **options)
    boxes, kinds = manifest.schema.of_role("label")
    assert (boxes.shape, boxes.longest, boxes.is_boxes) == ((None, 4), 2, True)
    assert (kinds.shape, kinds.classes) == ((None,), ("cat", "dog"))


def test_builders_that_cannot_be_written(tmp_path, tfds):
    with pytest.raises(DataError, match=r"Call builder\.download_and_prepare\(\) first"):
        write(FakeBuilder({}), tmp_path / "data")
    with pytest.raises(DataError, match=r"must be one of the builder's.*validation, dev"):
        write(FakeBuilder({"validation": 4, "dev": 4}), tmp_path / "data")
    with pytest.raises(DataError, match="looks like a label"):
        write(FakeBuilder({"train": 4}, supervised=None), tmp_path / "data", label="objects/kind")
    with pytest.raises(OptionError, match="batched must be said of a"):
        write(FakeBuilder({"train": 4}), tmp_path / "data", batched=True)


def test_photos_on_their_side_are_read_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:, 8:] = 255  # The right half comes to be the lower one.
    for kind, is_kept in (("JPEG", True), ("PNG", False)):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, kind, exif=exif, quality=95)
        source = ({"image": file.getvalue(), "label": n % 2} for n in range(4))
        manifest = write(source, tmp_path / kind, num_shards=1, split="train=1")
        image = manifest.schema.features[0]
        assert (image.shape, image.reading.upright) == ((16, 8, 3), is_kept)
        x, _ = read(tmp_path / kind)
        assert np.abs(x.astype(int) - np.rot90(pixels, -1)).max() < 12


def test_a_generator_may_fill_the_same_values_anew(tmp_path):
    def again():
        x, element = np.zeros(3, np.float32), {}
        for number in range(NUM):
            x[:] = X[number]
            element.update(x=x, y=number, words=["w"] * (number % 3 + 1))
            yield element

    def growing():
        tokens = []
        for number in range(5):
            tokens.append(number)
            yield tokens, number

    write(again, tmp_path / "again", split="train=1", label="y", inputs="x")
    x, y = read(tmp_path / "again")
    np.testing.assert_array_equal(np.sort(y), np.arange(NUM))
    np.testing.assert_array_equal(x, X[y])
    write(growing, tmp_path / "growing", split="train=1")
    tokens, last = read(tmp_path / "growing")
    for row, number in zip(tokens, last, strict=True):
        np.testing.assert_array_equal(row, [*range(number + 1)] + [0] * (4 - number))


def test_values_that_are_masked(tmp_path):
    def masked():
        for number in range(4):
            yield np.ma.array([1, 2], mask=[False, number == 3]), number

    with pytest.raises(DataError, match="an array of element 3 some values of which are masked"):
        write(masked, tmp_path / "data")


def test_batches_of_lists_of_unequal_lengths(tmp_path):
    def batches():
        for number in range(3):
            yield [[number], [number, 7]], [2 * number, 2 * number + 1]

    write(batches, tmp_path / "data", split="train=1", batched=True)
    x, y = read(tmp_path / "data")
    for row, number in zip(x, y, strict=True):
        np.testing.assert_array_equal(row, [number // 2, 7 * (number % 2)])


def test_text_of_tensors(tmp_path):
    write(lambda: ((tf.constant(f"t{n}"), n) for n in range(4)), tmp_path / "d", split="train=1")
    x, y = read(tmp_path / "d")
    assert x.tolist() == [f"t{n}".encode() for n in y]


def test_a_value_that_the_first_record_lacks_is_told(tmp_path, capsys):
    write(
        lambda: ({"x": n, "y": n % 2} | ({"z": 1} if n > 2 else {}) for n in range(6)),
        tmp_path / "data",
    )
    told = "'z' is left out: record 3 has it, the first has not"
    assert capsys.readouterr().out.count(told) == 1
