"""Losses and metrics that see several rows at once are found, others are not."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from tfdist.training.steps.row_probe import coupled, explained
from tfdist.training.steps.row_probe_rows import ROWS, filled_up, with_sizes_of

layers = keras.layers
_SPEC = (tf.TensorSpec([None, 3]), tf.TensorSpec([None], tf.int64))


def contrastive(y, y_pred):
    """Rows with one label are to be near each other."""
    distance = tf.reduce_sum(tf.square(y_pred[:, None] - y_pred[None]), -1)
    same = tf.cast(y[:, None] == y[None], distance.dtype)
    return tf.reduce_mean(same * distance + (1 - same) * tf.nn.relu(1 - distance))


def summed(y, y_pred):
    return tf.reduce_sum(tf.square(y_pred))


def of_rows(y, y_pred):
    return tf.reduce_sum(tf.square(y_pred), -1)


def mean(y, y_pred):
    return tf.reduce_mean(tf.square(y_pred))


def noisy(y, y_pred):
    return tf.reduce_mean(y_pred * tf.random.normal(tf.shape(y_pred)))


def breaks(y, y_pred):
    raise RuntimeError("not with such rows")


class Whitened(keras.losses.Loss):
    def call(self, y, y_pred):
        return tf.reduce_sum(tf.square(y_pred - tf.reduce_mean(y_pred, 0)), -1)


def model(loss, middle=None, kind=keras.Model):
    inputs = keras.Input((3,))
    x = inputs if middle is None else middle(inputs)
    built = kind(inputs, layers.Dense(4)(x))
    built.compile("sgd", loss)
    return built


def masked(y, y_pred):
    """Of TensorFlow's tutorials on texts: rows have as many labels as they are long."""
    mask = tf.cast(y != 0, tf.float32)
    loss = keras.losses.sparse_categorical_crossentropy(y, y_pred)
    return tf.reduce_sum(loss * mask) / tf.reduce_sum(mask)


def test_a_mean_over_labels_is_none_over_rows():
    inputs = keras.Input((6,), dtype="int64")
    built = keras.Model(inputs, layers.Dense(9, "softmax")(layers.Embedding(9, 4)(inputs)))
    built.compile("sgd", masked)
    spec = tf.TensorSpec([None, 6], tf.int64)
    assert coupled(built, (spec, spec)) == ["loss 'masked'"]


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (contrastive, ["loss 'contrastive'"]),
        (summed, ["loss 'summed'"]),
        (Whitened(name="whitened"), ["loss 'whitened'"]),
        (of_rows, []),
        (mean, []),
        (noisy, []),
        (breaks, []),
        (keras.losses.SparseCategoricalCrossentropy(reduction="sum", from_logits=True), []),
        ("mse", []),
        (None, []),
    ],
)
def test_a_loss(loss, found):
    assert coupled(model(loss), _SPEC) == found


def test_metrics_that_are_functions_are_tried():
    built = model("mse")
    spec = (_SPEC[0], tf.TensorSpec([None, 4]))
    built.compile("sgd", "mse", metrics=["mae", of_rows, mean], weighted_metrics=[summed])
    assert coupled(built, spec) == ["metric 'summed'"]


def root(y, y_pred):
    return tf.sqrt(tf.reduce_mean(tf.square(y - y_pred)))


def test_metrics_get_labels_of_their_dtype_and_one_that_breaks_hides_no_other():
    built = model("mse")
    built.compile("sgd", "mse", metrics=[breaks, root])
    assert coupled(built, (_SPEC[0], tf.TensorSpec([None, 4], tf.int64))) == ["metric 'root'"]


@pytest.mark.parametrize("function", [mean, of_rows])
def test_one_number_cannot_be_weighed(function):
    built = model(None)
    built.compile("sgd", "mse", metrics=[mean], weighted_metrics=[function])
    spec = (_SPEC[0], tf.TensorSpec([None, 4]), tf.TensorSpec([None]))
    assert coupled(built, spec) == ["metric 'weighted_mean'"] * (function is mean)
    assert coupled(built, spec[:2]) == []


def f1(y, y_pred):
    """As many write it: of counts of a batch."""
    hits, guesses, all_ = (tf.reduce_sum(tf.round(each)) for each in (y * y_pred, y_pred, y))
    return 2 * hits / (guesses + all_ + 1e-7)


def test_what_counts_by_a_threshold_is_tried_on_both_sides_of_it():
    built = model(None)
    built.compile("sgd", "mse", metrics=[f1])
    assert coupled(built, (_SPEC[0], tf.TensorSpec([None, 4]))) == ["metric 'f1'"]


def spread(y, y_pred, *, axis):
    return tf.math.reduce_std(y_pred, axis)


