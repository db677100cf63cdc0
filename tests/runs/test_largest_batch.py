"""Batches that are tried in processes of their own, which may die."""

from __future__ import annotations

import re

import pytest

from tfdist.errors import OptionError, SilentError
from tfdist.runs import largest_batch
from tfdist.runs.largest_batch import Try, find_batch

pytestmark = pytest.mark.timeout(180)
# A row of 1 MB, and more than that to be kept of it.
_MODEL = """
from tensorflow import keras

def model_fn():
    inputs = x = keras.Input((262_144,))
    for _ in range(3):
        x = keras.layers.Activation("tanh")(x)
    outputs = keras.layers.Dense(1)(x)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    return model
"""


def test_a_batch_is_doubled_until_the_most_is_reached(model, monkeypatch):
    monkeypatch.setattr(largest_batch, "_MOST", 64)
    tried: list[Try] = []
    assert find_batch(model, "single", on_try=tried.append) == 64
    assert [(one.rows, one.fits) for one in tried] == [(32, True), (64, True)]
    assert str(tried[0]) == "a global batch of 32 fits"


@pytest.mark.parametrize(
    ("strategy", "options", "workers", "unit"),
    [
        ("single", {"accumulate_steps": 4}, None, 4),
        ("mirrored", {"devices": 2, "accumulate_steps": 4}, None, 8),
        ("horovod", {}, None, 2),
        ("pipeline", {"stages": 2, "microbatches": 8}, None, 8),
        ("pipeline", {"stages": 2, "microbatches": 8, "replicas": "horovod"}, 3, 24),
        ("mesh", {"batch": 5, "model": 2}, None, 5),
    ],
)
def test_every_batch_is_one_that_the_strategy_takes(
    strategy, options, workers, unit, model, monkeypatch
):
    tried = []

    def run(module, config, where, on_event):
        tried.append(config["rows"])
        if config["rows"] > 3 * unit:
            raise SilentError("be heard", received="nothing")

    monkeypatch.setattr(largest_batch.ranks, "run", run)
    assert find_batch(model, strategy, options, workers=workers) == 3 * unit
    assert all(rows % unit == 0 for rows in tried)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_batch_that_does_not_fit_ends_its_process_alone(model):
    tried: list[Try] = []
    # A process without memory may hang, too.
    found = find_batch(model, "single", room=800_000_000, deadline_s=60, on_try=tried.append)
    fitting = [one.rows for one in tried if one.fits]
    ended = {one.rows: one.why for one in tried if not one.fits}
    assert found == max(fitting)
    assert 0 < found < min(ended) <= found + max(1, 0.06 * found)
    assert found < 800  # Each row takes a MB at least.
    # It says so, or the system ends it where a library asks for memory, or it falls silent.
    told = re.compile("out of memory|ended with exit code 1[0-9]{2} |silence, first of rank 0")
    assert all(told.search(why) for why in ended.values()), ended


def test_room_is_a_whole_number(model):
    with pytest.raises(OptionError, match="room must be"):
        find_batch(model, "single", room=0)
