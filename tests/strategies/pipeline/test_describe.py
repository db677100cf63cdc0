"""What ``describe`` shows of a built model, and that its file is an ordinary one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tensorflow import keras

import tfdist
from tfdist.errors import ModelError


def model_fn() -> Any:
    model = keras.Sequential(
        [keras.Input((6,)), *(keras.layers.Dense(6, "tanh", name=n) for n in "abcd")]
    )
    model.compile("adam", "mse")
    return model


# One stage: the process of the tests has one device.
@pytest.fixture
def strategy():
    with tfdist.strategy("pipeline", stages=1, microbatches=4) as started:
        yield started


def test_table_chart_and_picture(strategy, tmp_path):
    description = strategy.describe(strategy.build(model_fn))
    (row,) = description.stages
    assert (row.first, row.last, row.num_layers) == ("a", "d", 4)
    assert row.weight_bytes == 4 * 4 * (6 * 6 + 6)
    assert row.cost == 1
    assert description.bubble_fraction == description.theoretical_bubble == 0
    assert "stage 0 |0" in str(description)
    assert "theory 0.0%" in str(description)
    description.draw(tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 1000


def test_the_table_is_part_of_the_text_in_a_notebook(strategy, monkeypatch):
    description = strategy.describe(strategy.build(model_fn))
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert "device" in str(description).partition("gpipe")[0]


def test_it_is_known_when_the_devices_are_given_back():
    with tfdist.strategy("pipeline", stages=1, microbatches=4) as strategy:
        model = strategy.build(model_fn)
    (row,) = strategy.describe(model).stages
    assert row.first == "a"


def test_layers_that_were_made_before_are_refused(strategy):
    model = model_fn()
    with pytest.raises(ModelError, match=r"the same model each time.*variable 'a/kernel:0'"):
        strategy.build(lambda: model)


def test_measured_costs_are_shown():
    with tfdist.strategy("pipeline", stages=1, microbatches=4, balance="measured") as strategy:
        strategy.dataset((np.zeros((24, 6)), np.zeros((24, 6))), global_batch_size=12)
        description = strategy.describe(strategy.build(model_fn))
    (row,) = description.stages
    assert row.measured.forward_s > 0
    assert row.measured.backward_s >= 0
    # Of each of four tanh its output [3, 6], which the next product reads too: it counts once.
    assert row.measured.kept_bytes == 4 * 3 * 6 * 4
    assert sorted(description.slowest_layers) == list("abcd")
    assert "Measured on microbatches of 3 rows" in str(description)


def test_file_is_keras_own(strategy, tmp_path):
    model = strategy.build(model_fn)
    x = np.linspace(-1, 1, 60, dtype=np.float32).reshape(10, 6)
    model.fit(x, x, batch_size=8, epochs=1, verbose=0)
    strategy.save(model, tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    expected = model.predict(x, verbose=0)
    assert np.max(np.abs(loaded.predict(x, verbose=0) - expected)) < 1e-6
    loaded.fit(x, x, verbose=0)


def test_a_compiled_model_is_copied(strategy):
    given = model_fn()
    built = strategy.build(given)
    assert built is not given
    for ours, theirs in zip(built.get_weights(), given.get_weights(), strict=True):
        assert np.array_equal(ours, theirs)
