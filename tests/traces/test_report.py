"""Where the time of a step went: two Horovod ranks, of which one sleeps in a layer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import tfdist
from tfdist.errors import DataError
from tfdist.traces import places, xplane
from tfdist.traces.report import Report, report
from tfdist.traces.shares import PARTS

pytestmark = pytest.mark.timeout(200)
_STEPS, _SLEEP_MS = (3, 8), 40
_MODEL = f"""
import time

import tensorflow as tf
from tensorflow import keras

from tfdist import topology


class Slow(keras.layers.Layer):
    def call(self, x):
        def wait(x):
            if topology.current().rank == 1:
                time.sleep({_SLEEP_MS / 1000})
            return x

        slow = tf.py_function(wait, [tf.stop_gradient(x)], tf.float32)
        return x + 0 * tf.ensure_shape(slow, x.shape)


def model_fn():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3), Slow(name="sleepy")])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss)
    return model
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("traced")
    (folder / "model.py").write_text(_MODEL)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(160, 8)).astype(np.float32)
    tfdist.records.write((x, rng.integers(0, 3, 160)), folder / "data", num_shards=2)
    tfdist.train(
        f"{folder / 'model.py'}:model_fn",
        folder / "data",
        folder / "run",
        strategy="horovod",
        workers=2,
        epochs=1,
        global_batch_size=16,
        profile=f"steps={_STEPS[0]}:{_STEPS[1]}",
        verbose=False,
    )
    return folder / "run"


@pytest.fixture(scope="module")
def found(run) -> Report:
    return report(run)


def test_each_rank_has_its_steps_and_every_moment_counts_once(found):
    wanted = [(step, step) for step in range(_STEPS[0], _STEPS[1] + 1)]
    assert [trace.steps for trace in found.traces] == [wanted, wanted]
    for share in found.shares:
        assert share.step == pytest.approx(sum(getattr(share, name) for name in PARTS))
        assert all(getattr(share, name) >= 0 for name in PARTS)
        assert 0 <= share.overlap <= 1
        assert 0 < share.input < share.step


def test_the_rank_that_sleeps_is_named_and_the_other_waits_for_it(found):
    """Times of known numbers stand in test_shares.py: here is only their order certain."""
    waiting, sleeping = found.shares
    assert sleeping.compute > waiting.compute
    assert waiting.for_rank > sleeping.for_rank
    late = found.straggler
    assert (late.rank, late.executions) == (1, 6)
    assert late.times > 3


def test_the_longest_operation_has_its_layer(found):
    first = found.longest[0]
    assert (first.layer, first.kind) == ("sleepy", "EagerPyFunc")
    lengths = [each.ms for each in found.longest]
    assert len(lengths) == 5
    assert lengths == sorted(lengths, reverse=True)


def _shifted(run: Path, copy: Path, seconds: int) -> Path:
    """Copies a trace; the clock of rank 1 goes wrong by so many seconds."""
    shutil.copytree(run, copy)
    path = places.events_of(places.run_of(copy / places.FOLDER), 1)
    space = xplane.messages()["Space"].FromString(path.read_bytes())
    plane = next(plane for plane in space.planes if plane.name == "Task Environment")
    (start,) = (
        entry.key for entry in plane.stat_metadata if entry.value.name == "profile_start_time"
    )
    (stat,) = (stat for stat in plane.stats if stat.metadata_id == start)
    stat.uint64_value += seconds * 10**9
    path.write_bytes(space.SerializeToString())
    return copy


def test_a_clock_that_is_wrong_changes_nothing(run, found, tmp_path):
    shifted = report(_shifted(run, tmp_path / "run", seconds=7))
    moved = found.meetings.shifts - shifted.meetings.shifts
    assert moved == pytest.approx([0, 0], abs=2000)  # ns: float64 of seven seconds.
    for share, before in zip(shifted.shares, found.shares, strict=True):
        for name in PARTS:
            assert getattr(share, name) == pytest.approx(getattr(before, name), abs=0.01)
    before, behind = (each.to_json()["ranks"][1]["clock_behind_ms"] for each in (found, shifted))
    assert behind - before == pytest.approx(-7000, abs=0.01)


def test_one_json_has_it_all(found):
    told = json.loads(json.dumps(found.to_json()))
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1]
    assert told["steps"] == list(_STEPS)
    assert told["straggler"]["rank"] == 1


def test_damaged_traces_are_refused(run, tmp_path):
    with pytest.raises(DataError, match=r"no trace in it\. Train with --profile steps=10:20"):
        report(tmp_path)
    with pytest.raises(DataError, match="found no such folder"):
        report(tmp_path / "none")
    shutil.copytree(run, tmp_path / "run")
    place = places.run_of(tmp_path / "run" / places.FOLDER)
    path = places.events_of(place, 1)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"rank-1.xplane.pb must be a whole trace"):
        report(tmp_path / "run")
    path.write_bytes(b"")
    with pytest.raises(DataError, match="found nothing in it"):
        report(tmp_path / "run")
    path.unlink()
    with pytest.raises(DataError, match="must have a file of rank 1"):
        report(tmp_path / "run")
    for text in ("{}", "[" * 100_000):
        places.notes_of(place, 0).write_text(text)
        with pytest.raises(DataError, match="must be as tfdist wrote it"):
            report(tmp_path / "run")