@pytest.mark.parametrize(
    ("metric", "found"),
    [
        (lambda: keras.metrics.CosineSimilarity(axis=0), ["metric 'cosine_similarity'"]),
        (lambda: keras.metrics.CosineSimilarity(axis=1), []),
        (lambda: keras.metrics.MeanMetricWrapper(spread, "spread", axis=0), ["metric 'spread'"]),
        (lambda: keras.metrics.MeanMetricWrapper(spread, "spread", axis=1), []),
    ],
)
def test_what_a_metric_is_told_beside_rows_counts(metric, found):
    built = model(None)
    built.compile("sgd", "mse", metrics=[metric()])
    assert coupled(built, (_SPEC[0], tf.TensorSpec([None, 4]))) == found


def test_metrics_of_outputs_beside_one_without_labels():
    inputs = keras.Input((3,))
    outputs = {name: layers.Dense(4, name=name)(inputs) for name in ("right", "left", "middle")}
    built = keras.Model(inputs, outputs)
    labels = {name: tf.TensorSpec([None, 4]) for name in ("left", "right")}
    built.compile("sgd", dict.fromkeys(labels, "mse"), metrics={"left": [mean], "right": [summed]})
    assert coupled(built, (_SPEC[0], labels)) == ["metric 'right_summed'"]


@pytest.mark.parametrize("as_dict", [True, False])
def test_one_of_several_losses(as_dict):
    inputs = keras.Input((3,))
    outputs = {"left": layers.Dense(2)(inputs), "right": layers.Dense(1)(inputs)}
    labels = {name: tf.TensorSpec([None, 1]) for name in outputs}
    losses = {"left": mean, "right": summed}
    if not as_dict:
        outputs, labels, losses = (list(d.values()) for d in (outputs, labels, losses))
    built = keras.Model(inputs, outputs)
    built.compile("sgd", losses)
    assert coupled(built, (_SPEC[0], tuple(labels) if not as_dict else labels)) == ["loss 'summed'"]


class Own(keras.Model):
    reduce = staticmethod(tf.reduce_mean)

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.shown = keras.metrics.Mean(name="shown")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        loss = self.reduce(tf.square(y_pred)) + super().compute_loss(x, y, y_pred, sample_weight)
        self.shown.update_state(loss)
        return loss


class OwnSum(Own):
    reduce = staticmethod(tf.reduce_sum)


@pytest.mark.parametrize(("kind", "found"), [(Own, []), (OwnSum, ["the loss of compute_loss"])])
def test_a_compute_loss_of_ones_own_is_tried_without_a_trace(kind, found):
    built = model(keras.losses.SparseCategoricalCrossentropy(from_logits=True), kind=kind)
    compiled = built.compiled_loss
    assert coupled(built, _SPEC) == found
    assert built.compiled_loss is compiled
    assert float(built.shown.count) == 0
    built.shown.update_state(1.0)
    assert float(built.shown.count) == 1


class Adding(layers.Layer):
    def __init__(self, reduce, what):
        super().__init__(name=f"{what}_it")
        self.reduce, self.what = reduce, what

    def call(self, x):
        if self.what == "loss":
            self.add_loss(self.reduce(tf.square(x)))
        else:
            self.add_metric(self.reduce(tf.square(x)), name="size")
        return x


@pytest.mark.parametrize(
    ("what", "reduce", "found"),
    [
        ("loss", tf.reduce_sum, ["add_loss of layer 'loss_it'"]),
        ("loss", tf.reduce_mean, []),
        ("metric", tf.reduce_sum, ["metric 'size'"]),
        ("metric", tf.reduce_mean, []),
    ],
)
def test_what_a_layer_adds(what, reduce, found):
    assert coupled(model("mse", Adding(reduce, what)), _SPEC) == found


class Switched(layers.Layer):
    """Its rows go to one of two experts; adds the loss that balances them (Switch)."""

    def call(self, x):
        likely = tf.nn.softmax(tf.stack([tf.reduce_sum(x, -1), tf.zeros(tf.shape(x)[:1])], 1))
        chosen = tf.one_hot(tf.argmax(likely, -1), 2)
        self.add_loss(tf.reduce_sum(tf.reduce_mean(chosen, 0) * tf.reduce_mean(likely, 0)))
        return x


def test_rows_that_a_router_parts():
    built = model("mse", Switched(name="router"))
    assert coupled(built, _SPEC) == ["add_loss of layer 'router'"]


