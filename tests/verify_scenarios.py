"""tfdist.verify on two devices."""

from __future__ import annotations

import contextlib
import io

import numpy as np
import pytest
import tensorflow as tf
from scenarios import scenario
from tensorflow import keras

import tfdist
from tfdist.errors import OptionError

layers = keras.layers
RNG = np.random.default_rng(0)
DATA = RNG.normal(size=(60, 5)).astype(np.float32), RNG.integers(0, 3, 60)


def model_of(*inner, optimizer="adam"):
    def model_fn():
        hidden = [make() for make in inner]
        model = keras.Sequential([keras.Input((5,)), *hidden, layers.Dense(3, "softmax")])
        made = optimizer if isinstance(optimizer, str) else optimizer(1e-3)
        model.compile(made, "sparse_categorical_crossentropy")
        return model

    return model_fn


def dense():
    return layers.Dense(8, "tanh")


@scenario
def an_exact_model(strategy, folder):
    report = tfdist.verify(model_of(dense), DATA, strategy, steps=5, global_batch_size=12)
    assert report.verdict == "equal", str(report)
    assert report.causes == ()
    assert (report.num_replicas, report.steps, report.tail) == (2, 5, 4)
    assert sum(layer.size for layer in report.layers) == 5 * 8 + 8 + 8 * 3 + 3


@scenario(long=True)
def a_compiled_model(strategy, folder):
    model = model_of(dense, optimizer="sgd")()
    before = model.get_weights()
    assert tfdist.verify(model, DATA, strategy, steps=4, global_batch_size=12).exact
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new, "the user's model is left alone")


@scenario
def random_layers_are_named(strategy, folder):
    model_fn = model_of(dense, lambda: layers.Dropout(0.5, name="drops"))
    report = tfdist.verify(model_fn, DATA, strategy, steps=4, global_batch_size=12)
    assert report.verdict == "differs"
    assert not report.is_rounding_known, "a weight that is off, and other masks"
    assert "layer 'drops' draws other random numbers" in str(report)


class MeanOfBatch(layers.Layer):
    """Mixes the rows of the batch that it sees."""

    def call(self, x):
        return x - tf.reduce_mean(x, 0, keepdims=True)


@scenario
def a_layer_that_mixes_rows_is_the_cause(strategy, folder):
    """Layers that would draw, but at a rate of 0, are not named."""
    quiet = (lambda: layers.Dropout(0.0), lambda: layers.GaussianNoise(0.0))
    model_fn = model_of(dense, *quiet, lambda: MeanOfBatch(name="mixes"))
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        report = tfdist.verify(
            model_fn, DATA, strategy, steps=4, global_batch_size=12, explain=True
        )
    assert said.getvalue().count("tfdist: warning") == 1, said.getvalue()
    assert not report.exact
    assert report.is_explained
    [cause] = report.causes
    assert cause.startswith("layer 'mixes' looks at several rows of a batch")
    explanation = report.explanation
    assert [name for name, _ in explanation.parted] == ["mixes"]
    assert explanation.steps == (1,)
    assert "Weights: apart after 1 step, first those of layer" in str(explanation)


class Noisy(layers.Layer):
    def call(self, x):
        return x + 0.5 * keras.backend.random_normal(tf.shape(x))


@scenario(long=True)
def a_layer_of_ones_own_that_draws_is_named(strategy, folder):
    model_fn = model_of(dense, lambda: layers.Dropout(0.5, name="drops"), lambda: Noisy(name="n"))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        report = tfdist.verify(model_fn, DATA, strategy, steps=2, global_batch_size=12)
    assert said.getvalue().count("tfdist: warning: layer 'n' draws random numbers by itself") == 1
    assert report.causes == (
        "layer 'drops' draws other random numbers on each replica",
        "layer 'n' draws other random numbers on each replica",
    )


