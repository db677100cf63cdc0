"""Reading any part, in the order of any epoch, from any batch on; and what goes wrong."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from tiers import long

from tfdist.errors import CorruptShardError, DataError, OptionError
from tfdist.records import explain_read_error, load_manifest, open_records, read, write

NUM = 103
X = np.random.default_rng(0).integers(0, 256, (NUM, 5), np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Shards without compression; beside them the folder "gzip" with the same."""
    parent = tmp_path_factory.mktemp("data")
    for name in ("none", "gzip"):
        write((X, np.arange(NUM)), parent / name, split="train=1", num_shards=4, compression=name)
    return parent / "none"


@pytest.fixture
def two_splits(tmp_path):
    write((X, np.arange(NUM)), tmp_path / "two", num_shards=2)
    return tmp_path / "two"


def opened(folder, source, **options):
    """The same kind of records from every kind of source and path."""
    if source == "arrays":
        return open_records((X, np.arange(NUM)), **options)
    if source == "dataset":
        dataset = tf.data.Dataset.from_tensor_slices((X, np.arange(NUM)))
        return open_records(dataset, cache=False, **options)
    if source == "gzip":
        folder = folder.parent / "gzip"
    return open_records(folder, cache=source == "table", **options)


SOURCES = pytest.mark.parametrize("source", ["table", "stream", "gzip", "arrays", "dataset"])


def labels(batches):
    return [int(label) for _, y, *_ in batches for label in y]


def epoch_labels(records, start=0, stop=None, *, seed=0, epoch=0, shuffle=True, skip=0, size=10):
    stop = records.num_records if stop is None else stop
    batches = records.batches(
        start, stop, size, shuffle=shuffle, seed=seed, epoch=epoch, skip_batches=skip
    )
    return labels(batches)


@SOURCES
def test_batches_have_the_size_and_the_spec(folder, source):
    records = opened(folder, source)
    assert records.num_records == NUM
    assert not records.has_weights
    x, y = records.element_spec
    assert (x.shape.as_list(), x.dtype) == ([None, 5], tf.uint8)
    assert (y.shape.as_list(), y.dtype) == ([None], tf.int64)
    batches = records.batches(0, NUM, 10, shuffle=False, seed=0, epoch=0)
    assert [len(y) for _, y in batches] == [10] * 10 + [3]
    assert x.is_compatible_with(batches.element_spec[0])
    for x, y in batches:
        np.testing.assert_array_equal(x, X[y])


def test_both_paths_give_the_same_order_and_the_same_shuffled_set(folder):
    table, stream = opened(folder, "table"), opened(folder, "stream")
    in_order = epoch_labels(table, shuffle=False)
    assert epoch_labels(stream, shuffle=False) == in_order
    assert sorted(in_order) == list(range(NUM))
    for records in (table, stream):
        shuffled = epoch_labels(records)
        assert sorted(shuffled) == list(range(NUM))
        assert shuffled != in_order


