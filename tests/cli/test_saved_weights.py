from __future__ import annotations

import numpy as np
import pytest
from tensorflow import keras

from tfdist.cli import saved_weights


@pytest.fixture
def model() -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
    model.fit(np.ones((4, 3)), np.zeros((4, 2)), verbose=0)
    return model


def test_weights_and_slots_are_read_and_metrics_are_not(model, tmp_path):
    model.save(tmp_path / "model.keras")
    found = saved_weights.read(tmp_path / "model.keras")
    assert not any(name.startswith("metrics/") for name in found)
    shapes = sorted(array.shape for array in found.values() if array.size > 1)
    assert shapes == [(2,), (2,), (3, 2), (3, 2)]
    weights = [array for name, array in found.items() if not name.startswith("optimizer/")]
    kernel = next(array for array in weights if array.ndim == 2)
    np.testing.assert_array_equal(kernel, model.get_weights()[0])


def test_the_difference_is_that_of_weights_and_not_of_slots(model, tmp_path):
    one, other = tmp_path / "one.keras", tmp_path / "other.keras"
    model.save(one)
    for variable in model.optimizer.variables:
        variable.assign(variable + 1)
    model.save(other)
    assert saved_weights.largest_difference(one, other) == 0
    kernel, bias = model.get_weights()
    kernel[2, 1] -= 0.5
    model.set_weights([kernel, bias])
    model.save(other)
    assert saved_weights.largest_difference(one, other) == pytest.approx(0.5, abs=1e-6)
    for bad in (kernel, bias):  # Neither hides behind the other.
        weights = [np.zeros_like(kernel), np.zeros_like(bias)]
        model.set_weights(weights)
        model.save(one)
        model.set_weights(
            [np.full_like(each, np.nan if each.shape == bad.shape else 0) for each in weights]
        )
        model.save(other)
        assert np.isnan(saved_weights.largest_difference(one, other))
