"""The option ``precision`` where one model is divided; see tests/training for divided batches."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from one_device import equals_one_device
from tensorflow import keras

import tfdist
from tfdist.errors import ModelError
from tfdist.keras.optimizers import gradients_of

layers = keras.layers


def model_fn() -> keras.Model:
    model = keras.Sequential([keras.Input((5,)), layers.Dense(8, "tanh"), layers.Dense(8)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.parametrize(
    ("name", "options"),
    [("pipeline", {"stages": 1, "microbatches": 2}), ("mesh", {"batch": 1, "model": 1})],
)
def test_layers_of_a_function_that_does_not_know_compute_in_it(name, options, tmp_path):
    x, y = np.ones((8, 5), np.float32), np.ones((8, 8), np.float32)
    with tfdist.strategy(name, precision="mixed_float16", **options) as strategy:
        # One device computes in float32: what differs are some roundings of float16.
        model, _ = equals_one_device(strategy, model_fn, (x, y), epochs=3, tolerance=2e-3)
        assert keras.mixed_precision.global_policy().name == "float32"
        assert {layer.dtype_policy.name for layer in model.layers} == {"mixed_float16"}
        assert {v.dtype for v in model.trainable_variables} == {tf.float32}
        assert float(model.optimizer.loss_scale) > 1000
        strategy.save(model, tmp_path / "model.keras")
        with pytest.raises(ModelError, match="whose layers compute in float32"):
            strategy.build(model_fn())
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.layers[0].dtype_policy.name == "mixed_float16"


def test_an_old_optimizer_has_its_loss_scaled():
    variable = tf.Variable(1.0)
    tiny = tf.constant(1e-4, tf.float16)
    optimizer = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.legacy.SGD(1.0))
    with tf.GradientTape() as tape:
        loss = tf.cast(variable, tf.float16) * tiny * tiny
    (gradient,) = gradients_of(optimizer, loss, [variable], tape)
    assert float(gradient) == pytest.approx(1e-8, rel=0.01)  # Of float16 by itself it would be 0.
