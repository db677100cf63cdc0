"""What groups of simulated clients are given: groups of like work, and a file in parts."""

from __future__ import annotations

import errno
from collections import OrderedDict

import numpy as np
import pytest
import tensorflow as tf

from tfdist.errors import WriteError
from tfdist.strategies.federated import packing


def test_the_longest_goes_first_to_the_group_with_the_least_to_do():
    work = [1, 9, 2, 8, 3, 7]
    groups = packing.group_of_each(work, 2)
    loads = [sum(w for w, g in zip(work, groups, strict=True) if g == group) for group in (0, 1)]
    assert loads == [15, 15]
    assert packing.group_of_each([], 2) == []


def test_a_file_of_parts_gives_back_each_clients_records(monkeypatch):
    monkeypatch.setattr(packing, "_PART_BYTES", 200)
    rng = np.random.default_rng(0)
    given = []
    with packing.RoundFile(3, with_empty=True) as packed:
        for slot, rows in enumerate((5, 1, 9, 4, 7)):
            names = np.array([f"record {row}" for row in range(rows)], object)
            arrays = OrderedDict(x=(rng.random((rows, 4), dtype=np.float32), names), y=names)
            order = np.pad(rng.permutation(rows).astype(np.int32), (0, -rows % 2)).reshape(-1, 2)
            order[-1, 1:] = -1
            given.append((arrays, order))
            packed.add(slot % 2, arrays, order, slot)
        spec = OrderedDict(
            x=(tf.TensorSpec([None, 4], tf.float32), tf.TensorSpec([None], tf.string)),
            y=tf.TensorSpec([None], tf.string),
        )
        datasets = packed.datasets([0.5])
        found = {}
        for dataset in datasets:
            group = packing.given_to(dataset)
            np.testing.assert_array_equal(group["clipping"], [0.5])
            for number in range(len(group["parts"])):
                arrays, work = packing.part_of(group, number, spec)
                sizes = work["steps"].numpy() * work["widths"].numpy()
                for slot, end, size in zip(
                    work["slots"].numpy(), np.cumsum(sizes), sizes, strict=True
                ):
                    order = work["order"].numpy()[end - size : end]
                    rows = order[order >= 0]
                    found[slot] = [leaf.numpy()[rows] for leaf in tf.nest.flatten(arrays)]
        assert [len(packing.given_to(dataset)["parts"]) for dataset in datasets][1:] == [1, 0]
        assert len(packing.given_to(datasets[0])["parts"]) > 1
    assert sorted(found) == [0, 1, 2, 3, 4]
    for slot, (arrays, order) in enumerate(given):
        for ours, leaf in zip(found[slot], tf.nest.flatten(arrays), strict=True):
            right = [v.encode() if isinstance(v, str) else v for v in leaf[order[order >= 0]]]
            np.testing.assert_array_equal(ours, right)


def _client(rows, length, width):
    arrays = OrderedDict(x=np.ones((rows, length), np.float32), y=np.zeros(rows, np.int64))
    return arrays, np.arange(rows, dtype=np.int32).reshape(-1, width)


def test_clients_with_sequences_of_other_lengths_are_other_parts():
    with packing.RoundFile(1, with_empty=True) as packed:
        for slot, length in enumerate((3, 3, 5)):
            packed.add(0, *_client(2, length, 2), slot)
        group = packing.given_to(packed.datasets([])[0])
        spec = OrderedDict(
            x=tf.TensorSpec([None, None], tf.float32), y=tf.TensorSpec([None], tf.int64)
        )
        parts = [packing.part_of(group, number, spec) for number in range(2)]
    assert [(arrays["x"].shape[1], list(work["slots"])) for arrays, work in parts] == [
        (3, [0, 1]),
        (5, [2]),
    ]


def test_a_wide_step_of_one_client_costs_the_others_nothing():
    with packing.RoundFile(1, with_empty=True) as packed:
        packed.add(0, *_client(10_000, 1, 10_000), 0)
        for slot in range(1, 200):
            packed.add(0, *_client(2, 1, 1), slot)
        group = packing.given_to(packed.datasets([])[0])
    assert int(group["size"]) < 400_000


def test_a_full_folder_is_no_clients_fault():
    class Full:
        def write(self, content):
            raise OSError(errno.ENOSPC, "No space left on device")

        tell, close = (lambda self: 0), (lambda self: None)

    with packing.RoundFile(1, with_empty=False) as packed:
        packed._file.close()
        packed._file = Full()
        with pytest.raises(WriteError, match=r"records of a round in .*No space left"):
            packed.add(0, *_client(2, 1, 1), 0)
