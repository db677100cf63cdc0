"""Which record goes where."""

from __future__ import annotations

import numpy as np
import pytest

from tfdist.errors import DataError, OptionError
from tfdist.records.format.splits import apportion, assign, cut_shards, parse_split


def test_default_split_is_five_to_one():
    from tfdist.records.format.splits import DEFAULT_SPLIT

    assert parse_split(DEFAULT_SPLIT) == {"train": 5.0, "validation": 1.0}


@pytest.mark.parametrize(
    "split", ["", "train", "train=", "train=0", "train=-1", "train=x", "a=1,a=2", "../x=1", "a=inf"]
)
def test_a_split_that_cannot_be(split):
    with pytest.raises(OptionError):
        parse_split(split)


def test_a_mapping_is_a_split_too():
    assert parse_split({"train": 0.8, "test": 0.2}) == {"train": 0.8, "test": 0.2}
    with pytest.raises(OptionError, match="at least one split"):
        parse_split({})


@pytest.mark.parametrize("count", [1, 6, 7, 100, 1797])
def test_apportion_gives_whole_numbers_near_the_exact_ones(count):
    parts = apportion(count, [5, 1, 1])
    assert parts.sum() == count
    assert (np.abs(parts - count * np.array([5, 1, 1]) / 7) < 1).all()


def test_every_record_is_in_one_split_in_shuffled_order():
    rows = assign(100, {"train": 5, "validation": 1}, 0, None)
    everything = np.concatenate(list(rows.values()))
    assert sorted(everything) == list(range(100))
    assert len(rows["train"]) == 83
    assert list(rows["train"]) != sorted(rows["train"])


def test_the_assignment_is_a_function_of_the_seed():
    def train(seed):
        return assign(100, {"train": 5, "validation": 1}, seed, None)["train"].tolist()

    assert train(0) == train(0)
    assert train(0) != train(1)


def test_stratified_splits_keep_the_proportions():
    class_ids = np.repeat([0, 1, 2], [600, 60, 6])
    rows = assign(666, {"train": 5, "validation": 1}, 0, class_ids)
    counts = {name: np.bincount(class_ids[ids]).tolist() for name, ids in rows.items()}
    assert counts == {"train": [500, 50, 5], "validation": [100, 10, 1]}
    assert sorted(np.concatenate(list(rows.values()))) == list(range(666))


def test_stratified_splits_of_many_small_classes_keep_the_shares():
    class_ids = np.repeat(np.arange(60), 2)
    rows = assign(120, {"train": 5, "validation": 1}, 0, class_ids)
    assert abs(len(rows["train"]) - 100) <= 1


def test_an_empty_split_is_an_error():
    with pytest.raises(DataError, match="split 'validation' must have at least one record"):
        assign(2, {"train": 5, "validation": 1}, 0, None)


@pytest.mark.parametrize(("records", "shards"), [(10, 3), (9, 3), (3, 3), (101, 8)])
def test_shards_differ_by_at_most_one_record(records, shards):
    sizes = [len(shard) for shard in cut_shards(np.arange(records), shards)]
    assert sum(sizes) == records
    assert len(sizes) == shards
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("share", ["1e308", "inf", "nan", "0", "-1"])
def test_a_share_that_cannot_be_is_an_error(share):
    with pytest.raises(OptionError, match="share of split 'train' must be a positive number"):
        parse_split(f"train={share},test={share}")