@SOURCES
@pytest.mark.parametrize("world_size", [1, 2, 3, *long(5, 7)])
def test_parts_cover_every_record_once(folder, source, world_size):
    records = opened(folder, source)
    bounds = [NUM * rank // world_size for rank in range(world_size + 1)]
    in_order = epoch_labels(records, shuffle=False)
    for shuffle in (False, True):
        parts = [
            epoch_labels(records, start, stop, shuffle=shuffle)
            for start, stop in itertools.pairwise(bounds)
        ]
        for part, (start, stop) in zip(parts, itertools.pairwise(bounds), strict=True):
            assert sorted(part) == sorted(in_order[start:stop])
        if not shuffle:
            assert list(itertools.chain.from_iterable(parts)) == in_order


@SOURCES
def test_one_record(folder, source):
    records = opened(folder, source)
    in_order = epoch_labels(records, shuffle=False)
    assert epoch_labels(records, 50, 51) == in_order[50:51]


@SOURCES
def test_the_order_is_a_function_of_seed_and_epoch(folder, source):
    first = epoch_labels(opened(folder, source), 5, 98, seed=1, epoch=2)
    records = opened(folder, source)
    for global_seed in (None, 1, 2):
        if global_seed is not None:
            tf.random.set_seed(global_seed)
        batches = records.batches(5, 98, 10, shuffle=True, seed=1, epoch=2)
        assert labels(batches) == first
        assert labels(batches) == first
    assert epoch_labels(records, 5, 98, seed=1, epoch=3) != first
    assert epoch_labels(records, 5, 98, seed=2, epoch=2) != first


@SOURCES
def test_inside_flat_map_the_order_is_the_same(folder, source):
    records = opened(folder, source)
    epochs = tf.data.Dataset.range(3, 5).flat_map(
        lambda epoch: records.batches(5, 98, 10, shuffle=True, seed=1, epoch=epoch)
    )
    expected = [epoch_labels(records, 5, 98, seed=1, epoch=epoch) for epoch in (3, 4)]
    assert labels(epochs) == expected[0] + expected[1]
    assert labels(epochs) == expected[0] + expected[1]


@SOURCES
@pytest.mark.parametrize("shuffle", [True, *long(False)])
def test_skipping_is_dropping(folder, source, shuffle):
    records = opened(folder, source)
    whole = epoch_labels(records, 5, 98, shuffle=shuffle)
    for skip in (0, 1, 9, 10, 11):
        for number in (skip, tf.constant(skip, tf.int64)):
            skipped = epoch_labels(records, 5, 98, shuffle=shuffle, skip=number)
            assert skipped == whole[skip * 10 :]


def test_several_inputs_and_weights():
    x = {"a": X, "b": X.astype(np.float32)}
    records = open_records((x, np.arange(NUM), np.linspace(0, 1, NUM)))
    assert records.has_weights
    assert records.element_spec[2].dtype == tf.float32
    for batch_x, y, weight in records.batches(0, NUM, 10, shuffle=True, seed=0, epoch=0):
        np.testing.assert_array_equal(batch_x["b"], X[y])
        np.testing.assert_allclose(weight, y / (NUM - 1), rtol=1e-6)


def test_weights_of_each_output():
    labels = {"a": np.arange(NUM), "b": X}
    weights = {"a": np.arange(NUM), "b": np.ones(NUM, bool)}
    records = open_records((X, labels, weights))
    (_, _, batch), *_ = records.batches(0, NUM, 7, shuffle=False, seed=0, epoch=0)
    assert {name: leaf.dtype for name, leaf in batch.items()} == dict.fromkeys("ab", tf.float32)
    np.testing.assert_array_equal(batch["a"], np.arange(7))
    with pytest.raises(DataError, match="one number a record"):
        open_records((X, labels, weights | {"a": X}))
    of_labels = open_records((X, labels, weights | {"b": X}))
    (_, _, batch), *_ = of_labels.batches(0, NUM, 7, shuffle=False, seed=0, epoch=0)
    np.testing.assert_allclose(batch["b"], X[:7], rtol=1e-6)


def test_a_dataset_of_unknown_length_is_counted():
    numbers = tf.data.Dataset.range(20).filter(lambda n: n % 2 == 0).map(lambda n: (n, n))
    assert open_records(numbers).num_records == 10


def test_a_dataset_may_hold_what_does_not_equal_itself():
    x = np.array([[np.nan], [1.0]], np.float32)
    assert open_records(tf.data.Dataset.from_tensor_slices((x, ["a", "b"]))).num_records == 2


class TestMapFn:
    def test_it_gets_batches_after_the_cache(self, folder):
        noise = tf.random.Generator.from_seed(0)

        def augment(x, y):
            x = tf.cast(x, tf.float32)
            if tf.shape(x)[0] > 0:  # AutoGraph, as in Dataset.map
                x += noise.uniform(tf.shape(x))
            return x, y

        for cache in (True, False):
            records = open_records(folder, map_fn=augment, cache=cache)
            assert records.element_spec[0].dtype == tf.float32
            assert records.element_spec[0].shape.as_list() == [None, 5]
            batches = records.batches(0, NUM, 50, shuffle=False, seed=0, epoch=0)
            first, second = (np.concatenate([x for x, _ in batches]) for _ in range(2))
            assert (first != second).any()
            np.testing.assert_array_equal(np.floor(first), np.floor(second))

    def test_another_number_of_items(self, folder):
        with pytest.raises(DataError, match=r"must return \(x, y\)"):
            open_records(folder, map_fn=lambda x, y: x)
        with pytest.raises(DataError, match="3 items"):
            open_records(folder, map_fn=lambda x, y: (x, y, y))

    def test_another_number_of_rows_seen_beforehand(self, folder):
        with pytest.raises(DataError, match="same number of rows"):
            open_records(folder, map_fn=lambda x, y: (tf.concat([x, x], 0), y))
        with pytest.raises(DataError, match="same number of rows"):
            open_records(folder, map_fn=lambda x, y: (tf.reduce_sum(x), y))

    def test_another_number_of_rows_seen_while_reading(self, folder):
        batches = read(folder, batch_size=10, map_fn=lambda x, y: (x[y > 50], y))
        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            list(batches)
        explained = explain_read_error(raised.value, folder)
        assert isinstance(explained, DataError)
        assert str(explained).startswith("map_fn must keep the number of rows, but found ")
        assert str(explained).endswith(" for 10.")


class TestRead:
    def test_one_pass(self, two_splits):
        batches = read(two_splits / "validation", batch_size=4)
        count = load_manifest(two_splits).splits["validation"].records
        assert batches.cardinality() == -(-count // 4)
        assert len(labels(batches)) == count

    @pytest.mark.parametrize("cache", [True, False])
    def test_every_pass_is_a_new_epoch(self, folder, cache):
        records = open_records(folder, cache=cache)
        batches = read(folder, batch_size=10, shuffle=True, seed=3, cache=cache)
        assert batches.cardinality() == 11
        for epoch in range(3):
            assert labels(batches) == epoch_labels(records, seed=3, epoch=epoch)

    def test_several_epochs_in_a_pass(self, folder):
        assert len(labels(read(folder, batch_size=10, epochs=3))) == 3 * NUM
        batches = read(folder, batch_size=10, shuffle=True, epochs=2)
        assert batches.cardinality() == 22
        both = labels(batches)
        assert sorted(both[:NUM]) == sorted(both[NUM:]) == list(range(NUM))
        assert both[:NUM] != both[NUM:]

    def test_keras_trains_on_it(self, folder):
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        batches = read(
            folder,
            batch_size=10,
            shuffle=True,
            map_fn=lambda x, y: (tf.cast(x, tf.float32) / 255, tf.cast(y, tf.float32) / NUM),
        )
        history = model.fit(batches, epochs=2, verbose=0).history
        assert np.isfinite(history["loss"]).all()

    def test_options(self, folder):
        for options in ({"batch_size": 0}, {"batch_size": 1, "epochs": 0}):
            with pytest.raises(OptionError, match="at least 1"):
                read(folder, **options)
        with pytest.raises(OptionError, match="cache"):
            read(folder, batch_size=1, cache="yes")


class TestBadSources:
    def test_a_folder_with_several_splits(self, two_splits):
        with pytest.raises(DataError, match=r"two/train, .*two/validation"):
            open_records(two_splits)

    def test_an_unknown_split(self, two_splits):
        with pytest.raises(DataError, match=r"'test'.*two/train"):
            open_records(two_splits / "test")

    def test_no_manifest(self, tmp_path):
        for path in (tmp_path, tmp_path / "train", tmp_path / "no" / "where"):
            with pytest.raises(DataError, match="tfdist shard"):
                open_records(path)

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ((X, np.arange(7)), "same number of records"),
            (([X, X], np.arange(NUM)), r"a tuple: \(\(a, b\), y\)"),
            (([X, X[:, 0]], np.arange(NUM)), r"several shapes.* a tuple: \(\(a, b\), y\)"),
            ((X[:0], np.arange(0)), "at least one record"),
            ((X, np.arange(NUM), X), "one number a record"),
            ((X, np.full(NUM, None)), "numbers or strings"),
            ((X, 1), "first dimension"),
            ((X,) * 4, "a tuple of 4"),
            (5, "a int"),
        ],
    )
    def test_arrays(self, source, message):
        with pytest.raises(DataError, match=message):
            open_records(source)

    def test_datasets(self):
        numbers = tf.data.Dataset.range(4)
        for dataset, message in (
            (numbers.repeat(), r"Remove repeat\(\)"),
            (numbers.take(0), "at least one record"),
            (numbers.map(lambda n: (n,) * 4), "a tuple of 4"),
            (tf.data.Dataset.range(99).shuffle(99), r"Remove shuffle\(\)"),
        ):
            with pytest.raises(DataError, match=message):
                open_records(dataset)


