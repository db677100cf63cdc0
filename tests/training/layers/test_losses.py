"""What a step owns of a loss. On real engines: tests/conformance."""

from __future__ import annotations

import copy

import pytest
import tensorflow as tf
from tensorflow import keras

from tfdist.errors import ModelError
from tfdist.strategies.single import Alone
from tfdist.training.engine.binding import Binding
from tfdist.training.layers import losses


def built(kind: type[keras.Model], **options) -> keras.Model:
    inputs = keras.Input((2,))
    model = kind(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", **options)
    return model


class Plain(keras.Model):
    pass


class Own(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return tf.reduce_mean(tf.abs(y - y_pred))


class More(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return 2 * super().compute_loss(x, y, y_pred, sample_weight)


class ByAHelper(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return self.helped(y, y_pred)

    def helped(self, y, y_pred):
        return sum(self.compiled_loss(y, y_pred) for _ in range(1))


@pytest.mark.parametrize(
    ("kind", "uses"), [(Plain, True), (Own, False), (More, True), (ByAHelper, True)]
)
def test_whether_the_compiled_loss_is_shown(kind, uses):
    assert losses.uses_compiled_loss(built(kind, loss="mse")) == uses


def test_a_batch_without_rows_is_no_part_of_anything():
    shares = [([2, 8], 0.25), ([0, 8], 0.0), ([0, 0], 0.0)]
    for share, part in shares:
        assert float(losses.part_of(tf.constant(share, tf.int64))) == part


def test_a_compilation_is_taken_over_once_and_stays_keras_for_others(tmp_path):
    model = built(Plain, loss="mse", metrics=["mae"])
    binding = Binding(model, Alone())
    losses.as_on_one_device(binding)
    taken = model.compiled_loss
    losses.as_on_one_device(binding)
    assert model.compiled_loss is taken
    model.fit([[1.0, 2.0]], [[1.0]], verbose=0)
    assert [metric.name for metric in model.metrics] == ["loss", "mae"]
    assert copy.copy(taken).whole is taken.whole
    model.save(tmp_path / "model.h5")
    keras.models.load_model(tmp_path / "model.h5", custom_objects={"Plain": Plain})


def test_a_number_counts_as_the_part_of_the_batch_that_it_is_of():
    model = built(Plain, loss="mse")
    model.shown = keras.metrics.Mean(name="shown")
    binding = Binding(model, Alone())
    losses.as_on_one_device(binding)
    for part, value in ((0.75, 2.0), (0.25, 6.0), (0.0, float("nan"))):
        with losses.counted_as(tf.constant(part)):
            model.shown.update_state(value)
    assert float(model.shown.result()) == 3
    model.shown.reset_state()
    with losses.counted_as(tf.constant(0.5)):
        model.shown.update_state([1.0, 2.0, 6.0])  # One number for each row.
        model.shown.update_state(5.0, sample_weight=1)  # Who weighs is believed.
    assert float(model.shown.result()) == 3.5
    model.shown.update_state(5.0)
    assert float(model.shown.count) == 5


def test_a_metric_of_rows_is_left_as_it_is():
    model = built(Plain, loss="mse")
    model.distance = keras.metrics.MeanAbsoluteError()
    binding = Binding(model, Alone())
    losses.as_on_one_device(binding)
    with losses.counted_as(tf.constant(0.5)):
        model.distance.update_state([[1.0], [2.0]], [[3.0], [2.0]])
    assert float(model.distance.result()) == 1


def test_a_metric_of_ones_own_may_branch_on_a_tensor():
    def distance(y, y_pred):
        if tf.reduce_mean(y_pred) > 0:
            return tf.reduce_mean(tf.abs(y - y_pred))
        return tf.zeros([])

    model = built(Plain, loss="mse", metrics=[distance])
    model.compiled_metrics.build(tf.ones([2, 1]), tf.ones([2, 1]))
    losses.as_on_one_device(Binding(model, Alone()))

    @tf.function
    def step(part):
        with losses.counted_as(part):
            model.compiled_metrics.update_state(tf.zeros([2, 1]), tf.ones([2, 1]))

    step(tf.constant(0.5))
    (metric,) = model.compiled_metrics.metrics
    assert [float(v) for v in metric.variables] == [0.5, 0.5]
    # As an own step may, by name.
    with losses.counted_as(tf.constant(0.5)):
        metric.update_state(y_true=tf.zeros([2, 1]), y_pred=tf.ones([2, 1]))
    assert [float(v) for v in metric.variables] == [1.0, 1.0]


def test_a_sum_beside_a_loss_of_ones_own_is_refused():
    total = keras.losses.MeanSquaredError(reduction="sum")
    assert losses.is_sum(built(Plain, loss=total))
    with pytest.raises(ModelError, match=r"must be a mean over rows.*reduction='sum'"):
        losses.is_sum(built(More, loss=total))


def test_sums_count_outputs_whole_that_have_no_weights_by_name():
    inputs = keras.Input((2,))
    model = keras.Model(inputs, [keras.layers.Dense(1, name=name)(inputs) for name in "ab"])
    model.compile("sgd", keras.losses.MeanSquaredError(reduction="sum"))
    x, y = tf.ones([4, 2]), {name: tf.zeros([4, 1]) for name in "ab"}
    weight, share = {"a": tf.ones([4])}, tf.constant([4, 8], tf.int64)
    y_pred = model(x)
    weights = losses.weights_of_sum(model, y_pred, weight, share)
    expected = 2 * model.compute_loss(x, y, y_pred, weight)
    assert float(model.compute_loss(x, y, y_pred, weights)) == pytest.approx(float(expected))


def test_a_metric_of_ones_own_gets_labels_of_its_dtype_where_it_is_counted():
    def error(y, y_pred):
        return tf.reduce_mean(tf.abs(y - y_pred))

    model = built(Plain, loss="mse", metrics=[error])
    x, y = tf.ones([2, 2]), tf.constant([[1], [2]], tf.int64)
    y_pred = model(x)
    expected = error(tf.cast(y, tf.float32), y_pred)
    model.compute_metrics(x, y, y_pred, None)  # It makes the metric.
    binding = Binding(model, Alone())
    losses.as_on_one_device(binding)
    with losses.counted_as(tf.constant(0.5)):
        found = model.compute_metrics(x, y, y_pred, None)
    assert float(found["error"]) == pytest.approx(float(expected))


def test_a_name_is_that_of_the_loss_that_keras_finds():
    assert losses.is_keras_own("mse")
    with keras.utils.custom_object_scope({"own": lambda y, y_pred: tf.reduce_mean(y_pred)}):
        assert not losses.is_keras_own("own")
    assert not losses.is_keras_own("own")
