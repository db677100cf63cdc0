"""Models that the tests of the verbs name with --model; inputs [8], three classes."""

import os
import time

import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers


class Wait(layers.Layer):
    """Waits as long as the environment says, so that a test can strike within an epoch."""

    def call(self, x):
        seconds = float(os.environ.get("STEP_SECONDS", 0))
        wait = tf.py_function(lambda: time.sleep(seconds), [], [])
        with tf.control_dependencies([wait]):
            return tf.identity(x)


def _mlp(*more):
    dense = layers.Dense(16, activation="tanh")
    model = keras.Sequential([keras.Input((8,)), dense, *more, layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    return model


def mlp():
    return _mlp()


def slow():
    return _mlp(Wait())


def with_dropout():
    return _mlp(layers.Dropout(0.5))


def not_compiled():
    return keras.Sequential([keras.Input((8,)), layers.Dense(3)])


def returns_nothing():
    mlp()


class Breaks(layers.Layer):
    """Raises an error when a step is traced, or when one is taken."""

    def __init__(self, in_a_step):
        super().__init__()
        self.in_a_step = in_a_step

    def call(self, x, training=None):
        if training is not True:
            return x
        if not self.in_a_step:
            raise ZeroDivisionError("within a layer")
        with tf.control_dependencies([tf.py_function(strike, [], [])]):
            return tf.identity(x)


def strike():
    raise OSError("within a step")


def breaks_in_a_step():
    return _mlp(Breaks(in_a_step=False))


def breaks_in_a_function():
    return _mlp(Breaks(in_a_step=True))


def another_loss():
    model = _mlp()
    model.compile("sgd", "categorical_crossentropy")
    return model


def wrong_loss(y, predicted):
    raise ValueError("no such labels")


def with_a_loss_that_breaks():
    model = _mlp()
    model.compile("sgd", wrong_loss)
    return model


def diverges():
    """Its loss is no number from the second epoch on."""
    model = _mlp()
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([4], [0.1, 1e38])
    model.compile(keras.optimizers.SGD(rate), model.loss, metrics=["accuracy"])
    return model


def diverges_at_once():
    model = _mlp()
    model.compile(keras.optimizers.SGD(1e38), model.loss, metrics=["accuracy"])
    return model


def breaks():
    raise RuntimeError("a fault of the user's own")


a_number = 3
