"""A function on one record before batching: its random numbers, and what it must return."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tfdist.errors import DataError, OptionError
from tfdist.records import explain_read_error, open_records, read, write
from tfdist.records.reading.augmentation import augment
from tfdist.records.reading.record_fn import seeds_of
from tfdist.records.reading.source import order_seed

NUM = 21
X = np.random.default_rng(0).integers(0, 256, (NUM, 5), np.uint8)
SOURCES = pytest.mark.parametrize("source", ["table", "stream", "images", "arrays", "dataset"])


def noisy(x, y, *, seed):
    """Notes a random number of the record beside what is in it."""
    first = tf.cast(tf.reshape(x, [-1])[:1], tf.float32)
    return tf.concat([first, tf.random.stateless_uniform([1], seed)], 0), y


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Numbers in "numbers"; in "images" a folder of PNG files in three sizes, and their shards."""
    parent = tmp_path_factory.mktemp("data")
    write((X, np.arange(NUM)), parent / "numbers", split="train=1", num_shards=3)
    return parent


@pytest.fixture(scope="module")
def images(folder):
    for number in range(NUM):
        path = folder / "raw" / "one" / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 6, 3), number, np.uint8)).save(path)
    write(folder / "raw", folder / "images", split="train=1", num_shards=3)
    return folder / "images"


def opened(folder, source, record_fn=noisy, **options):
    options["record_fn"] = record_fn
    if source == "arrays":
        return open_records((X, np.arange(NUM)), **options)
    if source == "dataset":
        dataset = tf.data.Dataset.from_tensor_slices((X, np.arange(NUM)))
        return open_records(dataset, cache=False, **options)
    name = "images" if source == "images" else "numbers"
    return open_records(folder / name, cache=source == "table", **options)


def of_each(records, start=0, stop=NUM, *, size=8, epoch=0, shuffle=True, skip=0, seed=5):
    """Returns (content, random number) of an epoch's records, in their order."""
    batches = records.batches(
        start, stop, size, shuffle=shuffle, seed=seed, epoch=epoch, skip_batches=skip
    )
    return content(batches)


def content(batches):
    return [tuple(row) for x, _ in batches for row in x.numpy().tolist()]


@SOURCES
def test_the_numbers_of_a_record_are_its_own(folder, images, source):
    records = opened(folder, source)
    whole = of_each(records)
    assert len({noise for _, noise in whole}) == NUM
    # Neither the size of batches, nor the order, nor where reading begins makes a difference.
    assert of_each(records, size=4) == whole
    assert of_each(records, skip=2) == whole[16:]
    assert sorted(of_each(records, shuffle=False)) == sorted(whole)
    parts = of_each(records, 0, 10) + of_each(records, 10, NUM)
    assert sorted(parts) == sorted(whole)
    # Another epoch and another seed do.
    for other in (of_each(records, epoch=1), of_each(records, seed=6)):
        assert not {noise for _, noise in other} & {noise for _, noise in whole}
        assert sorted(content for content, _ in other) == sorted(content for content, _ in whole)


def test_all_kinds_of_sources_give_the_same(folder):
    kinds = ("table", "stream", "arrays", "dataset")
    # Shards hold the records in an order of their own.
    table, stream, arrays, dataset = (
        of_each(opened(folder, kind), epoch=3, shuffle=False) for kind in kinds
    )
    assert table == stream
    assert arrays == dataset
    assert [noise for _, noise in table] == [noise for _, noise in arrays]


def test_inside_flat_map_it_is_the_same(folder):
    records = opened(folder, "stream")
    epochs = tf.data.Dataset.range(2, 4).flat_map(
        lambda epoch: records.batches(0, NUM, 8, shuffle=True, seed=5, epoch=epoch)
    )
    assert content(epochs) == of_each(records, epoch=2) + of_each(records, epoch=3)


def test_seeds_look_random():
    numbers = tf.range(4096, dtype=tf.int64)
    seeds = seeds_of(numbers, order_seed(0, 0)).numpy()
    assert (seeds.dtype, seeds.shape) == (np.int32, (4096, 2))
    assert len(np.unique(seeds, axis=0)) == 4096
    bits = np.unpackbits(seeds.view(np.uint8)).reshape(4096, 64)
    # Each bit is set in half of them, and changes from one record to the next in half of them.
    assert np.abs(bits.mean(0) - 0.5).max() < 5 / np.sqrt(4 * 4096)
    assert np.abs((bits[1:] ^ bits[:-1]).mean(0) - 0.5).max() < 5 / np.sqrt(4 * 4095)


def test_it_runs_before_map_fn_and_anew_on_kept_records(folder):
    for cache in (True, False):
        records = open_records(
            folder / "numbers",
            cache=cache,
            record_fn=lambda x, y: (tf.cast(x, tf.float32)[:2], y),
            map_fn=lambda x, y: ({"sum": tf.reduce_sum(x, 1)}, y),
        )
        assert records.has_map_fn
        assert records.element_spec[0]["sum"].shape.as_list() == [None]
        ((x, y),) = records.batches(0, NUM, NUM, shuffle=False, seed=0, epoch=0)
        np.testing.assert_array_equal(x["sum"], X[y][:, :2].sum(1))


