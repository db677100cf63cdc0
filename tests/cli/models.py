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


def breaks():
    raise RuntimeError("a fault of the user's own")


a_number = 3
