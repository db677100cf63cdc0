"""A model whose training lasts long enough to be struck from outside; inputs [8], three classes."""

from __future__ import annotations

import time

import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers

from tfdist.records.reading import reader

_STEP_SECONDS = 0.1

# So small a shard would be kept in memory, where no damage to the file can reach it.
reader.TABLE_BYTES = 0


class Wait(layers.Layer):
    def call(self, x):
        wait = tf.py_function(lambda: time.sleep(_STEP_SECONDS), [], [])
        with tf.control_dependencies([wait]):
            return tf.identity(x)


def model_fn():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(16, "tanh"), Wait(), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    return model
