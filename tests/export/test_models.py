"""What layers have adapted to is in the model that is exported."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from tfdist.export.models import open_model

_X = np.random.default_rng(0).random((40, 1)).astype(np.float32)


def _buckets(output_mode: str) -> keras.Model:
    layer = keras.layers.Discretization(num_bins=4, output_mode=output_mode)
    layer.adapt(_X)
    inputs = keras.Input((1,))
    outputs = keras.layers.Dense(1)(tf.cast(layer(inputs), tf.float32))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    return model


# The copy that Keras makes of the second one has one bucket.
@pytest.mark.parametrize("output_mode", ["int", "multi_hot"])
def test_a_live_model_knows_its_buckets(output_mode):
    model = _buckets(output_mode)
    np.testing.assert_array_equal(open_model(model).keras(_X), model(_X))


def test_a_model_of_a_file_knows_its_buckets(tmp_path):
    model = _buckets("int")
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(open_model(tmp_path / "model.keras").keras(_X), model(_X))