def test_what_a_model_adds():
    built = model("mse")
    built.add_metric(tf.reduce_sum(built.output), name="size")
    built.add_metric(tf.reduce_mean(built.output), name="mean")
    before = built.get_weights()
    assert coupled(built, _SPEC) == ["metric 'size'"]
    for ours, theirs in zip(before, built.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_labels_of_text_are_tried_too():
    spec = (tf.TensorSpec([None, 3], tf.string), tf.TensorSpec([None], tf.string))
    assert coupled(model(contrastive), spec) == ["loss 'contrastive'"]


# The whole model ---------------------------------------------------------------------------------


class Sparse(keras.regularizers.Regularizer):
    """Of sparse autoencoders: how often a unit is active over the batch."""

    def __call__(self, x):
        active = tf.reduce_mean(tf.abs(x), 0)
        return tf.reduce_sum(active * tf.math.log(active / 0.05 + 1e-6))


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.out = layers.Dense(1, "sigmoid")

    def call(self, x):
        return self.out(x)


class Noisy(layers.Layer):
    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


def dice(y, y_pred):
    y = tf.cast(y, y_pred.dtype)
    both = 2 * tf.reduce_sum(y * y_pred) + 1
    return 1 - both / (tf.reduce_sum(y) + tf.reduce_sum(y_pred) + 1)


def rmse(y, y_pred):
    return tf.sqrt(tf.reduce_mean(tf.square(y - y_pred)))


def without(padding):
    def masked(y, y_pred):
        known = y != padding
        loss = keras.losses.sparse_categorical_crossentropy(tf.where(known, y, 0), y_pred)
        known = tf.cast(known, loss.dtype)
        return tf.reduce_sum(loss * known) / tf.maximum(tf.reduce_sum(known), 1)

    return masked


class State(keras.metrics.Metric):
    """A metric of two numbers, which a batch changes by ``update``, that no config has."""

    def __init__(self, update=None, name="state"):
        super().__init__(name=name)
        self.update = update
        self.a, self.b = self.add_weight(name="a"), self.add_weight(name="b")

    def update_state(self, y, y_pred, sample_weight=None):
        a, b = self.update(self.a, self.b, y_pred)
        self.a.assign(a)
        self.b.assign(b)

    def result(self):
        return self.a / self.b

    def reset_state(self):
        self.a.assign(0.0)
        self.b.assign(0.0)


def largest(a, b, y_pred):
    return tf.maximum(a, tf.reduce_max(y_pred)), tf.ones([])


def mean_of_means(a, b, y_pred):
    return a + tf.reduce_mean(y_pred), b + 1


def mean_of_rows(a, b, y_pred):
    return a + tf.reduce_sum(y_pred), b + tf.cast(tf.shape(y_pred)[0], tf.float32)


class Closed(State):
    """Of a function that stands in no config, and no attribute of its name."""

    def __init__(self, function, name="closed"):
        super().__init__(function, name)


@pytest.mark.parametrize("update", [largest, mean_of_rows])
def test_a_metric_that_cannot_be_made_anew_is_named_as_untried(update):
    built = model("mse")
    built.compile("sgd", "mse", metrics=[Closed(update)])
    (clause,) = explained(built, _SPEC)
    assert clause.startswith("metric 'closed' is not tried on rows, as its get_config")


_CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy
_PARTS = {
    "an activity regularizer": ({"act": Sparse()}, "what layers add to the loss"),
    "ignore_class": ({"loss": _CROSSENTROPY(ignore_class=-1)}, ""),
    "labels of -1": ({"loss": without(-1)}, "loss 'masked'"),
    "labels of -100": ({"loss": without(-100)}, "loss 'masked'"),
    "a centre": ({"middle": lambda x: x - tf.reduce_mean(x, 0)}, "layer 'tf.math.subtract"),
    "attention over rows": (
        {"middle": lambda x: tf.nn.softmax(x @ tf.transpose(x)) @ x},
        "layer 'tf.linalg.matmul",
    ),
    "a loss of Keras": ({}, ""),
    "an activity regularizer of Keras": ({"act": "l2"}, ""),
    "a sum": ({"loss": _CROSSENTROPY(reduction="sum")}, ""),
    "what is normalized by row": ({"middle": layers.LayerNormalization()}, ""),
    "BatchNormalization": ({"middle": layers.BatchNormalization()}, ""),
    "noise": ({"middle": Noisy()}, ""),
}


@pytest.mark.parametrize("name", _PARTS)
def test_a_whole_model(name):
    given, found = _PARTS[name]
    inputs = keras.Input((3,))
    x = layers.Dense(8, "tanh", activity_regularizer=given.get("act"))(inputs)
    x = given.get("middle", lambda x: x)(x)
    built = keras.Model(inputs, layers.Dense(3, "softmax")(x))
    built.compile("sgd", given.get("loss", "sparse_categorical_crossentropy"))
    before = built.get_weights()
    told = explained(built, _SPEC)
    assert [found in clause for clause in told] == [True] * bool(found), told
    np.testing.assert_equal(built.get_weights(), before)


@pytest.mark.parametrize(
    ("loss", "metric", "found"),
    [
        (dice, None, "the compiled loss"),
        (rmse, None, "the compiled loss"),
        ("mse", None, ""),
        ("mse", dice, "metric 'dice'"),
        ("mse", State(largest), "metric 'state'"),
        ("mse", State(mean_of_means), "metric 'state'"),
        ("mse", State(mean_of_rows), ""),
        ("mse", keras.metrics.AUC(), ""),
    ],
)
@pytest.mark.parametrize("is_own_class", [True, False])
def test_losses_and_metrics_of_a_class_of_ones_own(loss, metric, found, is_own_class):
    built = Own() if is_own_class else keras.Sequential([layers.Dense(1, "sigmoid")])
    built.build((None, 3))
    built.compile("sgd", loss, metrics=None if metric is None else [metric])
    spec = (tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1]))
    told = explained(built, spec)
    if not is_own_class and callable(loss):
        found = f"loss '{loss.__name__}'"
    # What is small in the loss may be large in its gradient.
    named = (found, "the gradient of the losses") if found == "the compiled loss" else (found,)
    assert [clause.startswith(named) for clause in told] == [True] * bool(found), told


