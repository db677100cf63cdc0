"""What layers of a user's own change in a step is found, and of what kind it is."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from tfdist.training.steps import row_probe
from tfdist.training.steps.layer_state import explained
from tfdist.training.steps.row_probe import moved_by

layers = keras.layers
_SPEC = (tf.TensorSpec([None, 3]), tf.TensorSpec([None], tf.int64))


class Keeps(layers.Layer):
    """Keeps a state, which ``change(state, x)`` changes in training."""

    def __init__(self, change, **options):
        super().__init__(**options)
        self.change = change

    def build(self, shape):
        self.kept = self.add_weight("kept", (shape[-1],), initializer="ones", trainable=False)

    def call(self, x, training=False):
        if training:
            self.kept.assign(self.change(self.kept, x))
        return x


def of(*middle):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4), *middle, layers.Dense(2)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("change", "is_alike", "is_mean"),
    [
        (lambda state, x: 0.9 * state + 0.1 * tf.reduce_mean(x, 0), False, True),
        (lambda state, x: state + 1.0, True, True),
        (lambda state, x: state + tf.reduce_sum(x, 0), False, False),
        (lambda state, x: tf.maximum(state, tf.reduce_max(10 * x, 0)), False, False),
        (lambda state, x: state + tf.random.normal([4]), False, True),
    ],
    ids=["mean", "count", "sum", "maximum", "drawn"],
)
def test_kinds(change, is_alike, is_mean):
    model = of(Keeps(change, name="a"))
    before = model.get_weights()
    [moved] = moved_by(model, _SPEC)
    assert (str(moved), moved.is_alike, moved.is_mean) == ("'kept' of layer 'a'", is_alike, is_mean)
    assert bool(explained([moved])) == (not is_mean)
    assert len(explained([moved], by_microbatch=True)) == 1
    for ours, theirs in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_balance_of_experts_is_no_mean_though_some_rows_move_it_alike():
    def balanced(state, x):
        load = tf.reduce_sum(tf.one_hot(tf.argmax(x + state, 1), 4), 0)
        return state + 0.05 * tf.sign(tf.reduce_mean(load) - load)

    tf.keras.utils.set_random_seed(1)
    [moved] = moved_by(of(Keeps(balanced)), _SPEC)
    assert not moved.is_alike
    assert not moved.is_mean


class AlwaysKeeps(Keeps):
    def call(self, x):
        return super().call(x, training=True)


@pytest.mark.parametrize("is_mean", [True, False])
def test_what_evaluation_changes_is_told(is_mean):
    change = tf.reduce_mean if is_mean else (lambda x, axis: 1.0)  # A count is alike on all.
    [moved] = moved_by(of(AlwaysKeeps(lambda state, x: state + change(x, 0))), _SPEC)
    assert moved.in_evaluation
    told = [clause for clause in explained([moved]) if "by evaluate or predict" in clause]
    assert len(told) == is_mean


@pytest.mark.parametrize("uses", ["before", "after"])
def test_a_state_that_compute_loss_moves(uses):
    class Relative(keras.Model):
        def __init__(self, **options):
            super().__init__(**options)
            self.usual = tf.Variable(1.0, trainable=False, name="usual")

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            loss, before = tf.reduce_mean(tf.square(y - y_pred)), tf.identity(self.usual)
            after = self.usual.assign(0.9 * before + 0.1 * loss)
            return loss / (before if uses == "before" else after)

    inputs = keras.Input((3,))
    model = Relative(inputs=inputs, outputs=layers.Dense(2, name="out")(inputs), name="own")
    model.compile("sgd")
    spec = tf.TensorSpec([None, 3]), tf.TensorSpec([None, 2])
    [moved] = moved_by(model, spec)
    found = str(moved), moved.is_alike, moved.is_mean
    assert found == ("'usual' of layer 'own'", False, True)
    assert float(model.usual) == 1.0
    told = row_probe.explained(model, spec)
    assert any("the loss of compute_loss" in clause for clause in told) == (uses == "after"), told


@pytest.mark.parametrize("more", [(), ([None, 2], [None])], ids=["alone", "weighted"])
def test_a_state_that_compute_loss_moves_without_labels_and_by_weights(more):
    class Relative(keras.Model):
        def __init__(self, **options):
            super().__init__(**options)
            self.usual = tf.Variable(1.0, trainable=False, name="usual")

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            of_rows = tf.reduce_sum(tf.square(y_pred), 1) * (sample_weight if more else 1.0)
            self.usual.assign(0.9 * self.usual + 0.1 * tf.reduce_mean(of_rows))
            return tf.reduce_mean(of_rows)

    inputs = keras.Input((3,))
    model = Relative(inputs=inputs, outputs=layers.Dense(2, name="out")(inputs), name="own")
    model.compile("sgd")
    [moved] = moved_by(model, tuple(map(tf.TensorSpec, ([None, 3], *more))))
    assert (str(moved), moved.is_mean) == ("'usual' of layer 'own'", True)


def test_what_is_left_as_it_is_is_not_found():
    same = Keeps(lambda state, x: state)
    assert moved_by(of(same, layers.BatchNormalization(), layers.Dropout(0.5)), _SPEC) == []


def test_a_state_is_that_of_the_layer_that_has_it():
    class Outer(layers.Layer):
        def __init__(self):
            super().__init__(name="outer")
            self.inner = Keeps(lambda state, x: state + tf.reduce_sum(x, 0), name="inner")

        def call(self, x, training=False):
            return self.inner(x, training=training)

    found = moved_by(of(Outer()), _SPEC)
    assert [moved.layer for moved in found] == ["inner"]
