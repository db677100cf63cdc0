"""The bytes of a step as it runs, measured in this process."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import tfdist
from tfdist.runs import device_bytes

pytestmark = pytest.mark.timeout(120)


def test_an_input_and_a_label_of_equal_values_are_two_buffers(monkeypatch):
    """TensorFlow makes one constant of equal ones, a training has no constants for them."""
    import tensorflow as tf
    from tensorflow import keras

    # By one thread, so that both steps run in the same order.
    one = {"inter_op_parallelism_threads": 1, "use_per_session_threads": True}
    of_one = functools.partial(tf.compat.v1.ConfigProto, **one)
    monkeypatch.setattr(tf.compat.v1, "ConfigProto", of_one)

    def model_fn():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
        model.compile("sgd", "mse")
        return model

    x = np.ones((4096, 64), np.float32)
    found = []
    with tfdist.strategy("single") as strategy:
        for y in (x, x + 1):
            model = strategy.build(model_fn)
            data = strategy.dataset((x, y), global_batch_size=len(x))

            def fit(model=model, data=data):
                model.fit(data, verbose=0)

            fit()
            found.append(max(device_bytes.of_a_step(model, fit).values()))
    # Inputs, labels, outputs and their difference, of which one is a quarter.
    assert found[0] == pytest.approx(found[1], rel=0.1)
    assert min(found) >= 3 * x.nbytes
