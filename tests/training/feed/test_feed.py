"""Who reads which record, and when."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tiers import long

from tfdist.errors import DataError, OptionError
from tfdist.training.feed.division import EvenDivision, Held
from tfdist.training.feed.feed import Feed
from tfdist.training.feed.training_data import TrainingData

CASES = [
    (records, batch, parts)
    for records, batch, parts in itertools.product(
        (1, 2, 5, 48, 49, 97), (1, 2, 3, 7, 12, 64), (1, 2, 3, 5)
    )
    if batch >= parts
]


@pytest.mark.parametrize(("records", "batch", "parts"), CASES)
def test_every_record_falls_to_one_part_in_as_many_steps(records, batch, parts):
    division = EvenDivision(records, batch, parts)
    ranges = [division.record_range(part) for part in range(parts)]
    assert [r for start, stop in ranges for r in range(start, stop)] == list(range(records))
    assert division.steps == -(-records // batch)
    for of in {batch, division.tail}:
        shares = [division.rows(part, of) for part in range(parts)]
        assert sum(shares) == of
        assert max(shares) - min(shares) <= 1


def _records(count, map_fn=None, record_fn=None):
    import numpy as np

    from tfdist.records.reading.reader import open_records

    return open_records(
        (np.arange(count), np.arange(count) % 3), map_fn=map_fn, record_fn=record_fn
    )


def test_a_feed_is_training_data():
    assert isinstance(Feed(records=_records(5), global_batch_size=2), TrainingData)


def _batches(feed, first=0, last=1, **options):
    """Returns for each step (true rows read, rows of padding, rows of the global batch)."""
    steps = []
    for (x, _), (rows, of) in feed.epochs(first, last, **options).as_numpy_iterator():
        steps.append((list(x[:rows]), len(x) - rows, of))
    return steps


@pytest.mark.parametrize(
    ("records", "batch", "parts", "splits"),
    [
        (25, 8, 2, 1),
        (25, 8, 1, 2),
        (25, 8, 3, 1),
        (1, 4, 2, 1),
        (1, 4, 1, 3),
        (24, 8, 2, 2),
        (9, 9, 4, 2),
    ],
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_replicas_read_every_record_once(records, batch, parts, splits, shuffle):
    source = _records(records)
    read, totals = [], None
    for part in range(parts):
        feed = Feed(
            records=source,
            global_batch_size=batch,
            parts=parts,
            part=part,
            splits=splits,
            shuffle=shuffle,
        )
        steps = _batches(feed)
        assert len(steps) == feed.steps_per_epoch * splits
        for rows, padding, _ in steps:
            assert padding == (0 if rows else 1), "only a replica without rows gets one of padding"
        of = [step[2] for step in steps[::splits]]
        counts = [
            sum(len(s[0]) for s in steps[i : i + splits]) for i in range(0, len(steps), splits)
        ]
        totals = counts if totals is None else [a + b for a, b in zip(totals, counts, strict=True)]
        read += [row for rows, _, _ in steps for row in rows]
    assert totals == of, "shares add up to the global batch of each step"
    assert sorted(read) == list(range(records))


def test_order_is_a_function_of_seed_and_epoch():
    source = _records(30)

    def order(seed, epoch):
        feed = Feed(records=source, global_batch_size=8, shuffle=True, seed=seed)
        return [row for rows, _, _ in _batches(feed, epoch, epoch + 1) for row in rows]

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4


@pytest.mark.parametrize(("parts", "splits"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("skip", [0, 1, 3])
def test_skipping_steps_is_dropping_them(parts, splits, skip):
    feed = Feed(
        records=_records(25),
        global_batch_size=8,
        parts=parts,
        part=parts - 1,
        splits=splits,
        shuffle=True,
        seed=4,
    )
    assert _batches(feed, 2, 4, skip_steps=skip) == _batches(feed, 2, 4)[skip * splits :]


def test_one_device_sees_the_same_global_batches():
    source = _records(25)
    parts = [
        Feed(records=source, global_batch_size=8, parts=2, part=part, shuffle=True)
        for part in range(2)
    ]
    expected = [a[0] + b[0] for a, b in zip(*map(_batches, parts), strict=True)]
    merged = parts[0].on_one_device().epochs(0, 1)
    assert [list(x) for x, _ in merged.as_numpy_iterator()] == expected


def test_replicas_see_the_random_numbers_that_one_device_sees():
    import tensorflow as tf

    def noisy(x, y, seed):
        return tf.cast(x, tf.float64) + tf.random.stateless_uniform([], seed, dtype=tf.float64), y

    source = _records(25, record_fn=noisy)

    def rows(shuffle, skip, **division):
        feed = Feed(records=source, global_batch_size=8, shuffle=shuffle, **division)
        return [row for each, *_ in _batches(feed, 1, 2, skip_steps=skip) for row in each]

    whole = rows(False, 0)
    assert len({row % 1 for row in whole}) == 25
    # A step on two replicas has the rows, in the order, of the step on one.
    assert rows(False, 1, splits=2) == rows(False, 1) == whole[8:]
    assert rows(True, 1, splits=2) == rows(True, 1)
    assert sorted(rows(True, 0)) == whole
    halves = [row for part in range(2) for row in rows(True, 0, parts=2, part=part)]
    assert sorted(halves) == whole


@pytest.mark.parametrize("last", [1, 3])
def test_autograph_rewrites_a_map_fn_and_nothing_else(last, monkeypatch):
    import tensorflow as tf
    from tensorflow.python.autograph.impl.api import PyToTF

    rewritten = set()
    transform = PyToTF.transform

    def noted(self, function, context):
        rewritten.add(function)
        return transform(self, function, context)

    monkeypatch.setattr(PyToTF, "transform", noted)

    def map_fn(x, y):
        if tf.reduce_max(x) > 6:
            x = -x
        return x, y

    records = _records(9, map_fn)
    feed = Feed(records=records, global_batch_size=4, splits=2, shared=True, shuffle=False)
    own = [list(x[: rows[0]]) for (x, _), rows in feed.epochs(0, last).as_numpy_iterator()]
    assert own == [[0, 1], [2, 3], [-4, -5], [-6, -7], [-8], []] * last
    assert rewritten == {map_fn}


def test_class_weights_multiply_sample_weights():
    import numpy as np
    import tensorflow as tf

    from tfdist.records.reading.reader import open_records

    x, y, weight = np.arange(6), np.array([0, 1, 2, 0, 1, 2]), np.full(6, 2.0)
    one_hot = np.eye(3)[y]
    for labels in (y, y[:, None], one_hot):
        feed = Feed(records=open_records((x, labels, weight)), global_batch_size=6, shared=False)
        batch = next(iter(feed.weighted_by_class({0: 0.5, 1: 3.0, 2: 1.0}).epochs(0, 1)))
        np.testing.assert_allclose(batch[2], [1, 6, 2, 1, 6, 2])
    # What Python makes is of any size in each dimension.
    for labels in (y[:, None], one_hot):
        feed = Feed(records=open_records((x, labels)), global_batch_size=6, shared=False)
        feed = feed.weighted_by_class({0: 0.5, 1: 3.0, 2: 1.0})
        of_python = tf.function(
            feed._weigh_by_class,
            input_signature=[tf.TensorSpec([None]), tf.TensorSpec([None, None], labels.dtype)],
        )
        weights = of_python(x.astype(np.float32), labels)[2]
        np.testing.assert_allclose(weights, [0.5, 3, 1, 0.5, 3, 1])
    records = open_records((x, y[:, None], weight[:, None]))
    feed = Feed(records=records, global_batch_size=6, shared=False)
    by_class = dict(zip(np.unique(y.astype(np.float32)), [0.5, 3.0, 1.0], strict=True))
    batch = next(iter(feed.weighted_by_class(by_class).epochs(0, 1)))
    np.testing.assert_allclose(batch[2], np.array([1, 6, 2, 1, 6, 2])[:, None])


@pytest.mark.parametrize("kind", ["numbers", "one_hot"])
@pytest.mark.parametrize("weighted", [False, True])
def test_each_token_has_the_weight_of_its_own_class(kind, weighted):
    import numpy as np

    from tfdist.records.reading.reader import open_records

    y = np.array([[0, 1, 2], [2, 0, 0], [1, 1, 0], [2, 2, 1]])
    labels = y[..., None] + 0.4 if kind == "numbers" else np.eye(3)[y]  # Keras rounds numbers.
    rows = (np.array([1.0, 2.0, 3.0, 4.0]),) if weighted else ()
    records = open_records((np.arange(4), labels.astype(np.float32), *rows))
    feed = Feed(records=records, global_batch_size=4, shared=False, shuffle=False)
    batch = next(iter(feed.weighted_by_class({0: 0.5, 1: 3.0, 2: 1.0}).epochs(0, 1)))
    expected = np.array([0.5, 3.0, 1.0])[y] * (rows[0][:, None] if weighted else 1.0)
    np.testing.assert_allclose(batch[2], expected)


@pytest.mark.parametrize(
    ("labels", "class_weight", "found"),
    [
        ([0, 1, 2, 3], {0: 1.0, 1: 2.0}, "2, 3"),
        ([0, 1, 2, 2], {0: 1.0, 2: 2.0}, "1"),
        ([0, 1, -1, 0], {0: 1.0, 1: 2.0}, "-1"),
        ([0, 2, 2, 0], {0: 1.0, 2: 3.0}, None),
    ],
)
def test_a_class_without_a_weight_is_named(labels, class_weight, found):
    import numpy as np

    import tfdist

    def model_fn():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(4, "softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    from tensorflow import keras

    arrays = np.zeros((4, 1), np.float32), np.array(labels)
    strategy = tfdist.strategy("single")
    model, feed = strategy.build(model_fn), strategy.dataset(arrays, global_batch_size=4)
    if found is None:
        model.fit(feed, class_weight=class_weight, verbose=0)
        return
    words = rf"a weight for each class .* found none for class {found}\."
    with pytest.raises(DataError, match=words):
        model.fit(feed, class_weight=class_weight, verbose=0)
    if len(class_weight) > max(class_weight):  # Keras itself refuses gaps.
        with pytest.raises(DataError, match=words.replace("2, 3", "[23]")):
            model.fit(*arrays, class_weight=class_weight, verbose=0)


def test_batches_and_data_that_cannot_be_shared():
    with pytest.raises(OptionError, match=r"replicas, here 4, but found 3"):
        Feed(records=SimpleNamespace(num_records=9), global_batch_size=3, parts=2, splits=2)
    with pytest.raises(DataError, match="at least one record"):
        Feed(records=SimpleNamespace(num_records=0), global_batch_size=3)


@pytest.mark.parametrize("skip", [2, *long(0, 4)])
@pytest.mark.parametrize(("parts", "splits"), [(1, 1), (3, 1), (1, 2), *long((2, 2), (5, 1))])
@pytest.mark.parametrize("before", [1, 2, *long(4)])
def test_an_epoch_goes_on_with_another_number_of_processes(before, parts, splits, skip):
    """33 records in batches of 8, a tail of 1: each record once, the batches those of before."""
    begun = Feed(records=_records(33), global_batch_size=8, parts=before, shuffle=True, seed=3)
    expected = [
        list(x) for x, _ in begun.on_one_device().epochs(2, 3, skip_steps=skip).as_numpy_iterator()
    ]
    found: list[list[int]] = [[] for _ in expected]
    for part in range(parts):
        feed = Feed(
            records=_records(33),
            global_batch_size=8,
            parts=parts,
            part=part,
            splits=splits,
            shuffle=True,
            seed=3,
        )
        present = feed.begun_by(before)
        assert present.splits == splits  # The waits for data are measured by it.
        steps = _batches(present, 2, 3, skip_steps=skip)
        assert len(steps) == len(expected) * splits
        for number, (rows, padding, of) in enumerate(steps):
            assert padding == (not rows)
            assert of == len(expected[number // splits])
            found[number // splits] += rows
    if before == parts:  # In the order of this process, each its own.
        assert [sorted(rows) for rows in found] == [sorted(rows) for rows in expected]
    else:
        assert found == expected


def test_what_hosts_hold_is_limited_to_as_many_steps_as_what_all_share():
    feed = Feed(records=_records(100), global_batch_size=9, parts=2)
    limited = replace(feed, held=Held(0, (100, 100))).limited(3)
    assert limited.steps_per_epoch == feed.limited(3).steps_per_epoch == 3
    assert limited.num_records == feed.limited(3).num_records == 21
    assert replace(feed, held=Held(0, (2, 100))).limited(3).num_records == 2 + 9
    few = replace(feed, global_batch_size=4, held=Held(0, (0, 5)))
    assert few.limited(1).num_records == 1


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("counts", [(10, 10), (11, 7), (3, 17), (0, 5)])
def test_what_hosts_hold_is_read_once_in_as_many_steps(counts, shuffle):
    read, steps = [], []
    for part, count in enumerate(counts):
        # Each host has records of its own; a rank without any finds its host's at least.
        source = _records(max(counts))
        feed = Feed(
            records=source,
            global_batch_size=6,
            parts=2,
            part=part,
            shuffle=shuffle,
            held=Held(max(counts) - count, counts),
        )
        assert feed.num_records == sum(counts)
        batches = _batches(feed)
        assert len(batches) == feed.steps_per_epoch == -(-max(counts) // 3)
        mine = [record for rows, _, _ in batches for record in rows]
        assert sorted(mine) == list(range(max(counts) - count, max(counts)))
        read.append([len(rows) for rows, _, _ in batches])
        steps.append([of for _, _, of in batches])
        assert _batches(feed, skip_steps=1) == batches[1:]
    assert steps[0] == steps[1] == [a + b for a, b in zip(*read, strict=True)]
