"""Batches at the length of their longest record, and batches of records of similar length."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import tensorflow as tf
from tiers import long

import tfdist
from tfdist.errors import CorruptShardError, DataError, OptionError
from tfdist.records import write
from tfdist.records.format.pad_to import padding_of
from tfdist.records.reading.batch_padding import BatchPadding, of_records
from tfdist.records.reading.reader import open_records
from tfdist.training.feed.feed import Feed

COUNT, BATCH = 61, 8
LENGTHS = np.random.default_rng(0).integers(0, 40, COUNT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Record n has the tokens n + 1, as many as ``LENGTHS`` says, and twice as many pairs."""
    out = tmp_path_factory.mktemp("lengths") / "data"
    inputs = {
        "tokens": [np.full(length, n + 1) for n, length in enumerate(LENGTHS)],
        "pairs": [np.full((2 * length, 2), n, np.float16) for n, length in enumerate(LENGTHS)],
        "words": [["a"] * (length // 2) for length in LENGTHS],
        "id": np.arange(COUNT),
    }
    write((inputs, np.arange(COUNT) % 2), out, split="train=1", num_shards=3)
    return out


@pytest.fixture(scope="module")
def stored(folder):
    """The ids of the records as they lie in the shards."""
    batches = open_records(folder).batches(0, COUNT, COUNT, shuffle=False, seed=0, epoch=0)
    return next(batches.as_numpy_iterator())[0]["id"].tolist()


def _feed(folder, pad_to="batch", buckets=False, *, part=0, parts=1, cache="auto", **options):
    records = open_records(folder, cache=cache, padding=padding_of(pad_to, buckets))
    options = {"shuffle": True, "shared": True} | options
    return Feed(records=records, global_batch_size=BATCH, part=part, parts=parts, **options)


def _steps(feed, first=0, last=1, **options):
    """Returns for each step (numbers of its true records, width of tokens, of pairs, of words)."""
    steps = []
    for (x, _), (rows, _) in feed.epochs(first, last, **options).as_numpy_iterator():
        steps.append(
            (x["id"][:rows].tolist(), *(x[n].shape[1] for n in ("tokens", "pairs", "words")))
        )
        for row, number in enumerate(x["id"][:rows]):
            length = min(LENGTHS[number], x["tokens"].shape[1])
            assert length == LENGTHS[number]
            assert x["tokens"][row].tolist() == [number + 1] * length + [0] * (
                x["tokens"].shape[1] - length
            )
            assert (x["pairs"][row, : 2 * length] == number).all()
            assert not x["pairs"][row, 2 * length :].any()
    return steps


@pytest.mark.parametrize(
    ("parts", "pad_to", "cache"), [(3, "batch", True), *long((1, 16, True), (2, "batch", False))]
)
def test_all_shares_of_a_global_batch_have_its_length(folder, parts, pad_to, cache):
    of_parts = [_feed(folder, pad_to, part=p, parts=parts, cache=cache) for p in range(parts)]
    steps = [_steps(feed, 0, 2) for feed in of_parts]
    multiple = 1 if pad_to == "batch" else pad_to
    seen = []
    for shares in zip(*steps, strict=True):
        numbers = np.concatenate([share[0] for share in shares]).astype(int)
        seen += numbers.tolist()
        longest = LENGTHS[numbers].max()
        width, pairs, words = (
            -(-max(1, most) // multiple) * multiple for most in (longest, 2 * longest, longest // 2)
        )
        assert {share[1:] for share in shares} == {(width, pairs, words)}
    assert sorted(seen) == sorted([*range(COUNT)] * 2)


def test_a_process_without_a_row_in_the_last_step_has_its_length_too(folder):
    """61 records of 20 a step leave one row, for the first of three processes."""
    feeds = [_feed(folder, part=part, parts=3) for part in range(3)]
    feeds = [replace(feed, global_batch_size=20) for feed in feeds]
    last = [_steps(feed)[-1] for feed in feeds]
    resumed = [_steps(feed, skip_steps=3)[0] for feed in feeds]
    assert resumed == last
    assert [len(numbers) for numbers, *_ in last] == [1, 0, 0]
    assert {step[1:] for step in last} == {last[0][1:]}


@pytest.mark.parametrize(("parts", "buckets"), [(2, True), *long((3, [10, 20, 40]))])
def test_buckets_are_the_same_on_any_number_of_processes(folder, parts, buckets):
    whole = _steps(_feed(folder, buckets=buckets), 0, 2)
    of_parts = [
        _steps(_feed(folder, buckets=buckets, part=p, parts=parts), 0, 2) for p in range(parts)
    ]
    for one, *shares in zip(whole, *of_parts, strict=True):
        assert [number for share in shares for number in share[0]] == one[0]
        assert {share[1:] for share in shares} == {one[1:]}
    numbers = [step[0] for step in whole]
    half = len(numbers) // 2
    for epoch in (numbers[:half], numbers[half:]):
        assert sorted(chain(*epoch)) == list(range(COUNT))
        assert [len(step) for step in epoch] == [BATCH] * 7 + [5]
    assert numbers[:half] != numbers[half:]
    again = _feed(folder, buckets=buckets)
    assert _steps(again, 1, 2, skip_steps=3) == whole[half + 3 :]
    assert _steps(replace(again, seed=1))[0] != whole[0]


def test_batches_of_buckets_hold_similar_lengths_in_shuffled_order(folder):
    spread = [np.ptp(LENGTHS[numbers]) for numbers, *_ in _steps(_feed(folder, buckets=True))[:-1]]
    assert np.mean(spread) < 8 < np.mean([np.ptp(LENGTHS[n]) for n, *_ in _steps(_feed(folder))])
    widths = [width for _, width, *_ in _steps(_feed(folder, buckets=True))[:-1]]
    assert widths != sorted(widths)
    # One batch at most between two buckets holds records of both.
    kinds = [set(np.searchsorted([20, 40], 2 * LENGTHS[numbers]))
             for numbers, *_ in _steps(_feed(folder, buckets=[20, 40]))[:-1]]  # fmt: skip
    assert sum(len(kind) > 1 for kind in kinds) <= 2


def test_evaluation_reads_the_records_in_order(folder, stored):
    in_order = _feed(folder, buckets=True).in_record_order()
    assert list(chain(*(numbers for numbers, *_ in _steps(in_order)))) == stored
    feeds = [_feed(folder, part=p, parts=2, shuffle=False) for p in range(2)]
    steps = [_steps(feed.evaluated()) for feed in feeds]
    assert [a[0] + b[0] for a, b in zip(*steps, strict=True)] == [n for n, *_ in _steps(in_order)]
    local = [np.concatenate([numbers for numbers, *_ in of_part]) for of_part in steps]
    assert feeds[0].in_order_of_records(local).tolist() == stored


@pytest.mark.parametrize("encoding", ["int64", "float32", "float64", "uint8", "bool", "float16"])
def test_numbers_of_every_kind(tmp_path, encoding):
    parts = [np.ones(n).astype(encoding) for n in (3, 1, 2)]
    write((parts, np.arange(3)), tmp_path / "data", split="train=1", num_shards=1)
    records = open_records(tmp_path / "data", padding=padding_of(4, False))
    ((x, _),) = records.batches(0, 3, 3, shuffle=False, seed=0, epoch=0)
    assert (x.dtype, x.shape) == (encoding, (3, 4))
    assert sorted(np.sum(x.numpy().astype(int), 1)) == [1, 2, 3]


def test_map_fn_is_given_the_padded_batch(folder, stored):
    def map_fn(x, y):
        assert x["tokens"].shape.as_list()[1] is None
        return tf.shape(x["tokens"])[1] + tf.zeros(tf.shape(y), tf.int32), y

    records = open_records(folder, map_fn=map_fn, padding=padding_of(16, False))
    batches = records.batches(0, COUNT, BATCH, shuffle=False, seed=0, epoch=0)
    longest = [LENGTHS[stored[n : n + BATCH]].max() for n in range(0, COUNT, BATCH)]
    expected = [-(-most // 16) * 16 for most in longest]
    assert [int(x[0]) for x, _ in batches] == expected


def _longer_or_shorter(x, y):
    """Puts a token before those of even records, and leaves one out of the others."""
    own = tf.cast(x["id"], tf.int64)[None] + 1
    before = tf.repeat(own, tf.cast(x["id"] % 2 == 0, tf.int32))
    after = x["tokens"][tf.cast(x["id"] % 2, tf.int32) :]
    return {"id": x["id"], "tokens": tf.concat([before, after], 0)}, y


@pytest.mark.parametrize(
    ("parts", "pad_to", "cache", "buckets"),
    [
        (1, "batch", "auto", True),
        *long(
            (2, "batch", False, False),
            (1, 16, True, False),
            (3, "batch", True, False),
            (3, 16, "auto", [4, 9]),
        ),
    ],
)
def test_lengths_are_those_that_record_fn_leaves(folder, parts, pad_to, cache, buckets):
    records = open_records(
        folder, cache=cache, record_fn=_longer_or_shorter, padding=padding_of(pad_to, buckets)
    )
    assert "once" in records.note
    options = {"records": records, "global_batch_size": BATCH, "shuffle": True, "shared": True}
    feeds = [Feed(part=part, parts=parts, **options) for part in range(parts)]
    of_parts = [list(feed.epochs(0, 2).as_numpy_iterator()) for feed in feeds]
    resumed = [next(feed.epochs(0, 2, skip_steps=3).as_numpy_iterator()) for feed in feeds]
    multiple, seen = 1 if pad_to == "batch" else pad_to, []
    for step, shares in enumerate(zip(*of_parts, strict=True)):
        numbers = np.concatenate([x["id"][:rows] for (x, _), (rows, _) in shares])
        even = numbers % 2 == 0
        lengths = np.where(even, LENGTHS[numbers] + 1, np.maximum(LENGTHS[numbers] - 1, 0))
        width = -(-max(1, lengths.max()) // multiple) * multiple
        tokens = np.concatenate([x["tokens"][:rows] for (x, _), (rows, _) in shares])
        expected = np.where(np.arange(width) < lengths[:, None], numbers[:, None] + 1, 0)
        np.testing.assert_array_equal(tokens, expected)
        seen += numbers.tolist()
        if step == 3:
            for share, again in zip(shares, resumed, strict=True):
                tf.nest.map_structure(np.testing.assert_array_equal, share, again)
    assert sorted(seen) == sorted([*range(COUNT)] * 2)


def test_what_record_fn_leaves_is_filled_as_before():
    """A label that is padded with -1, beside tokens that become numbers of another kind."""
    of_stored = (tf.TensorSpec([None, None], tf.int64), tf.TensorSpec([None, None], tf.int64))
    own = BatchPadding(padding_of("batch", False), [0, -1], np.ones((2, 2), np.int32))
    records = tf.data.Dataset.from_tensors((tf.ones([3]), tf.ones([2], tf.int64)))
    changed = (tf.TensorSpec([None, None], tf.float32), of_stored[1])
    assert of_records(own.padding, changed, own, of_stored, records).fills == (0, -1)
    text = (tf.TensorSpec([None, None], tf.string), of_stored[1])
    records = tf.data.Dataset.from_tensors((tf.constant(["a"]), tf.ones([2], tf.int64)))
    assert of_records(own.padding, text, own, of_stored, records).fills == ("", -1)


def test_a_record_draws_the_same_numbers_in_buckets(folder):
    """They are of the seed, the epoch and its number, whatever it is batched with."""

    def drawn(x, y, seed):
        numbers = tf.random.stateless_uniform(tf.shape(x["tokens"]), seed, 1, 1000, tf.int64)
        return {"id": x["id"], "tokens": numbers}, y

    found = []
    for buckets, parts in ((False, 1), (True, 1), (True, 2)):
        records = open_records(folder, record_fn=drawn, padding=padding_of("batch", buckets))
        options = {"records": records, "global_batch_size": BATCH, "shuffle": True, "seed": 5}
        feeds = [Feed(part=part, parts=parts, **options) for part in range(parts)]
        found.append(
            {
                int(x["id"][row]): x["tokens"][row][x["tokens"][row] > 0].tolist()
                for feed in feeds
                for (x, _), (rows, _) in feed.epochs(1, 2).as_numpy_iterator()
                for row in range(rows)
            }
        )
    assert len(found[0]) == COUNT
    assert found[0] == found[1] == found[2]


def test_lengths_that_record_fn_draws_are_refused(folder):
    def drawn(x, y, seed):
        some = tf.random.stateless_uniform([], seed, 0, 9, tf.int32)
        return {"tokens": x["tokens"][some:]}, y

    padding = padding_of("batch", False)
    records = open_records(folder, record_fn=drawn, padding=padding)
    batches = records.batches(0, COUNT, BATCH, shuffle=False, seed=1, epoch=1)
    with pytest.raises(tf.errors.OpError) as error:
        list(batches)
    assert "same length each time" in str(records.explain(error.value))


def test_record_fn_may_give_all_one_length(folder):
    def first(x, y):
        return tf.pad(x["tokens"], [[0, 4]])[:4], y

    def ensured(x, y):
        return tf.ensure_shape(first(x, y)[0], [4]), y

    records = open_records(folder, record_fn=ensured, padding=padding_of("batch", False))
    feed = Feed(records=records, global_batch_size=BATCH, shuffle=True, shared=False)
    assert {x.shape[1:] for x, _ in feed.epochs(0, 1)} == {(4,)}


def test_a_shard_exchanged_while_buckets_are_read_is_found(folder, tmp_path):
    write((([[1, 2], [3]] * 4), np.arange(8)), tmp_path / "data", split="train=1", num_shards=1)
    feed = Feed(
        records=open_records(tmp_path / "data", padding=padding_of("batch", True)),
        global_batch_size=2, shuffle=True, shared=False,
    )  # fmt: skip
    assert len(list(feed.epochs(0, 1))) == 4
    (shard,) = (tmp_path / "data").glob("*.tfrecord*")
    content = bytearray(shard.read_bytes())
    content[20] ^= 1
    shard.with_suffix(".new").write_bytes(content)
    os.replace(shard.with_suffix(".new"), shard)
    with pytest.raises(tf.errors.OpError) as error:
        list(feed.epochs(1, 2))
    explained = feed.records.explain(error.value)
    assert isinstance(explained, CorruptShardError)
    assert shard.name in str(explained)


@pytest.mark.parametrize("pad_to", ["longest", 0, -1, True, 1.5])
def test_what_pad_to_must_be(pad_to):
    with pytest.raises(OptionError, match="pad_to must be"):
        padding_of(pad_to, False)


@pytest.mark.parametrize("buckets", [[], [5, 5], [8, 4], "32", [0, 4], 3])
def test_what_bucket_by_length_must_be(buckets):
    with pytest.raises(OptionError, match="bucket_by_length must be"):
        padding_of("batch", buckets)


def test_what_has_no_lengths_is_refused(folder, tmp_path):
    with pytest.raises(OptionError, match="together with pad_to"):
        padding_of(None, True)
    padding = padding_of("batch", True)
    with pytest.raises(DataError, match="of shards with a feature of variable length"):
        open_records((np.zeros((3, 2)), np.zeros(3)), padding=padding)
    write(
        ([[1], [2, 3]], np.arange(2)),
        tmp_path / "gz",
        split="train=1",
        num_shards=1,
        compression="gzip",
    )
    with pytest.raises(DataError, match="must not be compressed"):
        open_records(tmp_path / "gz", padding=padding)
    assert open_records(tmp_path / "gz", padding=padding_of("batch", False)).num_records == 2


@pytest.mark.parametrize("name", ["mesh", "pipeline", "parameter_server", "federated"])
def test_engines_that_are_made_for_one_shape_refuse_it(name):
    strategy = tfdist.strategy(name)
    with pytest.raises(OptionError, match=f"strategy '{name}' must be given batches of one length"):
        strategy.dataset("nowhere", global_batch_size=8, pad_to="batch")