def stepping(loss):
    """Returns a model_fn, whose train_step makes tensors of float32 as users do."""

    class Stepping(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                value = loss(self, x, tf.one_hot(y, 3))
            self.optimizer.minimize(value, self.trainable_variables, tape=tape)
            return {"loss": value}

    def model_fn():
        inputs = keras.Input((5,))
        model = Stepping(inputs, layers.Dense(3)(inputs))
        model.compile(keras.optimizers.SGD(0.001))
        return model

    return model_fn


@scenario
def what_a_step_of_ones_own_does_is_the_cause(strategy, folder):
    def noise(model, x, y):
        return tf.reduce_mean((model(x + tf.random.normal(tf.shape(x))) - y) ** 2)

    def summed(model, x, y):
        return tf.reduce_sum((model(x) - y) ** 2)

    def pairs(model, x, y):
        p = model(x)
        return tf.reduce_mean(tf.matmul(p, p, transpose_b=True) ** 2)

    no_mean = (
        "the gradient of train_step is no mean over the rows of a batch, which are divided here, "
        "so it is not that of one device: have the optimizer clip (global_clipnorm, clipnorm, "
        "clipvalue), take a mean over rows for the loss, and bring rows that are compared together "
        "with tfdist.all_gather"
    )
    for loss, cause, is_told in (
        (noise, "train_step draws other random numbers on each replica", True),
        (summed, no_mean, False),
        (pairs, no_mean, False),
    ):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            found = tfdist.verify(stepping(loss), DATA, strategy, steps=2, global_batch_size=12)
        assert not found.exact
        assert found.causes == (cause,), loss
        line = "tfdist: warning: train_step draws random numbers by itself: other ones"
        assert said.getvalue().count(line) == is_told, said.getvalue()
        line = "tfdist: warning: the gradient of train_step is no mean over the rows of a batch"
        assert said.getvalue().count(line) == (loss is not noise), said.getvalue()


class KnowsItsReplica(layers.Layer):
    def call(self, x):
        replica = tf.distribute.get_replica_context()
        number = replica.replica_id_in_sync_group if replica else 0
        return x * (1 + tf.cast(number, x.dtype))


@scenario(long=True)
def rounding_that_grows_is_no_fault(strategy, folder):
    """The sign of a gradient that only rounding makes, of a bias before BatchNormalization."""
    normed = lambda: layers.Dense(8), layers.BatchNormalization
    model_fn = model_of(*normed, optimizer=keras.optimizers.Lion)
    report = tfdist.verify(model_fn, DATA, strategy, steps=5, global_batch_size=12)
    assert report.verdict == "rounds", str(report)
    assert report.passed
    assert report.causes == ()
    assert report.layers[0].difference >= 1e-3
    assert report.layers[0].rounding >= 1e-3


@scenario(long=True)
def sixteen_bits_round_more(strategy, folder):
    mixed = tfdist.strategy("mirrored", devices=2, precision="mixed_float16")
    mixed.start()
    for inner, verdict in (((dense,), "rounds"), ((dense, KnowsItsReplica), "differs")):
        model_fn = model_of(*inner, lambda: layers.Activation("linear", dtype="float32"))
        report = tfdist.verify(model_fn, DATA, mixed, steps=5, global_batch_size=12)
        assert report.verdict == verdict, str(report)


@scenario
def a_fault_without_a_known_cause_is_still_found(strategy, folder):
    model_fn = model_of(dense, KnowsItsReplica)
    report = tfdist.verify(model_fn, DATA, strategy, steps=4, global_batch_size=12, explain=True)
    assert not report.exact
    assert report.is_rounding_known
    assert report.causes == ()
    assert "Cause: none known" in str(report)
    assert not report.is_explained
    assert report.explanation.parted == ()
    assert report.explanation.first_layer.layer == report.layers[0].layer


@scenario
def what_is_exact_needs_no_explanation(strategy, folder):
    report = tfdist.verify(
        model_of(dense), DATA, strategy, steps=2, global_batch_size=12, explain=True
    )
    assert report.exact
    assert report.explanation is None


@scenario(long=True)
def scaled_rates_are_compared_like_for_like(strategy, folder):
    scaled = tfdist.strategy("mirrored", devices=2, lr_scaling="linear", warmup_epochs=1)
    scaled.start()

    def model_fn():
        model = keras.Sequential([keras.Input((5,)), dense(), layers.Dense(3, "softmax")])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy")
        return model

    report = tfdist.verify(model_fn, DATA, scaled, steps=5, global_batch_size=12)
    assert report.exact, str(report)


@scenario
def no_steps_are_refused(strategy, folder):
    with pytest.raises(OptionError, match="steps"):
        tfdist.verify(model_of(dense), DATA, strategy, steps=0)
