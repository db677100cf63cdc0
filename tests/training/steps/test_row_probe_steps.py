"""What a step of a user's own gives of rows is found, and nothing moves."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

import tfdist
from tfdist.training.steps.row_probe import step_explained, step_tried

layers = keras.layers
_SPEC = (tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1]))
_MEAN = "is no mean over the rows of a batch"


class Stepping(keras.Model):
    """Trains on ``of_rows`` of the squares; returns what ``returned`` makes of outputs."""

    of_rows = staticmethod(tf.reduce_mean)
    returned = staticmethod(lambda y_pred: {})

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.of_rows(tf.square(y_pred - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.steps.assign_add(1.0)
        return {"loss": loss, "steps": self.steps + 1.0, **self.returned(y_pred)}


def of(*middle, **attributes):
    inputs = keras.Input((3,))
    x = layers.Dense(4)(inputs)
    for layer in middle:
        x = layer(x)
    model = type("Own", (Stepping,), attributes)(inputs, layers.Dense(1)(x))
    model.steps = tf.Variable(1.0, trainable=False)
    model.compile("adam")
    return model


@pytest.mark.parametrize(
    ("returned", "join"),
    [
        (tf.reduce_mean, "mean"),
        (tf.reduce_sum, "sum"),
        (tf.reduce_max, "maximum"),
        (tf.reduce_min, "minimum"),
        (tf.norm, None),
        (tf.math.reduce_std, None),
    ],
)
def test_numbers_that_a_step_returns(returned, join):
    given = {"returned": staticmethod(lambda y_pred: {"number": returned(10 * y_pred)})}
    noisy = layers.Dropout(0.5), layers.BatchNormalization()
    model = of(*noisy, **given)
    before = [*model.get_weights(), model.steps.numpy()]
    found = step_tried(model, model.train_step, _SPEC)
    assert found.joins == {"loss": "mean", "steps": "mean", "number": join}
    words = [f"what train_step returns as 'number' {_MEAN}"] if join is None else []
    assert [line.split(",")[0] for line in step_explained("train_step", found)] == words
    for ours, theirs in zip([*model.get_weights(), model.steps.numpy()], before, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not model.optimizer.iterations.numpy()


def test_a_gradient_of_a_sum():
    model = of(of_rows=staticmethod(tf.reduce_sum))
    [line] = step_explained("train_step", step_tried(model, model.train_step, _SPEC))
    assert line.startswith(f"the gradient of train_step {_MEAN}")


def test_what_is_0_is_told():
    given = {"returned": staticmethod(lambda y_pred: {"many": tf.reduce_sum(0 * y_pred)})}
    [line] = step_explained("train_step", step_tried(of(**given), of(**given).train_step, _SPEC))
    assert line.startswith("what train_step returns as 'many' is 0, or no number, on the rows")


def test_what_is_0_on_any_rows_is_not():
    model = of(returned=staticmethod(lambda y_pred: {"weight": 0 * model.steps.assign_add(1.0)}))
    found = step_tried(model, model.train_step, _SPEC)
    assert found.joins["weight"] == "mean"
    assert model.steps.numpy() == 1.0
    assert not step_explained("train_step", found)


@pytest.mark.parametrize(
    "of_rows",
    [
        lambda rows: tf.reduce_sum(rows * tf.random.normal([])),
        lambda rows: tfdist.reduce(tf.reduce_sum(rows), "sum"),
    ],
    ids=["draws", "reduces"],
)
def test_what_is_not_tried(of_rows):
    model = of(of_rows=staticmethod(of_rows))
    assert step_tried(model, model.train_step, _SPEC) is None
