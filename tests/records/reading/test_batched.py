"""Datasets of batches, generators, Sequences and tables: every record once, or a question."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from PIL import Image

from tfdist.errors import DataError, OptionError
from tfdist.records import write
from tfdist.records.reading.reader import open_records

NUM = 50
X = np.arange(NUM * 4, dtype=np.float32).reshape(NUM, 4)
Y = np.arange(NUM)
ROWS = tf.data.Dataset.from_tensor_slices((X, Y))


def read(source, **options):
    """Returns (records, note) of a source, its records in batches of 7, in order."""
    records = open_records(source, **options)
    batches = records.batches(0, records.num_records, 7, shuffle=False, seed=0, epoch=0)
    read = [tf.nest.map_structure(lambda leaf: leaf.numpy(), batch) for batch in batches]
    whole = tf.nest.map_structure(lambda *parts: np.concatenate(parts), *read)
    assert len(tf.nest.flatten(whole)[0]) == records.num_records
    return whole, records.note


def assert_all_rows(source, num=NUM, **options):
    (x, y), note = read(source, **options)
    np.testing.assert_array_equal(x, X[:num])
    np.testing.assert_array_equal(y, Y[:num])
    return note


class Batches(tf.keras.utils.Sequence):
    def __len__(self):
        return -(-NUM // 8)

    def __getitem__(self, n):
        return X[n * 8 : n * 8 + 8], Y[n * 8 : n * 8 + 8]


def in_batches(size=8):
    for start in range(0, NUM, size):
        yield X[start : start + size], Y[start : start + size]


def one_by_one():
    yield from zip(X, Y, strict=True)


ONCE = in_batches()


def same(x, y):
    return x, y


class TestBatchesAreTakenApart:
    @pytest.mark.parametrize(
        "dataset",
        [
            ROWS.batch(8),
            ROWS.batch(10),
            ROWS.batch(10, drop_remainder=True),
            ROWS.batch(8, num_parallel_calls=2).prefetch(2).cache(),
            ROWS.batch(8).map(same).prefetch(1),
            ROWS.batch(8).map(same, num_parallel_calls=2).take(99),
            ROWS.padded_batch(8),
            ROWS.batch(4).rebatch(8),
            tf.data.Dataset.zip(
                (
                    tf.data.Dataset.from_tensor_slices(X).batch(8),
                    tf.data.Dataset.from_tensor_slices(Y).batch(8),
                )
            ),
            ROWS.take(20).batch(8).concatenate(ROWS.skip(20).batch(8)),
            ROWS.batch(8).unbatch().batch(3),
            ROWS.batch(8).with_options(tf.data.Options()),
            ROWS.shuffle(NUM).batch(8),
            ROWS.shuffle(NUM).map(same).batch(8).prefetch(2),
            ROWS.shuffle(NUM).batch(8, drop_remainder=True),
            ROWS.batch(8).map(same).cache().shuffle(9).prefetch(1),
            ROWS.shuffle(NUM).batch(8).map(same).cache().shuffle(9),
        ],
    )
    def test_every_row_once(self, dataset):
        note = assert_all_rows(dataset)
        assert f"taken apart into {NUM} records" in note

    def test_a_shuffle_that_is_left_out_is_told(self):
        assert "its shuffle() is left out" in assert_all_rows(ROWS.shuffle(9).batch(8))
        assert "shuffle" not in assert_all_rows(ROWS.batch(8))

    def test_a_shuffle_that_never_changes_is_kept(self):
        fixed = ROWS.shuffle(NUM, seed=1, reshuffle_each_iteration=False)
        (_, y), note = read(fixed.batch(8))
        assert sorted(y) == list(range(NUM))
        assert list(y) != sorted(y)
        assert "shuffle" not in note

    def test_what_drop_remainder_has_left_out_stays_out(self):
        assert_all_rows(ROWS.batch(8, drop_remainder=True), 48)

    def test_other_structures(self):
        weights = np.linspace(0, 1, NUM, dtype=np.float32)
        dataset = tf.data.Dataset.from_tensor_slices(({"a": X, "b": X[:, :2]}, Y, weights))
        (x, y, w), _ = read(dataset.batch(8))
        np.testing.assert_array_equal(x["b"], X[:, :2])
        np.testing.assert_array_equal(y, Y)
        np.testing.assert_array_equal(w, weights)
        (x,), _ = read(tf.data.Dataset.from_tensor_slices(X).batch(8))
        np.testing.assert_array_equal(x, X)

    def test_a_map_on_batches_is_applied(self):
        (x, _), _ = read(ROWS.shuffle(NUM).batch(8).map(lambda x, y: (x * 2, y)))
        np.testing.assert_array_equal(x, X * 2)

    def test_batches_that_are_padded_each_for_itself_get_one_length(self):
        lists = tf.data.Dataset.range(1, 7).map(lambda n: (tf.range(n), n))
        (x, y), _ = read(lists.padded_batch(2, padding_values=(tf.constant(-1, tf.int64), None)))
        assert x.shape == (6, 6)
        assert list(x[2]) == [0, 1, 2, -1, -1, -1]
        assert list(y) == list(range(1, 7))

    def test_image_dataset_from_directory_as_it_comes(self, tmp_path, capsys):
        for n in range(12):
            path = tmp_path / "ab"[n % 2] / f"{n}.png"
            path.parent.mkdir(exist_ok=True)
            Image.new("RGB", (4, 4), (n, n, n)).save(path)
        dataset = tf.keras.utils.image_dataset_from_directory(
            tmp_path, image_size=(4, 4), batch_size=5
        )
        (x, y), note = read(dataset)
        assert sorted(x[:, 0, 0, 0].astype(int)) == list(range(12))
        np.testing.assert_array_equal(x[:, 0, 0, 0].astype(int) % 2, y)
        assert "12 records, and its shuffle() is left out" in note


class TestRecordsStayRecords:
    @pytest.mark.parametrize(
        "dataset",
        [
            ROWS,
            ROWS.map(same).filter(lambda x, y: y >= 0),
            ROWS.batch(8).unbatch(),
            tf.data.Dataset.from_generator(
                one_by_one,
                output_signature=(tf.TensorSpec((4,), tf.float32), tf.TensorSpec((), tf.int64)),
            ),
        ],
    )
    def test_one_label_a_record(self, dataset):
        assert assert_all_rows(dataset) is None

    def test_an_image_and_its_mask_are_one_record(self):
        images = np.zeros((6, 5, 5, 3), np.float32)
        dataset = tf.data.Dataset.from_tensor_slices((images, images[..., :1])).map(same)
        (x, y), note = read(dataset)
        assert (x.shape, y.shape, note) == ((6, 5, 5, 3), (6, 5, 5, 1), None)

    def test_a_batch_of_one_label_is_no_batch(self):
        windows = tf.data.Dataset.range(50).batch(5, drop_remainder=True)
        (x, y), note = read(windows.map(lambda w: (w[:-1], w[-1])))
        assert (x.shape, list(y[:2]), note) == ((10, 4), [4, 9], None)


class TestWhatCannotBeToldIsAsked:
    CASES = (
        # The next characters of a text, or a batch of numbers and their successors.
        tf.data.Dataset.range(50).batch(5, drop_remainder=True).map(lambda w: (w[:-1], w[1:])),
        tf.data.Dataset.range(50).batch(5).map(lambda w: (w[:-1], w[1:])),
        tf.data.Dataset.from_tensors((X, Y)),
        tf.data.Dataset.range(2).flat_map(lambda n: ROWS.batch(10)),
        tf.data.Dataset.from_generator(
            in_batches,
            output_signature=(tf.TensorSpec((None, 4)), tf.TensorSpec((None,))),
        ),
        ROWS.map(lambda x, y: (tf.boolean_mask(x, x >= 0), tf.reshape(y, [-1])[: y + 1])),
    )

    @pytest.mark.parametrize("dataset", CASES)
    def test_asked(self, dataset):
        with pytest.raises(DataError, match=r"must show whether .* batched=True or batched=False"):
            open_records(dataset)

    def test_the_answer_holds(self):
        windows = self.CASES[0]
        assert open_records(windows, batched=False).num_records == 10
        assert open_records(windows, batched=True).num_records == 40
        assert assert_all_rows(self.CASES[2], batched=True)
        assert open_records(ROWS.batch(10, drop_remainder=True), batched=False).num_records == 5

    def test_an_answer_that_cannot_be(self):
        with pytest.raises(DataError, match=r"as many rows .* batched=True for elements of shapes"):
            open_records(ROWS, batched=True)
        for source in ((X, Y), X):
            with pytest.raises(OptionError, match="batched=False beside"):
                open_records(source, batched=False)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (ROWS.batch(8).repeat(), r"Remove repeat\(\)"),
        (ROWS.repeat().batch(8), r"Remove repeat\(\)"),
        (ROWS.batch(8).repeat().unbatch(), r"Remove repeat\(\)"),
        (ROWS.repeat().filter(lambda x, y: y > 2).batch(8), r"Remove repeat\(\)"),
        (ROWS.batch(8).apply(tf.data.experimental.dense_to_ragged_batch(2)), "write shards with"),
        (ROWS.take(0).batch(8), "at least one record"),
        (ROWS.filter(lambda x, y: False).batch(8), "at least one record"),
        (ROWS.batch(8).map(lambda x, y: (x, y[1:])), "the same number of rows, but found 8, 7"),
        (ROWS.shuffle(NUM).take(20).batch(8), r"Remove shuffle\(\)"),
        (
            ROWS.batch(8).map(lambda x, y: (x + tf.random.normal(tf.shape(x)), y)),
            "map_fn augments",
        ),
        (
            tf.data.Dataset.range(1, 7).map(lambda n: (tf.range(n), n)).padded_batch(2).map(same),
            "the same shape",
        ),
    ],
)
def test_batches_that_cannot_be_read(dataset, message):
    with pytest.raises(DataError, match=message) as caught:
        open_records(dataset)
    assert "\n" not in str(caught.value)


class TestGenerators:
    @pytest.mark.parametrize("source", [in_batches, lambda: in_batches(7), Batches()])
    def test_batches(self, source):
        assert "taken apart into 50 records" in assert_all_rows(source)

    def test_records(self):
        assert assert_all_rows(one_by_one) is None

    def test_a_function_that_returns_a_dataset(self):
        assert assert_all_rows(lambda: ROWS.batch(8))

    def test_an_object_that_can_be_iterated_anew(self):
        class Loader:
            def __iter__(self):
                return in_batches()

        assert assert_all_rows(Loader())

    def test_lists_of_inputs_dicts_and_missing_weights(self):
        def yields():
            for x, y in in_batches():
                yield [x, {"half": x[:, :2]}], y, None

        ((x, half), y), _ = read(yields)
        np.testing.assert_array_equal(x, X)
        np.testing.assert_array_equal(half["half"], X[:, :2])
        np.testing.assert_array_equal(y, Y)

    def test_batches_of_one_size_only_are_asked_for(self):
        with pytest.raises(DataError, match="batched=True or batched=False"):
            open_records(lambda: in_batches(10))
        # Words of sentences, and their tags.
        for lengths in ((3, 5, 4, 2), (3, 2, 2), (5, 2, 5), (2, 2, 3)):
            with pytest.raises(DataError, match="batched=True or batched=False"):
                open_records(lambda rows=lengths: ((X[:n, 0], Y[:n]) for n in rows))
        assert assert_all_rows(lambda: in_batches(10), batched=True)

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            (in_batches(), "a generator object, which can be read only once"),
            (iter(ROWS), "can be read only once"),
            (lambda n: in_batches(n), "called without arguments"),
            (lambda: (X, Y), "which returns a tuple"),
            (lambda: iter(()), "at least one record"),
            (lambda: ONCE, "in a second pass"),
            (lambda: iter([None]), "numbers or text, but found a NoneType"),
            (Batches, "a type"),
            ([X, Y], "a list"),
        ],
    )
    def test_refused_in_one_line(self, source, message):
        with pytest.raises(DataError, match=message) as caught:
            open_records(source)
        assert "\n" not in str(caught.value)

    def test_one_that_fills_its_arrays_anew(self):
        def again():
            buffer = np.empty(32, np.float32)  # TensorFlow takes what begins at 64 bytes as it is.
            x = buffer[-buffer.ctypes.data % 64 // 4 :][:4]
            for row, y in zip(X, Y, strict=True):
                x[:] = row
                yield x, y

        assert_all_rows(again)

    def test_values_that_are_masked(self):
        masked = np.ma.array(X, mask=X == 8)
        with pytest.raises(DataError, match="an array some values of which are masked"):
            read((masked, Y))
        with pytest.raises(DataError, match="of an element some values of which are masked"):
            read(lambda: zip(masked, Y, strict=True))

    def test_dtypes_that_numpy_alone_has(self):
        strings = getattr(np.dtypes, "StringDType", lambda: object)()  # NumPy 1 has none.
        (x, _), _ = read((np.array(["a", "bé"] * (NUM // 2), strings), Y))
        assert x.tolist() == [b"a", "bé".encode()] * (NUM // 2)
        with pytest.raises(DataError, match=r"must hold numbers or strings, but found dtype float"):
            read((X.astype(np.longdouble), Y))

    def test_one_that_never_ends(self):
        def endless():
            while True:
                yield from in_batches()

        with pytest.raises(DataError, match="must end"):
            open_records(endless)

    def test_one_with_a_length_may_have_the_same_elements_many_times(self):
        class Loader:
            def __len__(self):
                return 1200

            def __iter__(self):
                for n in range(1200):
                    yield np.float32([n % 2, n // 2 % 2]), n % 2

        assert open_records(Loader()).num_records == 1200

        class Endless(Loader):  # What it says is an epoch's steps.
            def __iter__(self):
                while True:
                    yield from super().__iter__()

        with pytest.raises(DataError, match="must end"):
            open_records(Endless())

    def test_one_that_changes_its_structure_or_its_values(self):
        def other_parts():
            yield X[0], Y[0]
            yield X[0]

        rng = np.random.default_rng(0)

        def augmented():
            for x, y in one_by_one():
                yield x + rng.normal(), y

        with pytest.raises(DataError, match="the same parts"):
            open_records(other_parts)
        with pytest.raises(DataError, match="map_fn augments"):
            open_records(augmented)


class TestTables:
    TABLE = pd.DataFrame({"age": [1, 2, 3], "weight": [0.5, 1.5, 2.5], "kind": ["a", "bc", "a"]})

    def test_numbers_are_one_array(self):
        (x, y), _ = read((self.TABLE[["age", "weight"]], self.TABLE["age"]))
        np.testing.assert_array_equal(x, [[1, 0.5], [2, 1.5], [3, 2.5]])
        np.testing.assert_array_equal(y, [1, 2, 3])

    def test_text_makes_a_dict_of_columns(self):
        (x, _), _ = read((self.TABLE, self.TABLE["age"]))
        assert set(x) == {"age", "weight", "kind"}
        assert list(x["kind"]) == [b"a", b"bc", b"a"]
        (x, _), _ = read((dict(self.TABLE), self.TABLE["kind"].astype("category")))
        assert list(x["kind"]) == [b"a", b"bc", b"a"]

    @pytest.mark.parametrize("column", [["a", None, "b"], pd.array([1, None, 2], "Int64")])
    def test_missing_values_are_named(self, column):
        with pytest.raises(DataError, match="column 'c', row 1"):
            open_records((self.TABLE[["age"]].assign(c=column), self.TABLE["age"]))

    def test_other_objects_are_named(self):
        odd = pd.DataFrame({"c": ["a", 5, "b"]})
        with pytest.raises(DataError, match="5 in column 'c', row 1"):
            open_records((odd, Y[:3]))


def test_batches_are_written_as_records(tmp_path, capsys):
    manifest = write(ROWS.batch(8), tmp_path / "data", split="train=1")
    assert manifest.splits["train"].records == NUM
    assert "taken apart into 50 records" in capsys.readouterr().out
    with pytest.raises(DataError, match="batched=True or batched=False"):
        write(TestWhatCannotBeToldIsAsked.CASES[0], tmp_path / "other")


UNEQUAL = tf.data.Dataset.from_tensor_slices(
    (tf.ragged.constant([[1], [3, 4], [5], [7, 8]]), Y[:4])
)
EQUAL = tf.data.Dataset.from_tensor_slices((tf.ragged.constant([[1, 2], [3, 4], [5, 6]]), Y[:3]))


@pytest.mark.parametrize(
    ("dataset", "num"),
    [
        (EQUAL.batch(2), 3),
        (EQUAL.map(lambda x, y: x).ragged_batch(2), 3),
        (UNEQUAL.batch(3), 4),
        (UNEQUAL.batch(3, drop_remainder=True), 3),
        (UNEQUAL.batch(2).map(same).prefetch(1), 4),
        (UNEQUAL.map(lambda x, y: x), 4),
        (tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1, 2], [3, 4]])), 2),
    ],
)
def test_ragged_batches_are_written_as_records(tmp_path, dataset, num):
    batched = False if isinstance(dataset.element_spec, tf.TensorSpec) else None
    manifest = write(dataset, tmp_path / "data", split="train=1", num_shards=1, batched=batched)
    assert manifest.splits["train"].records == num
    assert len(manifest.schema.features[0].shape) == 1
    with pytest.raises(DataError, match="write shards with"):
        open_records(EQUAL.batch(2))
