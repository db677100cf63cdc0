"""``shard="optimizer"``: slots in parts, on each engine that divides batches.

The scenarios stand in shard_scenarios.py.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import OptionError
from tfdist.strategies import known_options, parse_options
from tfdist.training.callbacks import for_process
from tfdist.training.collective import OneProcess
from tfdist.training.options import StepOptions
from tfdist.training.parts import BYTES_OF_A_BUCKET, Division, buckets

sys.path.append(str(Path(__file__).parents[1]))
from scenarios import Job

# The first scenario of a job waits for all, on a machine that may be busy.
pytestmark = pytest.mark.timeout(580)
_FILE = Path(__file__).with_name("shard_scenarios.py")
_OF_FILES = ("a_resumed_fit", "files_are_those_of_one_device")
#: What is the same on every engine is tried on the quickest.
_ENGINES = {
    "mirrored": tuple(re.findall(r"^@scenario\ndef (\w+)", _FILE.read_text(), re.MULTILINE)),
    "horovod": (
        "slots_that_were_restored_before_the_first_fit",
        "decay_with_exclusions_and_clipping_of_all",
        "what_overflows_on_one_replica_updates_none",
        "a_checkpoint_of_one_device",
        *_OF_FILES,
        "what_cannot_be_divided_is_refused",
        "a_checkpoint_of_ones_own_is_refused",
    ),
    "multi_worker": ("decay_with_exclusions_and_clipping_of_all", *_OF_FILES),
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
    for name in _ENGINES:
        assert known_options(name)["shard"].default == "none"
    assert StepOptions(**parse_options("horovod", ["shard=optimizer"])).shards
    assert not StepOptions(shard="none").shards
    with pytest.raises(OptionError, match=r"shard must be a known one"):
        tfdist.strategy("mirrored", shard=True)
    with pytest.raises(OptionError, match=r"averaged part by part.*adasum"):
        tfdist.strategy("horovod", op="adasum", shard="optimizer")


def test_what_saves_on_the_chief_alone_would_wait_for_the_others():
    class Two(OneProcess):
        num_processes = 2
        sum = apply = distribute = None

    saver = tfdist.on_chief(tf.keras.callbacks.ModelCheckpoint("best.keras"))
    assert for_process([saver], Two()) == [saver]
    with pytest.raises(OptionError, match=r"must run on all.*ModelCheckpoint on the chief"):
        for_process([saver], Two(), gathers_slots=True)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    options = {"mirrored": {"devices": 2}, "horovod": {"stall_timeout_s": 20}}
    return {
        name: Job(
            _FILE,
            tmp_path_factory.mktemp(name),
            name,
            options.get(name, {}),
            ranks=1 if name == "mirrored" else 2,
            only=only,
        )
        for name, only in _ENGINES.items()
    }


@pytest.mark.parametrize(
    ("strategy", "name"), [(s, name) for s, names in _ENGINES.items() for name in names]
)
def test_on(strategy, name, jobs):
    jobs[strategy].check(name)