def test_images_of_several_sizes_get_one(tmp_path):
    for number in range(4):
        path = tmp_path / "raw" / "one" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4 + number, 6, 3), number, np.uint8)).save(path)
    write(tmp_path / "raw", tmp_path / "data", split="train=1")
    with pytest.raises(DataError, match="one size"):
        open_records(tmp_path / "data")
    record_fn = lambda x, y: (tf.image.crop_to_bounding_box(x, 0, 0, 4, 6), y)  # noqa: E731
    records = open_records(tmp_path / "data", record_fn=record_fn)
    ((x, _),) = records.batches(0, 4, 4, shuffle=True, seed=0, epoch=0)
    assert x.shape == (4, 4, 6, 3)
    assert sorted(x[:, 0, 0, 0].numpy()) == [0, 1, 2, 3]
    with pytest.raises(DataError, match=r"one known shape .* shape \(None, None, 3\) of x"):
        open_records(tmp_path / "data", record_fn=lambda x, y: (x, y))
    with pytest.raises(DataError, match=r"read in one size.*adopt DIR --resize HxW"):
        open_records(tmp_path / "data", record_fn=augment("flip"))


def test_weights_dicts_and_a_function_of_a_class():
    class Halved:
        def __call__(self, x, y, weight, seed=None):
            if seed is None:
                raise AssertionError("it takes one")
            return {**x, "c": x["a"] * 2}, y, weight / 2

    x = {"a": np.arange(6.0), "b": X[:6]}
    records = open_records((x, np.arange(6), np.full(6, 3.0)), record_fn=Halved())
    ((x, _, weight),) = records.batches(0, 6, 6, shuffle=False, seed=0, epoch=0)
    assert (list(x), list(weight)) == (["a", "b", "c"], [1.5] * 6)
    assert list(x["c"]) == [0, 2, 4, 6, 8, 10]
    batches = open_records((X,), record_fn=lambda x: (x[:1],)).batches
    ((x,),) = batches(0, NUM, NUM, shuffle=False, seed=0, epoch=0)
    np.testing.assert_array_equal(x, X[:, :1])


def test_records_of_several_sizes_get_one():
    def grown():
        for size in range(1, 6):
            yield np.full((size, 2), size, np.int64), size

    spec = (tf.TensorSpec([None, 2], tf.int64), tf.TensorSpec([], tf.int64))
    dataset = tf.data.Dataset.from_generator(grown, output_signature=spec)
    records = open_records(dataset, batched=False, record_fn=lambda x, y: (x[0], y))
    ((x, _),) = records.batches(0, 5, 5, shuffle=False, seed=0, epoch=0)
    assert x.numpy().tolist() == [[size, size] for size in range(1, 6)]
    with pytest.raises(OptionError, match="cache must be 'auto' or False"):
        open_records(dataset, batched=False, record_fn=lambda x, y: (x[0], y), cache=True)
    with pytest.raises(DataError, match=r"one known shape .* shape \(None, 2\) of x"):
        open_records(dataset, batched=False, record_fn=lambda x, y: (x * 2, y))

    def lying(x, y):
        x = tf.numpy_function(lambda x: x, [x], tf.int64)
        x.set_shape([3, 2])
        return x, y

    records = open_records(dataset, batched=False, record_fn=lying)
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        list(records.batches(0, 5, 5, shuffle=False, seed=0, epoch=0))
    explained = explain_read_error(raised.value, records)
    assert isinstance(explained, DataError)
    assert "one known shape" in str(explained)


@pytest.mark.parametrize(
    ("record_fn", "message"),
    [
        (lambda x, y: x, r"record_fn must return \(x, y\)"),
        (lambda x, y: (x, y, y), "3 items"),
        (lambda x, y: (x[None], y[None]), "not a batch"),
        (lambda x, y: (tf.zeros([1, 4, 4, 3]), y), None),
        (lambda x, y: ({"a": tf.unique(x).y}, y), r"shape \(None,\) of x\['a'\]"),
        (lambda x, y: (tf.numpy_function(len, [x], tf.int64), y), "an unknown shape of x"),
        (lambda x, y: (tf.RaggedTensor.from_tensor(x[None]), y), "RaggedTensor as x"),
        (lambda x, y: (None, y), "NoneType as x"),
    ],
)
def test_what_it_must_return(record_fn, message):
    arrays = (X, np.arange(NUM))
    if message is None:  # A new shape is not a batch of the old one.
        open_records(arrays, record_fn=record_fn)
        return
    with pytest.raises(DataError, match=message):
        open_records(arrays, record_fn=record_fn)


def test_a_batch_of_one_image_and_a_weight_that_is_no_number():
    arrays = (np.zeros((2, 4, 4, 3), np.uint8), np.zeros(2))
    with pytest.raises(DataError, match=r"not a batch.* \(1, 4, 4, 3\) for one of \(4, 4, 3\)"):
        open_records(arrays, record_fn=lambda x, y: (x[None], y))
    with pytest.raises(DataError, match=r"one number .* shape \(1,\) of sample_weight"):
        open_records((*arrays, np.ones(2)), record_fn=lambda x, y, w: (x, y, w[None]))


def test_read_passes_it_on(folder):
    batches = read(folder / "numbers", batch_size=8, shuffle=True, seed=5, record_fn=noisy)
    records = opened(folder, "table")
    for epoch in (0, 1):
        assert content(batches) == of_each(records, epoch=epoch)