class TestDamage:
    @pytest.fixture
    def damaged(self, tmp_path):
        out = tmp_path / "data"
        write((X, np.arange(NUM)), out, split="train=1", num_shards=4)
        shard = out / "train-00002-of-00004.tfrecord"
        data = bytearray(shard.read_bytes())
        size = load_manifest(out).layout.record_bytes + 16
        data[3 * size + 14] ^= 1
        shard.write_bytes(bytes(data))
        return out, f"{shard.name}, record 3, byte {3 * size}"

    def test_in_memory(self, damaged):
        folder, place = damaged
        records = open_records(folder)
        with pytest.raises(CorruptShardError, match=place) as raised:
            records.batches(0, NUM, 10, shuffle=True, seed=0, epoch=0)
        assert "tfdist inspect" in str(raised.value)
        with pytest.raises(CorruptShardError, match=place):
            tf.data.Dataset.range(2).flat_map(
                lambda epoch: records.batches(0, NUM, 10, shuffle=True, seed=0, epoch=epoch)
            )
        # Other shards can be read.
        assert len(epoch_labels(records, 0, 50)) == 50

    def test_streamed(self, damaged):
        folder, place = damaged
        with pytest.raises(tf.errors.UnknownError) as raised:
            list(read(folder, batch_size=10, cache=False))
        for source in (folder, str(folder), open_records(folder)):
            explained = explain_read_error(raised.value, source)
            assert isinstance(explained, CorruptShardError)
            assert place in str(explained)

    def test_missing_or_cut_shards_are_seen_at_once(self, damaged):
        folder, _ = damaged
        shard = folder / "train-00002-of-00004.tfrecord"
        shard.write_bytes(shard.read_bytes()[:-1])
        with pytest.raises(CorruptShardError, match="00002"):
            open_records(folder)
        shard.unlink()
        with pytest.raises(CorruptShardError, match="which is missing"):
            open_records(folder)

    @pytest.mark.parametrize("layout", [True, False])
    def test_records_that_do_not_fit_the_schema(self, tmp_path, layout):
        out = tmp_path / "data"
        write((X, np.arange(NUM)), out, split="train=1")
        path = out / "manifest.json"
        value = json.loads(path.read_text())
        del value["checksum"]
        if layout:
            value["layout"]["record_bytes"] += 1
        else:
            value["layout"] = None
            value["schema"][0]["shape"] = [6]
        path.write_text(json.dumps(value))
        with pytest.raises(DataError) as raised:
            open_records(out).batches(0, NUM, 10, shuffle=False, seed=0, epoch=0)
        expected = (
            "bytes for each record"
            if layout
            else "'x' must have shape [6], 6 bytes, but found 5, 5"
        )
        assert expected in str(raised.value)

    @pytest.mark.parametrize("cut", [True, False])
    def test_images_that_do_not_fit_the_schema(self, tmp_path, cut):
        """Images whose headers were right, and a manifest that says another size."""
        for number in range(6):
            path = tmp_path / "images" / "a" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 6), number * 40).save(path)
            if cut:
                path.write_bytes(path.read_bytes()[:-20])
        out = tmp_path / "data"
        write(tmp_path / "images", out, split="train=1", num_shards=1, decode=not cut)
        if not cut:
            path = out / "manifest.json"
            value = json.loads(path.read_text())
            value["schema"][0]["shape"] = [7, 8, 1]
            del value["checksum"]
            path.write_text(json.dumps(value))
        with pytest.raises(CorruptShardError, match=r"00001.tfrecord, record 0, byte 0") as raised:
            open_records(out).batches(0, 6, 2, shuffle=False, seed=0, epoch=0)
        reason = "cannot be decoded" if cut else "8x6 pixels where there are 8x7"
        assert reason in str(raised.value)

    def test_other_errors_are_left_alone(self, damaged):
        folder, _ = damaged
        assert explain_read_error(ValueError("x"), folder) is None
        unrelated = tf.errors.InvalidArgumentError(None, None, "Matrix size-incompatible")
        assert explain_read_error(unrelated, folder) is None
        assert explain_read_error(unrelated, (X, X)) is None


@SOURCES
@pytest.mark.parametrize(
    "part",
    [
        {"shuffle": False},
        {"shuffle": True, "seed": 3, "epoch": 2},
        {"shuffle": True, "epoch": 1, "skip": 2, "start": 7, "stop": 96},
    ],
    ids=["in order", "shuffled", "a part from its third batch on"],
)
def test_numbers_are_those_of_the_records_in_batches(folder, source, part):
    records = opened(folder, source)
    of_number = epoch_labels(records, shuffle=False)
    options = {"start": 0, "stop": NUM, "seed": 0, "epoch": 0, "skip": 0} | part
    numbers = records.numbers(
        options["start"],
        options["stop"],
        10,
        shuffle=options["shuffle"],
        seed=options["seed"],
        epoch=options["epoch"],
        skip_batches=options["skip"],
    )
    batches = [batch.tolist() for batch in numbers.as_numpy_iterator()]
    assert {len(batch) for batch in batches[:-1]} == {10}
    found = [of_number[number] for number in itertools.chain.from_iterable(batches)]
    assert found == epoch_labels(records, **part)
