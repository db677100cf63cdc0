"""A train_step of the user's own on rows, and on parts of them."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist.training.steps import row_probe_steps
from tfdist.training.steps.row_probe_rows import SLICES, made_up

keras = tf.keras


class Counting(keras.Model):
    """Changes all that a step may: weights, states of its own, what random numbers come from."""

    def __init__(self, *args, sharpens, **options):
        super().__init__(*args, **options)
        self.sharpens = sharpens
        self.steps = tf.Variable(0, trainable=False)
        self.more = [tf.Variable(0.0, trainable=False)]
        self.named = {"center": tf.Variable(0.0, trainable=False)}
        self.random = tf.random.Generator.from_seed(1)

    def train_step(self, data):
        x, y = data
        for variable in (self.steps, *self.more, *self.named.values()):
            variable.assign_add(tf.ones([], variable.dtype))
        self.random.normal([2])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        if self.sharpens:
            for weight, gradient in zip(self.trainable_variables, gradients, strict=True):
                weight.assign_add(gradient)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return self.compute_metrics(x, y, self(x), None)


@pytest.mark.parametrize("sharpens", [False, True])
def test_a_step_is_tried_without_a_trace(sharpens):
    inputs = keras.Input((5,))
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(4)(inputs))
    outputs = keras.layers.Dense(1)(keras.layers.Dropout(0.5)(hidden))
    model = Counting(inputs, outputs, sharpens=sharpens)
    model.compile("adam", "mse", metrics=["mae"])

    def state():
        own = (model.steps, *model.more, *model.named.values(), model.random.state)
        return [np.array(variable) for variable in (*own, *model.weights)]

    before = state()
    batch = made_up((tf.TensorSpec([None, 5]), tf.TensorSpec([None, 1])))
    assert row_probe_steps.parted(model, batch, SLICES) == sharpens
    for value, expected in zip(state(), before, strict=True):
        np.testing.assert_array_equal(value, expected)
