"""Partitions: every record once, the skew that was asked for, the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from tfdist.errors import DataError, OptionError
from tfdist.records.clients.partition import Partition, deal, parse_partition, take_column

CLASS_IDS = np.random.default_rng(0).integers(0, 10, 3000)
KINDS = ("iid", "dirichlet:0.3", "dirichlet:1e-300", "dirichlet:1e300", "shards:2")


def dealt(text, num_clients=30, seed=0, class_ids=CLASS_IDS, **options):
    partition = parse_partition(text)
    return deal(partition, len(class_ids), num_clients, seed=seed, class_ids=class_ids, **options)


def mean_classes(parts, class_ids=CLASS_IDS):
    return np.mean([len(np.unique(class_ids[rows])) for rows in parts.values()])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("num_clients", [1, 7, 30, 1500])
@pytest.mark.parametrize("text", KINDS)
def test_every_record_is_dealt_once_and_no_client_is_empty(text, num_clients):
    parts = dealt(text, num_clients)
    assert len(parts) == num_clients
    assert np.array_equal(np.sort(np.concatenate(list(parts.values()))), np.arange(3000))
    sizes = [len(rows) for rows in parts.values()]
    # A client of shards:2 has two pieces, of which each may have a record more.
    assert max(sizes) - min(sizes) <= (2 if text == "shards:2" else 1)
    assert min(sizes) >= 1


@pytest.mark.parametrize("text", KINDS)
def test_the_seed_decides(text):
    first, again, other = (dealt(text, seed=seed) for seed in (3, 3, 4))
    assert all(np.array_equal(first[client], again[client]) for client in first)
    assert any(not np.array_equal(first[client], other[client]) for client in first)


def test_a_small_alpha_gives_few_classes_and_a_large_one_all():
    assert mean_classes(dealt("dirichlet:1000")) > 9.7
    assert mean_classes(dealt("iid")) > 9.7
    assert 3 < mean_classes(dealt("dirichlet:0.3")) < 7
    assert mean_classes(dealt("dirichlet:0.001")) < 2


def test_proportions_follow_the_dirichlet_distribution():
    """With many clients and classes that do not run out, the variance of a share is known."""
    class_ids = np.tile(np.arange(4), 100_000)
    parts = dealt("dirichlet:0.5", 400, class_ids=class_ids)
    shares = np.array([np.bincount(class_ids[rows], minlength=4) for rows in parts.values()]) / 1000
    # Each share is Beta(0.5, 1.5): variance 1/4 * 3/4 / 3, plus what drawing 1000 records adds.
    assert shares.var(axis=0).mean() == pytest.approx(0.0625, rel=0.15)
    assert shares.mean(axis=0) == pytest.approx([0.25] * 4)


def test_client_numbers_say_nothing_of_who_chose_late():
    late = []
    for seed in range(20):
        parts = dealt("dirichlet:0.3", seed=seed)
        counts = [len(np.unique(CLASS_IDS[rows])) for rows in parts.values()]
        late.append(np.mean(counts[-5:]) - np.mean(counts[:-5]))
    assert abs(np.mean(late)) < 0.5


def test_shards_have_at_most_that_many_runs_of_classes():
    class_ids = np.repeat(np.arange(10), 300)
    parts = dealt("shards:2", 30, class_ids=class_ids)
    # 60 shards of 50 records: none crosses from one class to the next.
    assert {len(np.unique(class_ids[rows])) for rows in parts.values()} <= {1, 2}
    assert mean_classes(parts, class_ids) > 1.5


def test_unequal_classes_keep_their_proportions_in_expectation():
    class_ids = np.repeat([0, 1], [2700, 300])
    parts = dealt("dirichlet:5", 30, class_ids=class_ids)
    shares = [class_ids[rows].mean() for rows in parts.values()]
    assert np.mean(shares) == pytest.approx(0.1)
    assert 0 < np.std(shares) < 0.3


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (np.array([10, 9, 10, -1]), ["-1", "9", "10"]),
        (np.array(["bob", "eve", "bob", "amy"]), ["amy", "bob", "eve"]),
        (np.array([True, False, True, True]), ["False", "True"]),
        (np.array(["zoé".encode(), b"amy", b"amy", b"amy"], object), ["amy", "zoé"]),
        (np.array([0.5, 1.0, 0.5, 0.5]), ["0.5", "1.0"]),
    ],
)
def test_by_a_column(values, names):
    parts = deal(parse_partition("by:user"), 4, None, seed=0, values=values)
    assert list(parts) == names
    for name, rows in parts.items():
        assert len(set(values[rows].tolist())) == 1, name
    assert sorted(np.concatenate(list(parts.values()))) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "values",
    [
        np.array(["a", ""]),
        np.array([1.0, np.nan]),
        np.array(["a", None], object),
        np.array(["a", float("nan")], object),
    ],
)
def test_by_a_column_with_missing_values(values):
    with pytest.raises(DataError, match="'user' must be present"):
        deal(parse_partition("by:user"), 2, None, seed=0, values=values)


def test_by_a_column_of_texts_and_numbers():
    with pytest.raises(DataError, match="must be all texts, or all numbers"):
        deal(parse_partition("by:user"), 2, None, seed=0, values=np.array(["a", 1], object))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Choose one of iid, dirichlet:ALPHA, shards:K, by:COLUMN"),
        ("dirichlt:0.3", "Did you mean 'dirichlet:ALPHA'"),
        ("iid:3", "partition must be a known one"),
        ("dirichlet", "partition must be a known one"),
        ("dirichlet:", "positive number"),
        ("dirichlet:0", "positive number, but found '0'"),
        ("dirichlet:-1", "positive number"),
        ("dirichlet:nan", "positive number"),
        ("dirichlet:inf", "positive number"),
        ("shards:0", "at least 1"),
        ("shards:1.5", "whole number"),
        ("by:", "partition must be a known one"),
    ],
)
def test_what_is_no_partition(text, message):
    with pytest.raises(OptionError, match=message):
        parse_partition(text)


@pytest.mark.parametrize("text", ["iid", "dirichlet:0.3", "shards:2", "by:user"])
def test_a_partition_is_written_as_it_was_given(text):
    assert str(parse_partition(text)) == text


def test_numbers_of_clients_that_cannot_be():
    with pytest.raises(DataError, match="10 records for 11 clients"):
        dealt("iid", 11, class_ids=np.zeros(10, np.int64))
    with pytest.raises(DataError, match="10 records for 6 clients of 2 shards each"):
        dealt("shards:2", 6, class_ids=np.zeros(10, np.int64))
    with pytest.raises(OptionError, match="at least 1"):
        dealt("iid", 0)
    with pytest.raises(OptionError, match="must have a number of clients"):
        dealt("iid", None)
    with pytest.raises(OptionError, match="3 clients too"):
        dealt("by:user", 3, values=CLASS_IDS)


def test_skewed_labels_need_labels():
    for text in ("dirichlet:1", "shards:2"):
        with pytest.raises(DataError, match="class ids"):
            deal(parse_partition(text), 10, 2, seed=0)
    assert len(deal(Partition(kind="iid"), 10, 2, seed=0)) == 2


def test_an_input_that_names_clients_is_none_any_more_and_a_label_stays():
    inputs = {"x": np.zeros((3, 2)), "user": np.array([["a"], ["b"], ["a"]])}
    labels = {"label": np.arange(3)}
    values, others = take_column("user", inputs, labels)
    assert values.tolist() == ["a", "b", "a"]
    assert list(others) == ["x"]
    values, others = take_column("label", inputs, labels)
    assert values.tolist() == [0, 1, 2]
    assert list(others) == ["x", "user"]
    with pytest.raises(DataError, match="one value a record"):
        take_column("x", inputs, labels)
    with pytest.raises(DataError, match="Choose one of x, user, label"):
        take_column("usr", inputs, labels)
    with pytest.raises(DataError, match="Choose one of label"):
        take_column("x", {"x": np.zeros(3)}, labels)