class Routed(layers.Layer):
    """Balances its experts in training alone, as routers do."""

    def build(self, shape):
        self.gate = self.add_weight(name="gate", shape=(shape[-1], 2), initializer="glorot_uniform")

    def call(self, x, training=None):
        shares = tf.nn.softmax(x @ self.gate)
        if training:
            self.add_loss(tf.reduce_sum(tf.square(tf.reduce_mean(shares, 0))))
        return tf.concat([shares, x], -1)


class Large(layers.Layer):
    """Looks at other rows where one is large, which made-up rows never are."""

    def call(self, x):
        return tf.where(tf.reduce_max(x) > 10, x - tf.reduce_mean(x, 0), x)


def of_rare_classes(y, y_pred):
    """A mean over the rows of classes from 7 on, which made-up labels never have."""
    rare = tf.cast(y > 6, tf.float32)
    losses = keras.losses.sparse_categorical_crossentropy(y, y_pred)
    return tf.reduce_sum(losses * rare) / (tf.reduce_sum(rare) + 1)


def _digits():
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return x.astype(np.float32), y


@pytest.mark.parametrize(
    ("middle", "loss", "found"),
    [
        (Routed(), "sparse_categorical_crossentropy", "what layers add to the loss"),
        (Large(), "sparse_categorical_crossentropy", "layer 'large' looks at several rows"),
        (layers.Dropout(0.5), "sparse_categorical_crossentropy", ""),
        (layers.BatchNormalization(), _CROSSENTROPY(reduction="sum"), ""),
        (layers.Dropout(0.5), of_rare_classes, "loss 'of_rare_classes'"),
        (layers.ReLU(), _CROSSENTROPY(ignore_class=1), ""),
    ],
    ids=["in training", "own rows", "Dropout", "statistics", "own labels", "ignore_class"],
)
def test_real_rows_show_what_made_up_ones_do_not(middle, loss, found):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((64,))
    built = keras.Model(inputs, layers.Dense(10, "softmax")(middle(inputs)))
    built.compile("sgd", loss, metrics=["accuracy"])
    x, y = _digits()
    spec = (tf.TensorSpec([None, 64]), tf.TensorSpec([None], tf.int64))
    before = built.get_weights()
    told = explained(built, spec, filled_up((x[5:], y[5:])))
    assert [found in clause for clause in told] == [True] * bool(found), told
    np.testing.assert_array_equal(
        np.concatenate([np.ravel(w) for w in before]),
        np.concatenate([np.ravel(w) for w in built.get_weights()]),
    )


def test_a_metric_that_is_named_hides_no_loss():
    built = model(of_rows)
    built.compile("sgd", keras.losses.CosineSimilarity(axis=0), metrics=[summed])
    rows = filled_up((np.eye(3, dtype=np.float32), np.eye(3, 4, dtype=np.float32)))
    spec = (_SPEC[0], tf.TensorSpec([None, 4]))
    told = explained(built, spec, rows)
    assert any("metric 'summed'" in each for each in told)
    assert len(told) > 1


def test_rows_give_their_sizes():
    spec = {"a": tf.TensorSpec([None, None]), "b": tf.TensorSpec([None], tf.int64)}
    rows = {"a": np.zeros((8, 5), np.float32), "b": np.zeros(8, np.int64)}
    found = with_sizes_of(rows, spec)
    shapes = {name: each.shape.as_list() for name, each in found.items()}
    assert shapes == {"a": [None, 5], "b": [None]}


def test_few_rows_are_taken_again():
    x, y = filled_up((np.arange(6.0).reshape(3, 2), np.arange(3)))
    assert len(x) == len(y) == ROWS
    np.testing.assert_array_equal(y, [0, 1, 2, 0, 1, 2, 0, 1])
    assert filled_up(None) is None
    assert filled_up((np.zeros((0, 2)), np.zeros(0))) is None
