"""What groups of simulated clients are given: groups of like work, and a file in parts."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import tensorflow as tf

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
                ends = np.cumsum(work["steps"])
                for slot, end, steps in zip(
                    work["slots"].numpy(), ends, work["steps"], strict=True
                ):
                    order = work["order"].numpy()[end - steps : end]
                    rows = order[order >= 0]
                    found[slot] = [leaf.numpy()[rows] for leaf in tf.nest.flatten(arrays)]
        assert [len(packing.given_to(dataset)["parts"]) for dataset in datasets][1:] == [1, 0]
        assert len(packing.given_to(datasets[0])["parts"]) > 1
    assert sorted(found) == [0, 1, 2, 3, 4]
    for slot, (arrays, order) in enumerate(given):
        for ours, leaf in zip(found[slot], tf.nest.flatten(arrays), strict=True):
            right = [v.encode() if isinstance(v, str) else v for v in leaf[order[order >= 0]]]
            np.testing.assert_array_equal(ours, right)
