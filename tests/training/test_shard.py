"""``shard="optimizer"``: slots in parts, on each engine that divides batches.

The scenarios stand in shard_scenarios.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from scenario_plugin import Job

import tfdist
from tfdist.compat.keras import VARIABLE
from tfdist.errors import OptionError
from tfdist.strategies import known_options, parse_options
from tfdist.training.engine.collective import OneProcess
from tfdist.training.engine.options import StepOptions
from tfdist.training.loops.callbacks import for_process
from tfdist.training.memory.flat_parts import BYTES_OF_A_BUCKET, Division, buckets

SCENARIOS = "shard_scenarios.py"
#: What is the same on every engine is tried on the quickest.
JOBS = {
    "mirrored": Job("mirrored", {"devices": 2}),
    "keras_3": Job("mirrored", {"devices": 2}, env={VARIABLE: "0"}, only_named=True),
    "horovod": Job("horovod", {"stall_timeout_s": 100}, ranks=2, only_named=True),
    "multi_worker": Job("multi_worker", ranks=2, only_named=True),
}


def test_weights_in_parts():
    division = Division((3, 5), 4, tf.float32)
    whole = np.arange(15, dtype=np.float32).reshape(3, 5)
    assert division.part_size == 4
    parts = [division.part(whole, replica).numpy() for replica in range(4)]
    np.testing.assert_array_equal(parts[3], [12, 13, 14, 0])
    np.testing.assert_array_equal(division.rows(whole), parts)
    np.testing.assert_array_equal(division.whole(division.rows(whole)), whole)
    np.testing.assert_array_equal(division.whole_array(parts), whole)
    # Where there are more replicas than elements some hold padding alone.
    one = Division((), 3, tf.float32)
    np.testing.assert_array_equal([one.part(7.0, r) for r in range(3)], [[7], [0], [0]])
    assert one.whole(one.rows(7.0)).numpy() == 7


def test_weights_in_buckets():
    of_half = Division((BYTES_OF_A_BUCKET // 8,), 2, tf.float32)
    small, wide = Division((6,), 2, tf.float32), Division((6,), 2, tf.float64)
    divisions = [small, of_half, of_half, small, wide, small]
    found = [bucket.indices for bucket in buckets(divisions, [0, 1, 2, 3, 4])]
    assert found == [(0, 1), (2, 3), (4,)]
    bucket = buckets([small, Division((2, 2), 2, tf.float32)], [0, 1])[0]
    wholes = [np.arange(6.0, dtype=np.float32), np.full((2, 2), 9, np.float32)]
    rows = bucket.rows(wholes)
    np.testing.assert_array_equal(rows, [[0, 1, 2, 9, 9], [3, 4, 5, 9, 9]])
    for one, other in zip(bucket.wholes(rows), wholes, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(bucket.split(rows[1])[0], [3, 4, 5])


def test_as_an_option():
    for name in ("mirrored", "horovod", "multi_worker"):
        assert known_options(name)["shard"].default == "none"
    assert StepOptions(**parse_options("horovod", ["shard=optimizer"])).shards
    assert not StepOptions(shard="none").shards
    with pytest.raises(OptionError, match=r"shard must be a known one"):
        tfdist.strategy("mirrored", shard=True)
    for shard in ("optimizer", "weights"):
        with pytest.raises(OptionError, match=rf"shard='{shard}'.*averaged part by part.*adasum"):
            tfdist.strategy("horovod", op="adasum", shard=shard)
    for name in ("single", "mirrored"):
        with pytest.raises(OptionError, match=rf"on strategy 'horovod' or 'multi_.*'{name}'"):
            tfdist.strategy(name, shard="weights")
    for option in ({"communication": "ring"}, {"bytes_per_pack": 4096}):
        with pytest.raises(OptionError, match=r"must be left out with shard='weights'"):
            tfdist.strategy("multi_worker", shard="weights", **option)


def test_what_saves_on_the_chief_alone_would_wait_for_the_others():
    class Two(OneProcess):
        num_processes = 2
        sum = apply = distribute = None

    saver = tfdist.on_chief(tf.keras.callbacks.ModelCheckpoint("best.keras"))
    assert for_process([saver], Two()) == [saver]
    with pytest.raises(OptionError, match=r"must run on all.*ModelCheckpoint on the chief"):
        for_process([saver], Two(), gathers_slots=True)
    board = tf.keras.callbacks.TensorBoard(histogram_freq=1)
    assert for_process([board], Two(), gathers_slots=True) == [board]
    with pytest.raises(OptionError, match=r"must write no weights.*found histogram_freq=1"):
        for_process([board], Two(), gathers_slots=True, gathers_weights=True)
    board = tf.keras.callbacks.TensorBoard(embeddings_freq=1)
    with pytest.raises(OptionError, match=r"must write no weights.*found embeddings_freq=1"):
        for_process([board], Two(), gathers_slots=True)


def test_on(scenario):
    scenario.check()
