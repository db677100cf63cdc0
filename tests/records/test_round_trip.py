"""What is written is what TensorFlow, without tfdist, reads; and what our reader reads."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tfdist.records import load_manifest, open_records, write

RNG = np.random.default_rng(0)


def plain_examples(folder, split="train"):
    """The Examples of a split as any TensorFlow program reads them."""
    manifest = load_manifest(folder)
    files = [str(folder / shard.file) for shard in manifest.splits[split].shards]
    compression = "GZIP" if manifest.compression == "gzip" else ""
    return [
        tf.train.Example.FromString(record.numpy()).features.feature
        for record in tf.data.TFRecordDataset(files, compression)
    ]


def our_batches(source, **options):
    """All records, in order, as numpy arrays [records, ...]."""
    records = open_records(source, **options)
    batches = records.batches(0, records.num_records, 7, shuffle=False, seed=0, epoch=0)
    return tf.nest.map_structure(lambda *parts: np.concatenate(parts), *batches.as_numpy_iterator())


def both_paths(source):
    table, stream = our_batches(source, cache=True), our_batches(source, cache=False)
    tf.nest.map_structure(np.testing.assert_array_equal, table, stream)
    return table


ARRAYS = {
    "uint8": RNG.integers(0, 256, (30, 5, 4, 3), np.uint8),
    "uint16": RNG.integers(0, 1 << 16, (30, 3), np.uint16),
    "int8": RNG.integers(-128, 128, (30, 3), np.int8),
    "int16": RNG.integers(-9, 9, (30, 2, 2), np.int16),
    "int32": RNG.integers(-(1 << 31), 1 << 31, (30, 3), np.int32),
    "int32_scalar": RNG.integers(-(1 << 31), 1 << 31, 30, np.int32),
    "tokens": RNG.integers(0, 50_000, (30, 6)),
    "int64": RNG.integers(np.iinfo(np.int64).min, np.iinfo(np.int64).max, (30, 2)),
    "bool": RNG.random((30, 4)) < 0.5,
    "float16": RNG.random((30, 3)).astype(np.float16),
    "float32": RNG.standard_normal((30, 3)).astype(np.float32),
    "float32_scalar": RNG.standard_normal(30).astype(np.float32),
    "float64": RNG.standard_normal((30, 3)),
}


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_every_dtype(tmp_path, compression):
    number = np.arange(30)
    out = tmp_path / "data"
    write((ARRAYS, number, number / 2), out, split="train=1", compression=compression)
    x, y, weight = both_paths(out)
    assert sorted(y) == list(range(30))
    np.testing.assert_array_equal(weight, y / 2)
    assert weight.dtype == np.float32
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(x[name], array[y])
        assert x[name].dtype == array.dtype
    for row, example in enumerate(plain_examples(out)):
        assert example["label"].int64_list.value == [y[row]]
        assert example["sample_weight"].float_list.value == [weight[row]]
        assert example["uint8"].bytes_list.value[0] == x["uint8"][row].tobytes()
        assert list(example["tokens"].int64_list.value) == x["tokens"][row].tolist()
        assert list(example["int64"].int64_list.value) == x["int64"][row].tolist()
        np.testing.assert_array_equal(example["float32"].float_list.value, x["float32"][row])


def test_parsing_gives_what_slicing_gives(tmp_path):
    """The same shards with the layout taken out of the manifest."""
    import json

    out = tmp_path / "data"
    write((ARRAYS, np.arange(30)), out, split="train=1")
    sliced = both_paths(out)
    path = out / "manifest.json"
    value = json.loads(path.read_text())
    value["layout"] = None
    del value["checksum"]
    path.write_text(json.dumps(value))
    tf.nest.map_structure(np.testing.assert_array_equal, both_paths(out), sliced)


@pytest.mark.parametrize("top", [1, 127, 128, 1000, 1 << 20, 1 << 40])
def test_labels_of_any_size_keep_the_layout(tmp_path, top):
    labels = np.linspace(0, top, 30).astype(np.int64)
    out = tmp_path / "data"
    manifest = write((np.arange(30, dtype=np.float32), labels), out, split="train=1")
    assert manifest.layout is not None
    x, y = both_paths(out)
    np.testing.assert_array_equal(y, labels[x.astype(int)])
    assert [e["label"].int64_list.value[0] for e in plain_examples(out)] == y.tolist()


def test_digits(tmp_path):
    from sklearn.datasets import load_digits

    out = tmp_path / "digits"
    write("digits", out)
    digits = load_digits()
    known = sorted(
        (image.astype(np.uint8).tobytes(), int(label))
        for image, label in zip(digits.images, digits.target, strict=True)
    )
    read = []
    for split in ("train", "validation"):
        x, y = both_paths(out / split)
        assert x.shape[1:] == (8, 8, 1)
        read += [(image.tobytes(), int(label)) for image, label in zip(x, y, strict=True)]
        assert [e["label"].int64_list.value[0] for e in plain_examples(out, split)] == y.tolist()
    assert sorted(read) == known


def test_npz(tmp_path):
    a, b = RNG.random((20, 3)).astype(np.float32), np.arange(20, dtype=np.uint8)[:, np.newaxis]
    np.savez(tmp_path / "a.npz", a=a, b=b, y=np.arange(20), sample_weight=np.arange(20) / 10)
    write(tmp_path / "a.npz", tmp_path / "data", split="train=1")
    x, y, weight = both_paths(tmp_path / "data")
    np.testing.assert_array_equal(x["a"], a[y])
    np.testing.assert_array_equal(x["b"], b[y])
    np.testing.assert_allclose(weight, y / 10)


@pytest.mark.parametrize(
    ("suffixes", "mode", "channels", "exact"),
    [
        ((".png",), "RGB", 3, True),
        ((".png",), "RGBA", 4, True),
        ((".png",), "L", 1, True),
        ((".png",), "P", 3, True),
        ((".png",), "LA", 4, True),
        ((".bmp",), "RGB", 3, True),
        ((".gif",), "RGB", 3, True),
        ((".jpg",), "RGB", 3, False),
        ((".jpg",), "L", 1, False),
        ((".jpg", ".png"), "RGB", 3, False),
    ],
)
def test_image_folders(tmp_path, suffixes, mode, channels, exact):
    pixels = {}
    for number in range(12):
        path = (
            tmp_path
            / "images"
            / str(number % 2)
            / f"{number:02d}{suffixes[number % len(suffixes)]}"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = RNG.integers(0, 256, (3, 2, 3), np.uint8)
        small = Image.fromarray(noise).resize((20, 30), Image.Resampling.BICUBIC)
        small.convert(mode).save(path)
        with Image.open(path) as image:
            wanted = {1: "L", 3: "RGB", 4: "RGBA"}[channels]
            pixels[number] = np.asarray(image.convert(wanted)).reshape(30, 20, channels)
    out = tmp_path / "data"
    write(tmp_path / "images", out, split="train=1", num_shards=2)
    x, y = both_paths(out)
    assert x.shape == (12, 30, 20, channels)
    assert x.dtype == np.uint8
    for label in (0, 1):
        ours = x[y == label].astype(int)
        known = np.stack([pixels[n] for n in range(label, 12, 2)]).astype(int)
        difference = np.abs(ours[:, None] - known[None]).mean(axis=(2, 3, 4))
        # Two JPEG decoders may differ by rounding.
        assert (difference.min(axis=1) <= (0 if exact else 3)).all()
        assert sorted(difference.argmin(axis=1)) == list(range(6))


def test_sixteen_bit_images(tmp_path):
    pixels = RNG.integers(0, 1 << 16, (8, 6, 5), np.uint16)
    (tmp_path / "images" / "a").mkdir(parents=True)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / "images" / "a" / f"{number}.png")
    write(tmp_path / "images", tmp_path / "data", split="train=1")
    x, _ = both_paths(tmp_path / "data")
    assert x.dtype == np.uint16
    assert sorted(map(bytes, x)) == sorted(map(bytes, pixels))


def test_a_dataset(tmp_path):
    x, y = np.arange(20, dtype=np.float32)[:, np.newaxis], np.arange(20)
    dataset = tf.data.Dataset.from_tensor_slices(({"a": x, "b": x}, y, x[:, 0]))
    write(dataset, tmp_path / "data", split="train=1")
    read_x, read_y, weight = both_paths(tmp_path / "data")
    np.testing.assert_array_equal(read_x["a"], x[read_y])
    np.testing.assert_array_equal(weight, read_y)
    assert load_manifest(tmp_path / "data").source == "dataset"


def test_datasets_that_cannot_be_written(tmp_path):
    from tfdist.errors import DataError

    numbers = tf.data.Dataset.range(5)
    for dataset, message in (
        (numbers.repeat(), "finite"),
        (numbers.take(0), "at least one record"),
    ):
        with pytest.raises(DataError, match=message):
            write(dataset, tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


def test_inputs_alone(tmp_path):
    write(np.arange(12, dtype=np.float32), tmp_path / "data", split="train=1")
    (x,) = both_paths(tmp_path / "data")
    assert sorted(x) == list(range(12))
