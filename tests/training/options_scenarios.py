"""The options of the train step, alone and together, against one device."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from one_device import TOLERANCE, assert_near, assert_same_results, equals_one_device, pair
from scenarios import scenario
from tensorflow import keras

import tfdist
from tfdist.errors import CheckpointError, DataError, ModelError, OptionError
from tfdist.keras.tensors import all_raw
from tfdist.strategies import rank_speeds
from tfdist.training.engine.binding import binding_of
from tfdist.training.memory import offload

layers = keras.layers


def given(strategy: Any, **options: Any) -> Any:
    """Returns a strategy with other options over the same replicas."""
    devices = {"devices": strategy.num_replicas} if strategy.name == "mirrored" else {}
    other = tfdist.strategy(strategy.name, **devices, **options)
    other.start()
    return other


def data(rows: int = 25, seed: int = 0, weighted: bool = True) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(rows, 5)).astype(np.float32), rng.integers(0, 3, rows)
    return (x, y, rng.uniform(0.2, 3, rows).astype(np.float32)) if weighted else (x, y)


def auc_of_class_zero() -> keras.metrics.Metric:
    class AUC(keras.metrics.AUC):
        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            return super().update_state(y_true == 0, y_pred[:, 0], sample_weight)

    return AUC(name="auc")


def mlp(**compile_options: Any) -> keras.Model:
    l2 = keras.regularizers.L2(0.05)
    model = keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(8, "tanh", kernel_regularizer=l2, activity_regularizer=l2, name="one"),
            layers.Dense(8, "tanh", name="two"),
            layers.Dense(3, "softmax", name="three"),
        ]
    )
    options = {
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5),
        "loss": "sparse_categorical_crossentropy",
        "metrics": ["accuracy"],
    }
    model.compile(**(options | compile_options))
    return model


def convnet() -> keras.Model:
    x = inputs = keras.Input((5,))
    x = layers.Reshape((5, 1))(x)
    for width in (4, 6):
        x = layers.Conv1D(width, 3, padding="same", use_bias=False)(x)
        x = layers.BatchNormalization(momentum=0.8)(x)
        x = layers.Activation("tanh")(x)
    x = layers.GlobalAveragePooling1D()(x)
    model = keras.Model(inputs, layers.Dense(3, "softmax")(x))
    model.compile(keras.optimizers.SGD(0.2, momentum=0.9), "sparse_categorical_crossentropy")
    return model


class Block(layers.Layer):
    """A layer of layers, as people write them: with attention that respects a mask."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.supports_masking = True
        self.attention = layers.MultiHeadAttention(2, 4)
        self.norm = layers.LayerNormalization()
        self.dense = layers.Dense(8, "gelu")

    def call(self, x: Any, mask: Any = None) -> Any:
        x = self.norm(x + self.attention(x, x))
        return self.dense(x)


def tagger(blocks: int = 2) -> keras.Model:
    """Tags words; its loss is a mean over the unmasked ones."""
    model = keras.Sequential(
        [
            keras.Input((7,), dtype="int64"),
            layers.Embedding(6, 8, mask_zero=True),
            *(Block(name=f"block{number}") for number in range(blocks)),
            layers.Dense(3, "softmax"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.01, epsilon=1e-3),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def words() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    # Some have no word at all, but each batch has one.
    lengths = np.where(np.arange(25) % 5, rng.integers(1, 8, 25), 0)
    x = rng.integers(1, 6, (25, 7)) * (np.arange(7) < lengths[:, None])
    return x, rng.integers(0, 3, (25, 7)), rng.uniform(0.5, 2, 25)


def assert_judges_as_one_device(
    strategy: Any, model: keras.Model, reference: keras.Model, records: Any
) -> None:
    """Evaluates and predicts."""
    x, y, weight = records
    in_order = strategy.dataset(records, global_batch_size=9, training=False)
    found = model.evaluate(in_order, verbose=0, return_dict=True)
    expected = reference.evaluate(
        x, y, sample_weight=weight, batch_size=9, verbose=0, return_dict=True
    )
    assert set(found) == set(expected)
    assert_same_results(found, expected)
    predicted = model.predict(in_order, verbose=0)
    np.testing.assert_allclose(predicted, reference.predict(x, verbose=0), atol=TOLERANCE)


# accumulate_steps --------------------------------------------------------------------------------


@scenario("single", "mirrored")
def microbatches_equal_one_batch(strategy, folder):
    """Shares of 4 rows in microbatches of 2, 1 and 1; the tail is one row for all of them."""

    def model_fn():
        return mlp(metrics=["accuracy", auc_of_class_zero()], weighted_metrics=["accuracy"])

    three = given(strategy, accumulate_steps=3)
    model, reference = equals_one_device(three, model_fn, data())
    assert model.optimizer.iterations.numpy() == 8
    assert_judges_as_one_device(three, model, reference, data())
    # 45 records: two batches of 16 and a tail of 13.
    two = given(strategy, accumulate_steps=2)
    model, _ = equals_one_device(two, mlp, data(45), global_batch_size=16)
    assert model.optimizer.iterations.numpy() == 6


@scenario(long=True)
def microbatches_of_sums(strategy, folder):
    def model_fn():
        loss = keras.losses.SparseCategoricalCrossentropy(reduction="sum")
        return mlp(loss=loss, optimizer=keras.optimizers.SGD(0.01))

    equals_one_device(given(strategy, accumulate_steps=2), model_fn, data())


@scenario("mirrored", "horovod", long=True)
def microbatches_of_masks_and_sparse_gradients(strategy, folder):
    three = given(strategy, accumulate_steps=3)
    equals_one_device(three, lambda: tagger(blocks=1), words())
    leaves_out = keras.losses.SparseCategoricalCrossentropy(ignore_class=1)
    equals_one_device(three, lambda: mlp(loss=leaves_out), data())


@scenario("mirrored", "horovod", long=True)
def clipped_tables_of_words_and_of_positions(strategy, folder):
    """Keras clips the gradients of look-ups before it adds up those of equal words."""

    class Positions(layers.Layer):
        def __init__(self, **options):
            super().__init__(**options)
            self.table = layers.Embedding(7, 8)

        def call(self, x):
            return x + self.table(tf.range(tf.shape(x)[1]))

    def model_fn(**clips):
        inputs = keras.Input((7,), dtype="int64")
        x = layers.Flatten()(Positions()(layers.Embedding(6, 8)(inputs)))
        model = keras.Model(inputs, layers.Dense(3, "softmax")(x))
        optimizer = keras.optimizers.SGD(0.5, momentum=0.9, **clips)
        model.compile(optimizer, "sparse_categorical_crossentropy")
        return model

    records = words()[0], np.random.default_rng(1).integers(0, 3, 25)
    equals_one_device(strategy, lambda: model_fn(clipvalue=0.003), records)
    two = given(strategy, accumulate_steps=2)
    equals_one_device(two, lambda: model_fn(global_clipnorm=0.05), records)


@scenario(long=True)
def microbatches_of_a_loss_of_ones_own(strategy, folder):
    def own(y_true, y_pred):
        return tf.reduce_mean(tf.square(tf.one_hot(y_true[:, 0], 3) - y_pred), -1)

    def model_fn():
        return mlp(loss=own, metrics=None)

    equals_one_device(given(strategy, accumulate_steps=2), model_fn, data())


@scenario(long=True)
def microbatches_in_eager_steps(strategy, folder):
    def model_fn():
        return mlp(run_eagerly=True)

    equals_one_device(given(strategy, accumulate_steps=2), model_fn, data(17))


@scenario("single", "mirrored", long=True)
def microbatches_of_arrays_and_class_weights(strategy, folder):
    model, reference = pair(given(strategy, accumulate_steps=2), mlp)
    options = {
        "batch_size": 8,
        "shuffle": False,
        "class_weight": {0: 0.25, 1: 1.0, 2: 3.0},
        "verbose": 0,
    }
    for one in (model, reference):
        one.fit(*data(weighted=False), **options)
    assert_near(model.get_weights(), reference.get_weights())


@scenario("mirrored", "horovod", long=True)
def a_resumed_fit_of_microbatches(strategy, folder):
    two = given(strategy, accumulate_steps=2, recompute="blocks")
    feed = two.dataset(data(45), global_batch_size=8, seed=3)
    unbroken, _ = pair(two, mlp)
    unbroken.fit(feed, epochs=2, verbose=0)

    class Break(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 3:
                raise KeyboardInterrupt

    broken, _ = pair(two, mlp)
    keep = tfdist.Checkpoints(folder, every_steps=2)
    with pytest.raises(KeyboardInterrupt):
        broken.fit(feed, epochs=2, callbacks=[keep, Break()], verbose=0)
    strategy.from_chief(None)
    resumed = two.build(mlp)
    resume = tfdist.Checkpoints(folder, every_steps=2, resume=True)
    resumed.fit(feed, epochs=2, callbacks=[resume], verbose=0)
    assert_near(resumed.get_weights(), unbroken.get_weights(), 1e-6)


@scenario(long=True)
def more_microbatches_than_rows_are_refused(strategy, folder):
    with pytest.raises(OptionError, match=r"accumulate_steps=9.*it is what one update sees"):
        given(strategy, accumulate_steps=9).dataset(data(), global_batch_size=8)
    given(strategy, accumulate_steps=9).dataset(data(), global_batch_size=8, training=False)


@scenario("single")
def what_microbatches_would_do_otherwise_is_told(strategy, folder):
    divided = given(strategy, accumulate_steps=2)
    with pytest.raises(ModelError, match="found the optimizer Nadam"):
        divided.build(lambda: mlp(optimizer="nadam"))

    def model_fn() -> keras.Model:
        normed = layers.SpectralNormalization(layers.Dense(3), name="normed")
        frozen = layers.BatchNormalization(trainable=False, name="frozen")
        norm = layers.BatchNormalization(name="norm")
        model = keras.Sequential([keras.Input((5,)), frozen, norm, normed])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    with contextlib.redirect_stdout(io.StringIO()) as said:
        feed = divided.dataset(data(), global_batch_size=8)
        divided.build(model_fn).fit(feed, verbose=0)
    assert "the state of layer 'normed' is changed by each microbatch" in said.getvalue()
    assert "not from the global batch: layer 'norm'\n" in said.getvalue()


@scenario("single")
def a_sequence_is_tried_on_rows_before_microbatches_are(strategy, folder):
    class Batches(keras.utils.Sequence):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
            return data(8, weighted=False)

    def spread(y, y_pred):
        return -tf.math.reduce_variance(y_pred, axis=0)

    model = given(strategy, accumulate_steps=2).build(lambda: mlp(loss=spread))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        model.fit(Batches(), verbose=0)
    assert "warning: loss 'spread' is no mean over the rows" in said.getvalue()


@scenario("single")
def added_numbers_that_may_be_of_rows_or_means_are_refused(strategy, folder):
    """Keras trains on their sum: in microbatches of 4 rows, 4 means would count as 4 rows."""

    class Means(layers.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            self.add_loss(tf.reduce_mean(tf.square(x), 0))
            return x

    def model_fn() -> keras.Model:
        model = keras.Sequential([keras.Input((5,)), layers.Dense(4), Means(name="means")])
        model.compile(keras.optimizers.SGD(0.05))
        return model

    batches = tf.data.Dataset.from_tensor_slices(data(16, weighted=False))
    batches = batches.batch(8, drop_remainder=True)
    model = given(strategy, accumulate_steps=2).build(model_fn)
    with pytest.raises(ModelError, match=r"4 numbers beside 4 rows, of layer 'means'"):
        model.fit(batches, verbose=0)


# BatchNormalization ------------------------------------------------------------------------------


def train_by_hand(model: keras.Model, feed: Any, groups: list[np.ndarray], own: bool) -> None:
    """One epoch in which each group of a batch's rows is normalized by itself.

    Args:
        own: whether the groups move the moving statistics side by side, and their mean is kept;
            else one after the other.
    """
    trainable, moving = model.trainable_variables, model.non_trainable_variables
    for x, y in feed.on_one_device().epochs(0, 1).take(feed.steps_per_epoch):
        before, moved, total = [v.numpy() for v in moving], [], None
        for rows in groups:
            if own:
                for variable, value in zip(moving, before, strict=True):
                    variable.assign(value)
            with tf.GradientTape() as tape:
                y_pred = model(tf.gather(x, rows), training=True)
                loss = model.compute_loss(None, tf.gather(y, rows), y_pred, None)
                loss *= len(rows) / len(x)
            found = tape.gradient(loss, trainable)
            total = found if total is None else [a + b for a, b in zip(total, found, strict=True)]
            moved.append([v.numpy() for v in moving])
        if own:
            for variable, values in zip(moving, zip(*moved, strict=True), strict=True):
                variable.assign(np.mean(values, axis=0))
        model.optimizer.apply_gradients(zip(total, trainable, strict=True))


@scenario("mirrored", "multi_worker")
def microbatches_are_normalized_over_all_replicas(strategy, folder):
    two = given(strategy, accumulate_steps=2)
    model, reference = pair(two, convnet)
    feed = two.dataset(data(24, weighted=False), global_batch_size=8)
    model.fit(feed, verbose=0)
    shares = np.split(np.arange(8), strategy.num_replicas)
    groups = [
        np.concatenate(parts) for parts in zip(*(np.split(s, 2) for s in shares), strict=True)
    ]
    train_by_hand(reference, feed, groups, own=False)
    assert_near(model.get_weights(), reference.get_weights())
    assert "accumulate_steps=2" in " ".join(two.approximations)


@scenario("single", long=True)
def rows_that_are_missing_are_in_no_statistics(strategy, folder):
    """One row in a step that is divided by 3 on each replica: as if it were not divided."""
    three = given(strategy, accumulate_steps=3)
    model, reference = pair(three, convnet)
    x, y = data(1, weighted=False)
    model.fit(three.dataset((x, y), global_batch_size=8), verbose=0)
    reference.fit(x, y, verbose=0)
    # Keras' kernel and the shares round the variance of one row, near 0, in other ways.
    assert_near(model.get_weights(), reference.get_weights(), 1e-4)


@scenario("mirrored", "horovod", long=True)
def statistics_of_each_replica(strategy, folder):
    own = given(strategy, sync_batch_norm=False)
    model, reference = pair(own, convnet)
    feed = own.dataset(data(24, weighted=False), global_batch_size=8)
    model.fit(feed, verbose=0)
    train_by_hand(reference, feed, np.split(np.arange(8), strategy.num_replicas), own=True)
    assert_near(model.get_weights(), reference.get_weights())
    if strategy.num_replicas > 1:
        assert "sync_batch_norm=False" in " ".join(own.approximations)
        report = tfdist.verify(convnet, data(weighted=False), own, steps=4, global_batch_size=8)
        if strategy.topology.is_chief:
            assert not report.exact
            assert "sync_batch_norm=False" in str(report)
    chiefs = strategy.from_chief(model.get_weights())
    assert_near(model.get_weights(), chiefs, 0)


# precision ---------------------------------------------------------------------------------------


@scenario(long=True)
def mixed_precision_of_a_function_that_does_not_know(strategy, folder):
    def model_fn():
        # As Keras advises: a loss of float16 would overflow by its scale on one device.
        last = layers.Dense(3, dtype="float32")
        model = keras.Sequential([keras.Input((5,)), layers.Dense(8, "tanh"), last])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
        return model

    for precision in ("mixed_bfloat16", "mixed_float16"):
        mixed = given(strategy, precision=precision, accumulate_steps=2)
        model = mixed.build(model_fn)
        policy = keras.mixed_precision.global_policy().name
        assert policy == "float32"
        assert [layer.dtype_policy.name for layer in model.layers] == [precision, "float32"]
        assert {v.dtype for v in model.trainable_variables} == {tf.float32}
        x, y = data(weighted=False)
        report = tfdist.verify(model_fn, (x / 2, y), mixed, steps=5, global_batch_size=8)
        if strategy.topology.is_chief:
            assert report.exact, str(report)


@scenario(long=True)
def mixed_precision_is_saved_as_keras_does(strategy, folder):
    mixed = given(strategy, precision="mixed_float16", accumulate_steps=2, recompute="blocks")
    model, reference = pair(mixed, lambda: mlp(metrics=None))
    feed = mixed.dataset(data(), global_batch_size=8, seed=2)
    losses = model.fit(feed, epochs=4, verbose=0).history["loss"]
    batches, steps = feed.on_one_device().epochs(0, 4), feed.steps_per_epoch
    expected = reference.fit(batches, epochs=4, steps_per_epoch=steps, verbose=0).history["loss"]
    # One device computes in float32, and skips no update because of what overflows.
    np.testing.assert_allclose(losses, expected, atol=0.05)
    assert expected[0] - expected[-1] > 0.5
    strategy.save(model, folder / "model.keras")
    loaded = keras.models.load_model(folder / "model.keras")
    assert loaded.layers[0].dtype_policy.name == "mixed_float16"
    predicted = model.predict(data()[0], verbose=0)
    np.testing.assert_allclose(loaded.predict(data()[0], verbose=0), predicted, atol=1e-3)


@scenario("mirrored", "horovod", "multi_worker", long=True)
def what_overflows_on_one_replica_updates_none(strategy, folder):
    mixed = given(strategy, precision="mixed_float16", accumulate_steps=2)
    model, _ = pair(mixed, mlp)
    x, y, weight = data(8)
    bad = x.copy()
    bad[-1] = 1e30  # The last replica has it, in its last microbatch.

    def fit(x: np.ndarray, **options: Any) -> tuple[list, float]:
        before = model.get_weights()
        feed = mixed.dataset((x, y, weight), global_batch_size=8, training=False)
        model.fit(feed, verbose=0, **options)
        scale = float(model.optimizer.loss_scale)
        assert strategy.from_chief(scale) == scale
        chiefs = strategy.from_chief(model.get_weights())
        assert_near(model.get_weights(), chiefs, 0)
        return [np.max(np.abs(a - b)) for a, b in zip(before, chiefs, strict=True)], scale

    moved, scale = fit(bad)
    assert not np.any(moved)
    assert scale == 2.0**14
    moved, scale = fit(x, callbacks=[tfdist.Checkpoints(folder)])
    assert np.all(moved)
    assert scale == 2.0**14
    strategy.from_chief(None)

    model = mixed.build(mlp)  # Its scale is 2 ** 15, until it goes on with the other's.
    assert float(model.optimizer.loss_scale) == 2.0**15
    moved, scale = fit(x, epochs=2, callbacks=[tfdist.Checkpoints(folder, resume=True)])
    assert np.all(moved)
    assert scale == 2.0**14


@scenario
def models_that_do_not_follow_the_precision_are_refused(strategy, folder):
    mixed = given(strategy, precision="mixed_bfloat16")
    with pytest.raises(ModelError, match=r"whose layers compute in float32.*Give a function"):
        mixed.build(mlp(metrics=None))
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        model = mlp(metrics=None)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    mixed.build(model)


# Outputs that round to 0 and 1 -------------------------------------------------------------------


def saturated() -> keras.Model:
    """Keras takes the losses from the logits; of clipped probabilities they are 16.1 at most."""
    large = keras.initializers.RandomNormal(stddev=40)
    inputs = keras.Input((5,))
    x = layers.Dense(8, "tanh", name="hidden")(inputs)
    outputs = {
        "kind": layers.Dense(3, "softmax", name="kind", kernel_initializer=large, dtype="float32"),
        "flag": layers.Dense(1, "sigmoid", name="flag", kernel_initializer=large, dtype="float32"),
    }
    x = layers.Dense(8, "tanh", name="second")(x)
    model = keras.Model(inputs, {name: layer(x) for name, layer in outputs.items()})
    losses = {"kind": "sparse_categorical_crossentropy", "flag": "binary_crossentropy"}
    model.compile(keras.optimizers.SGD(1e-4), losses, loss_weights={"kind": 0.1, "flag": 0.1})
    return model


def of_saturated() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    x, y = data(weighted=False)
    return x, {"kind": y, "flag": (y > 1)[:, None].astype(np.int64)}


@scenario(long=True)
def saturated_outputs_of_microbatches_and_recomputed_layers(strategy, folder):
    for recompute in ("none", "hidden,kind,flag"):
        made = given(strategy, accumulate_steps=2, recompute=recompute)
        model, reference = equals_one_device(made, saturated, of_saturated())
        judged = made.dataset(of_saturated(), global_batch_size=8, training=False)
        found = model.evaluate(judged, verbose=0, return_dict=True)
        expected = reference.evaluate(*of_saturated(), verbose=0, return_dict=True)
        assert found == pytest.approx(expected, rel=1e-5)
        assert expected["kind_loss"] > 17
        assert expected["flag_loss"] > 17


@scenario(long=True)
def saturated_outputs_in_mixed_precision(strategy, folder):
    mixed = given(strategy, precision="mixed_float16", accumulate_steps=2)
    x, y = of_saturated()
    model, reference = pair(mixed, saturated)
    feed = mixed.dataset((x, y), global_batch_size=8, seed=2)
    found = model.fit(feed, verbose=0).history["loss"][0]
    expected = reference.evaluate(x, y, verbose=0, return_dict=True)["loss"]
    assert found == pytest.approx(expected, rel=0.02)
    assert expected > 3.4


# recompute ---------------------------------------------------------------------------------------


def deep() -> keras.Model:
    inner = keras.Sequential(
        [keras.Input((8,)), layers.Dense(8, "tanh"), layers.BatchNormalization()], name="inner"
    )
    inputs = keras.Input((5,))
    x = layers.Dense(8, "tanh", name="first")(inputs)
    for number in range(2):
        y = layers.Dense(8, "tanh", activity_regularizer="l2", name=f"dense{number}")(x)
        y = layers.BatchNormalization(name=f"norm{number}")(y)
        x = layers.Add(name=f"add{number}")([x, y])
    x = inner(x)
    model = keras.Model(inputs, [layers.Dense(3, name="left")(x), layers.Dense(3, name="right")(x)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), {"left": loss, "right": loss})
    return model


@scenario("mirrored", "horovod", "keras_3")
def recomputed_activations_equal_kept_ones(strategy, folder):
    x, y = data(weighted=False)
    records = x, {"left": y, "right": (y + 1) % 3}
    kept, _ = pair(strategy, deep)
    feed = strategy.dataset(records, global_batch_size=8, seed=2)
    expected = kept.fit(feed, verbose=0).history
    start = pair(strategy, deep)[1].get_weights()
    for recompute in ("blocks", ["dense1", "norm1", "inner"]):
        model, _ = pair(given(strategy, recompute=recompute), deep)
        found = model.fit(feed, verbose=0).history
        assert_near(model.get_weights(), kept.get_weights())
        np.testing.assert_allclose(found["loss"], expected["loss"], atol=TOLERANCE)
    assert max(np.max(np.abs(a - b)) for a, b in zip(start, kept.get_weights(), strict=True)) > 0.01


def towers() -> keras.Model:
    """A normalization that three towers share, one of which takes it twice."""
    inputs = keras.Input((5,))
    dense, norm = layers.Dense(6, "tanh"), layers.BatchNormalization(momentum=0.7)
    second = layers.Dense(5, "tanh")(inputs)
    third = layers.Dense(5)(layers.Activation("tanh")(second))
    ends = [norm(dense(third)), layers.Activation("tanh")(norm(dense(inputs)))]
    ends.append(norm(norm(dense(second))))
    model = keras.Model(inputs, layers.Dense(3)(layers.Concatenate()(ends)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.2), loss)
    return model


@scenario("single", "mirrored", "horovod", "multi_worker", "keras_3", long=True)
def a_normalization_that_towers_share(strategy, folder):
    equals_one_device(strategy, towers, data())
    equals_one_device(given(strategy, recompute="blocks"), towers, data())


def _unordered_reads(graph: Any) -> list[str]:
    """Returns the reads of variables that may come before or after a write."""
    nodes = {node.name: node for node in graph.node}
    inputs = {
        name: [given.lstrip("^").split(":")[0] for given in node.input]
        for name, node in nodes.items()
    }

    def before(name: str) -> set[str]:
        found, left = set(), [name]
        while left:
            for given in inputs[left.pop()]:
                if given in nodes and given not in found:
                    found.add(given)
                    left.append(given)
        return found

    reads = [name for name, node in nodes.items() if node.op == "ReadVariableOp"]
    writes = [name for name, node in nodes.items() if node.op.startswith("Assign")]
    assert len(reads) > 30
    assert len(writes) > 10
    return [
        read
        for write in writes
        for read in reads
        if inputs[read][0] == inputs[write][0]
        and read not in before(write)
        and write not in before(read)
    ]


@scenario("single", "mirrored", "horovod", "multi_worker", long=True)
def a_second_pass_reads_weights_before_they_are_updated(strategy, folder):
    """In the graph as TensorFlow runs it: its own optimizer of graphs had dropped the order."""
    from tensorflow.python.eager import context

    def normed() -> keras.Model:
        x = inputs = keras.Input((5,))
        for _ in range(6):
            x = layers.LayerNormalization()(layers.Dense(5, "tanh")(x))
        model = keras.Model(inputs, layers.Dense(3)(x))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.2), loss)
        return model

    before = tf.config.optimizer.get_experimental_options().get("disable_meta_optimizer", False)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
    for model_fn in (normed, towers):
        model, _ = pair(given(strategy, recompute="blocks"), model_fn)
        context.enable_run_metadata()
        try:
            model.fit(*data(weighted=False), batch_size=8, verbose=0)
            found = context.export_run_metadata().function_graphs
        finally:
            context.disable_run_metadata()
        graph = max((of.post_optimization_graph for of in found), key=lambda of: len(of.node))
        assert not _unordered_reads(graph)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": before})


def _normed(pairs: Any) -> Any:
    return [(gradient / (0.1 + tf.norm(gradient)), variable) for gradient, variable in pairs]


class Normed(keras.optimizers.SGD):
    """Changes the gradients that it is given, as centralization and LARS do."""

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **options: Any) -> Any:
        return super().apply_gradients(_normed(grads_and_vars), *args, **options)


class NormedBefore(keras.optimizers.legacy.SGD):
    def apply_gradients(self, grads_and_vars: Any, *args: Any, **options: Any) -> Any:
        return super().apply_gradients(_normed(grads_and_vars), *args, **options)


@scenario("mirrored", "horovod", "multi_worker", long=True)
def gradients_that_an_optimizer_of_ones_own_changes(strategy, folder):
    for make in (Normed, lambda rate: Normed(rate, clipnorm=0.3), NormedBefore):
        equals_one_device(strategy, lambda make=make: mlp(optimizer=make(0.2)), data())


@scenario(long=True)
def recomputed_layers_of_layers_masks_and_microbatches(strategy, folder):
    both = given(strategy, recompute="block0,block1", accumulate_steps=2)
    model, reference = equals_one_device(both, tagger, words())
    assert_judges_as_one_device(both, model, reference, words())


@scenario(long=True)
def recompute_in_eager_steps(strategy, folder):
    def model_fn():
        return mlp(run_eagerly=True)

    equals_one_device(given(strategy, recompute="two"), model_fn, data(9))


@scenario(long=True)
def recompute_in_mixed_precision(strategy, folder):
    options = {"precision": "mixed_bfloat16", "accumulate_steps": 2}
    weights = []
    for recompute in ("none", "one,two"):
        made = given(strategy, recompute=recompute, **options)
        model, _ = pair(made, lambda: mlp(metrics=None))
        model.fit(made.dataset(data(), global_batch_size=8), epochs=2, verbose=0)
        weights.append(model.get_weights())
    assert_near(*weights, 1e-2)  # The second time TensorFlow fuses, and rounds, other operations.


@scenario(long=True)
def layers_that_recompute_does_not_know_are_listed(strategy, folder):
    with pytest.raises(
        OptionError, match=r"layer in recompute must be a known one.*'three'.*none, blocks"
    ):
        given(strategy, recompute=["two", "thre"]).build(mlp)
    with pytest.raises(OptionError, match="Did you mean 'blocks'"):
        given(strategy, recompute="block").build(mlp)

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3, "softmax")

        def call(self, x):
            return self.dense(x)

    def of_its_own_class():
        model = Own()
        model.build((None, 5))
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    with pytest.raises(ModelError, match="recompute must have a Functional or Sequential model"):
        given(strategy, recompute="blocks").build(of_its_own_class)
    equals_one_device(given(strategy, accumulate_steps=2), of_its_own_class, data())


@scenario("single", "mirrored")
def a_step_of_ones_own_is_refused(strategy, folder):
    class Own(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data)

    def model_fn():
        model = Own([keras.Input((5,)), layers.Dense(3, "softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    way = "leave out accumulate_steps" if strategy.num_replicas == 1 else "Leave the option out"
    with pytest.raises(ModelError, match=f"train_step.*{way}"):
        given(strategy, accumulate_steps=2).build(model_fn)


# offload -----------------------------------------------------------------------------------------


@scenario("mirrored", "keras_3")
def what_lies_on_the_host(strategy, folder):
    """With one device beside it, as a GPU is: weights stay there, slots never come."""
    single = tfdist.strategy("single", offload=["optimizer", "activations"])
    with single, tf.device("CPU:1"):
        model, _ = equals_one_device(single, mlp, data())
        sharded = binding_of(model, "this test").sharded
        devices = {weight.device[-5:] for weight in all_raw(model.trainable_weights)}
        assert devices == {"CPU:1"}
        held = [slot for slots in sharded.parts.slots.values() for slot in slots]
        assert held
        assert {variable.device[-5:] for variable in held} == {"CPU:0"}
        kept = tfdist.Checkpoints(folder / "kept")
        records = single.dataset(data(), global_batch_size=8, seed=2)
        model.fit(records, epochs=1, callbacks=[kept], verbose=0)
        model.train_on_batch(data()[0][:4], data()[1][:4])  # Keras' own loops take steps, too.
        again = single.build(mlp)
        again.fit(*data()[:2], epochs=1, verbose=0)
        resume = tfdist.Checkpoints(folder / "kept", resume=True)
        again.fit(records, epochs=2, callbacks=[resume], verbose=0)
        whole = binding_of(again, "this test").sharded.parts.whole_slots()
        assert {variable.device[-5:] for variable in whole} == {"CPU:0"}


@scenario(long=True)
def activations_that_lie_elsewhere(strategy, folder):
    away = given(strategy, offload="activations", accumulate_steps=2, recompute="blocks")
    equals_one_device(away, mlp, data())
    equals_one_device(given(strategy, offload="activations"), tagger, words())
    (folder / "disk").mkdir(exist_ok=True)
    to_disk = given(strategy, offload="activations", offload_dir=folder / "disk")
    equals_one_device(to_disk, mlp, data())
    assert len(list((folder / "disk").glob("tfdist-activations-*/[0-9]*"))) > 4


@scenario
def what_the_way_back_reads_comes_from_the_host(strategy, folder):
    weights = tf.Variable(tf.ones([4, 4]))
    numbers = {}

    @tf.function
    def step(x):
        with tf.device("CPU:1"):
            begun = offload.count()
            with tf.GradientTape() as tape:
                y = tf.tanh(tf.tanh(x @ weights) @ weights)
                loss = tf.reduce_sum(y)
            turned = offload.count()
            gradient = tape.gradient(loss, weights)
        numbers.update(begun=begun, turned=turned, end=offload.count())
        offload.Activations(None).move(begun, turned, loss, [gradient])
        return gradient

    graph = step.get_concrete_function(tf.TensorSpec([None, 4])).graph
    operations = graph.get_operations()
    there = [op for op in operations if op.name.startswith("offloaded")]
    back = [op for op in operations if op.name.startswith("fetched")]
    assert len(there) == len(back) == 2  # Of both tanh; the batch is there anyway.
    assert {op.device[-5:] for op in there} == {"CPU:0"}
    assert {op.device[-5:] for op in back} == {"CPU:1"}
    awaited = [op for op in operations if op.name.startswith("awaited")]
    assert {op.device[-5:] for op in awaited} == {"CPU:0"}
    # A number of what it waits for is read: TensorFlow's optimizer cannot put that elsewhere.
    waited = [{other.type for other in op.control_inputs} for op in awaited]
    assert waited == [{"StridedSlice"}] * 2
    assert [op.inputs[0].op for op in back] == awaited
    forward = set(operations[: numbers["turned"]])
    for operation in operations[numbers["turned"] : numbers["end"]]:
        if operation.type == "Shape":  # Which holds nothing.
            continue
        read = [t for t in operation.inputs if t.op in forward and t.shape.rank == 2]
        assert {t.op.type for t in read} <= {"ReadVariableOp", "Placeholder"}, operation
    x = tf.random.stateless_normal([5, 4], [1, 2])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.tanh(tf.tanh(x @ weights) @ weights))
    assert_near([step(x)], [tape.gradient(loss, weights)])


@scenario("single", long=True)
def tables_are_divided_into_microbatches(strategy, folder):
    """Keras takes a DataFrame itself."""
    import pandas as pd

    x, y, _ = data()
    two = given(strategy, accumulate_steps=2)
    table = pd.DataFrame(np.reshape(x, (len(x), -1)))

    def model_fn():
        model = keras.Sequential([keras.Input((table.shape[1],)), layers.Dense(3, "softmax")])
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        return model

    model, reference = pair(two, model_fn)
    for each in (model, reference):
        each.fit(table, pd.Series(y), batch_size=8, shuffle=False, verbose=0)
    assert_near(model.get_weights(), reference.get_weights())


# Gradient noise ----------------------------------------------------------------------------------

SPREAD = np.linspace(0.5, 2.0, 40).astype(np.float32)
FAR = 0.7


class _Distance(layers.Layer):
    """Half the squared distance of a weight from each row: its gradient is their difference."""

    def build(self, input_shape: Any) -> None:
        self.place = self.add_weight(shape=input_shape[1:], initializer="zeros", name="place")

    def call(self, x: Any) -> Any:
        return tf.reduce_sum(tf.square(self.place - x), axis=1, keepdims=True) / 2


def quadratic() -> keras.Model:
    model = keras.Sequential([keras.Input((len(SPREAD),)), _Distance()])
    # It stays where it is, so that the true gradient of all steps is the same.
    model.compile(keras.optimizers.SGD(0.0), loss=lambda y_true, y_pred: y_pred[:, 0])
    return model


@scenario("mirrored", "horovod", "multi_worker", "single", "keras_3", long=True)
def noise_scale_of_a_known_gradient(strategy, folder):
    """Rows lie around FAR with a spread of their own in each direction: S and |G|² are known."""
    rng = np.random.default_rng(0)
    # Not divisible by the parts, so these are of unequal sizes.
    x = (FAR + SPREAD * rng.normal(size=(21 * 150, len(SPREAD)))).astype(np.float32)
    own = given(strategy, accumulate_steps=3 if strategy.name == "single" else 1)
    model = own.build(quadratic)
    feed = own.dataset((x, np.zeros((len(x), 1), np.float32)), global_batch_size=21)
    history = model.fit(feed, epochs=2, verbose=0, callbacks=[tfdist.NoiseScale()]).history
    # Of these very rows.
    known = x.var(axis=0).sum() / np.square(x.mean(axis=0)).sum()
    assert history["noise_scale"] == pytest.approx([known] * 2, rel=0.05)


@scenario("mirrored", "horovod", "keras_3", long=True)
def noise_scale_changes_nothing(strategy, folder):
    own = given(strategy, accumulate_steps=2)

    def trained(*callbacks: Any) -> keras.Model:
        keras.utils.set_random_seed(0)
        model = own.build(lambda: mlp(optimizer=keras.optimizers.Adam(0.01, clipnorm=0.5)))
        feed = own.dataset(data(), global_batch_size=10)
        model.fit(feed, epochs=2, verbose=0, callbacks=list(callbacks))
        return model

    watched, plain = trained(tfdist.NoiseScale()), trained()
    for one, other in zip(watched.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def _fresh(kind: Any, config: dict[str, Any]) -> keras.Model:
    return mlp(optimizer=kind.from_config(config))


@scenario("mirrored", "horovod", "keras_3", long=True)
def a_batch_that_grows_is_one_device(strategy, folder):
    """Each epoch is one device's at its batch and its rate; a resumed fit has the same ones."""
    arrays = data(rows=90, weighted=False)
    grown = {}
    for name, optimizer in (
        ("sgd", keras.optimizers.SGD(0.05, momentum=0.9)),
        ("adam", keras.optimizers.Adam(0.01)),
    ):
        own = given(strategy)
        keras.utils.set_random_seed(0)
        make = functools.partial(_fresh, type(optimizer), optimizer.get_config())
        model, one_device = own.build(make), make()
        one_device.set_weights(model.get_weights())
        begun = model.get_weights()
        feed = own.dataset(arrays, global_batch_size=6, seed=3)
        noise = tfdist.NoiseScale(apply=True, max_batch=21)
        history = model.fit(feed, epochs=4, verbose=0, callbacks=[noise]).history
        batches = grown[name] = history["global_batch_size"]
        assert batches[0] == 6
        assert batches[1] == 12  # These labels are noise.
        assert max(batches) <= 21
        assert all(batch % strategy.num_replicas == 0 for batch in batches)
        rates = history["learning_rate"]
        if name == "adam":
            of_roots = [0.01 * math.sqrt(batch / 6) for batch in batches]
            assert rates == pytest.approx(of_roots, rel=1e-5)
        else:
            gains = [
                _gain(*each) for each in zip(history["noise_scale"][:-1], batches[1:], strict=True)
            ]
            assert rates == pytest.approx([0.05, *(0.05 * gain for gain in gains)], rel=1e-5)
            assert rates[1] != pytest.approx(0.05 * math.sqrt(2), rel=1e-3)
        for epoch, (batch, rate) in enumerate(zip(batches, rates, strict=True)):
            one_device.optimizer.learning_rate = rate
            whole = dataclasses.replace(feed, global_batch_size=batch).on_one_device()
            one_device.fit(whole.epochs(epoch, epoch + 1), verbose=0)
        for one, other in zip(model.get_weights(), one_device.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)

        again = own.build(make)
        again.set_weights(begun)
        found = []
        for epochs in (2, 4):
            noise = tfdist.NoiseScale(apply=True, max_batch=21)
            keeper = tfdist.Checkpoints(folder / f"{name}", resume=True)
            told = again.fit(feed, epochs=epochs, verbose=0, callbacks=[noise, keeper]).history
            found += told["global_batch_size"]
            if epochs == 2:
                of_two = again.get_weights()
                again = own.build(make)
        assert found == batches
        for one, other in zip(model.get_weights(), again.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)
        _less_memory(strategy, feed, folder / name, make, told["noise_scale"][-1])
        if name == "sgd":
            _broken_while_grown(strategy, feed, folder / "broken", make, begun, of_two)


def _gain(scale: float, batch: int) -> float:
    """Returns AdaScale's of a batch after one of 6 rows, by S / g."""
    return batch / 6 if math.isinf(scale) else (scale / 6 + 1) / (scale / batch + 1)


def _less_memory(strategy: Any, feed: Any, folder: Path, make: Any, scale: float) -> None:
    """Resumes with a lower ``max_batch``, or without any; then trains another model with it."""
    quick = {"verbose": 0, "check_rows": False}
    lower = tfdist.NoiseScale(apply=True, max_batch=9)
    keeper = tfdist.Checkpoints(folder, resume=True)
    with pytest.raises(CheckpointError, match=r"must be resumed with NoiseScale\(apply=True\)"):
        given(strategy).build(make).fit(feed, epochs=5, callbacks=[keeper], **quick)
    model = given(strategy).build(make)
    told = model.fit(feed, epochs=5, callbacks=[lower, keeper], **quick).history
    is_sgd = isinstance(model.optimizer, keras.optimizers.SGD)
    rate = 0.05 * _gain(scale, 8) if is_sgd else 0.01 * math.sqrt(8 / 6)
    assert told["global_batch_size"] == [8]
    assert told["learning_rate"] == pytest.approx([rate], rel=1e-4)
    assert lower.batch == 8
    if is_sgd:
        new = given(strategy).build(make)
        told = new.fit(feed, callbacks=[lower], **quick).history
        assert told["global_batch_size"] == [6]
        assert told["learning_rate"] == pytest.approx([0.05])
        # An epoch that measures nothing leaves both.
        lower.batch, lower.gain = 6, 1.0
        rate = float(tf.convert_to_tensor(new.optimizer.learning_rate))
        lower.on_epoch_begin(1)
        lower.on_epoch_end(1)
        assert (lower.batch, lower.gain) == (6, 1.0)
        assert float(tf.convert_to_tensor(new.optimizer.learning_rate)) == rate


def _broken_while_grown(
    strategy: Any, feed: Any, folder: Path, make: Any, begun: Any, unbroken: Any
) -> None:
    """Breaks the second epoch, and goes on within it to the weights of the unbroken one."""

    class Break(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if (self.epoch, batch) == (1, 4):
                raise KeyboardInterrupt

    def resumed(most: int | None, *others: Any) -> keras.Model:
        model = given(strategy).build(make)
        model.set_weights(begun)
        noise = [tfdist.NoiseScale(apply=True, max_batch=most)] if most else []
        keeper = tfdist.Checkpoints(folder, every_steps=3, resume=True)
        callbacks = [*noise, keeper, *others]
        model.fit(feed, epochs=2, verbose=0, check_rows=False, callbacks=callbacks)
        return model

    with pytest.raises(KeyboardInterrupt):
        resumed(21, Break())
    strategy.from_chief(None)
    with pytest.raises(CheckpointError, match=r"the batch had come from 6 to 12"):
        resumed(None)
    with pytest.raises(OptionError, match=r"Give max_batch=12, or resume from"):
        resumed(10)
    for one, other in zip(resumed(21).get_weights(), unbroken, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


@scenario("mirrored", long=True)
def what_cannot_have_another_batch_is_told(strategy, folder):
    def fits(x: Any, model_fn: Any = mlp, batch: int = 4, beside: Any = (), **options: Any) -> None:
        own = given(strategy, **options)
        growing = tfdist.NoiseScale(apply=True, max_batch=8)
        feed = own.dataset(x, global_batch_size=batch) if isinstance(x, tuple) else x
        own.build(model_fn).fit(feed, verbose=0, callbacks=[growing, *beside])

    def scheduled() -> keras.Model:
        return mlp(optimizer=keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 9)))

    arrays = data(weighted=False)
    with pytest.raises(DataError, match="data that can be divided into other batches"):
        fits(tf.data.Dataset.from_tensor_slices(arrays).batch(4))
    with pytest.raises(ModelError, match=r"a fixed learning rate.*a schedule"):
        fits(arrays, scheduled)
    with pytest.raises(OptionError, match="must change the rate"):
        fits(arrays, lr_scaling="sqrt")
    with pytest.raises(OptionError, match="LearningRateScheduler and NoiseScale"):
        fits(arrays, beside=[keras.callbacks.LearningRateScheduler(lambda epoch: 0.1)])
    with pytest.raises(OptionError, match="max_batch of NoiseScale must be at least"):
        fits(arrays, batch=9)
    with pytest.raises(OptionError, match="must have a max_batch"):
        tfdist.NoiseScale(apply=True)


@scenario("single", "mirrored", "keras_3")
def a_later_fit_begins_at_the_rate_of_its_batch(strategy, folder):
    own = given(strategy, accumulate_steps=2)
    keras.utils.set_random_seed(0)
    model = own.build(lambda: mlp(optimizer=keras.optimizers.Adam(0.01)))
    feed = own.dataset(data(rows=90, weighted=False), global_batch_size=6, seed=3)

    def first_rate(*callbacks: Any) -> float:
        options = {"verbose": 0, "check_rows": False, "callbacks": list(callbacks)}
        return model.fit(feed, **options).history["learning_rate"][0]

    def grown(noise: Any) -> float:
        assert noise.batch > 6
        return pytest.approx(0.01 * math.sqrt(noise.batch / 6))

    one, other = (tfdist.NoiseScale(apply=True, max_batch=12) for _ in range(2))
    assert first_rate(one) == pytest.approx(0.01)
    of_one = grown(one)
    assert first_rate(one) == of_one  # It goes on.
    assert first_rate(other) == pytest.approx(0.01)
    assert first_rate() == pytest.approx(0.01)
    of_one = grown(one)
    assert first_rate(one) == of_one
    model.optimizer.learning_rate = 0.02
    assert first_rate() == pytest.approx(0.02)


@scenario("single")
def noise_scale_ends_with_a_fit_that_fails(strategy, folder):
    def fails(epoch: int, logs: dict) -> None:
        raise RuntimeError("a fault of the user's own")

    model = given(strategy, accumulate_steps=2).build(mlp)
    failing = keras.callbacks.LambdaCallback(on_epoch_end=fails)
    with pytest.raises(RuntimeError, match="of the user's own"):
        model.fit(*data(weighted=False), verbose=0, callbacks=[tfdist.NoiseScale(), failing])
    assert binding_of(model, "this").noise is None
    assert "noise_scale" not in model.fit(*data(weighted=False), verbose=0).history


@scenario("mirrored", "single")
def noise_scale_needs_parts_of_a_gradient(strategy, folder):
    class Own(keras.Model):
        def train_step(self, data: Any) -> Any:
            return super().train_step(data)

    def of_its_own() -> keras.Model:
        x = keras.Input((5,))
        model = Own(x, layers.Dense(3, "softmax")(x))
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    one = strategy.name == "single"
    for options, model_fn, said in (
        ({}, mlp if one else of_its_own, "whole" if one else "a train_step of its own"),
        ({"shard": "optimizer"}, mlp, "whole" if one else "no replica has the whole gradient"),
    ):
        model = given(strategy, **options).build(model_fn)
        with pytest.raises(ModelError, match=rf"must see the gradients of parts.*{said}"):
            model.fit(*data(weighted=False), verbose=0, callbacks=[tfdist.NoiseScale()])


# Ranks of unlike speed ---------------------------------------------------------------------------


@scenario("horovod", "multi_worker", long=True)
def ranks_of_unlike_speed_are_one_device(strategy, folder):
    """Each epoch ends on a short batch; a rank has a third of the other's rows, or none."""
    own = given(strategy, device_speeds=[3, 1])
    feed = own.dataset(data(), global_batch_size=10)
    told = [share.numpy().tolist() for _, share in feed.begun_by(2).epochs(0, 1)]
    mine = [8, 8, 4] if strategy.topology.rank == 0 else [2, 2, 1]
    assert told == [list(pair) for pair in zip(mine, [10, 10, 5], strict=True)]
    equals_one_device(own, mlp, data(), global_batch_size=10, epochs=2)
    equals_one_device(own, mlp, data(weighted=False), global_batch_size=2, epochs=1)


@scenario("horovod", long=True)
def ranks_of_unlike_speed_with_other_options(strategy, folder):
    speeds = {"device_speeds": [1, 2.5]}
    equals_one_device(given(strategy, **speeds, shard="optimizer"), mlp, data(), epochs=2)
    equals_one_device(given(strategy, **speeds, accumulate_steps=2), mlp, data(), epochs=2)
    # Batches that fit is given as they are, and what an evaluation and predictions are.
    own = given(strategy, **speeds)
    x, y, weight = data()
    trained = []
    for model, batches in (
        (own.build(mlp), tf.data.Dataset.from_tensor_slices((x, y, weight)).batch(10)),
        (mlp(), tf.data.Dataset.from_tensor_slices((x, y, weight)).batch(10)),
    ):
        model.set_weights([np.full_like(w, 0.1) for w in model.get_weights()])
        model.fit(batches, epochs=2, verbose=0)
        results = model.evaluate(batches, verbose=0)
        trained.append([*model.get_weights(), model.predict(batches, verbose=0), results])
    for one, other in zip(*trained, strict=True):
        assert_near(one, other)


@scenario("horovod")
def speeds_that_are_measured_divide_a_batch_evenly_or_by_them(strategy, folder):
    rank = strategy.topology.rank
    assert 0 < rank_speeds._measured() < math.inf
    for measured, speeds in (([100.0, 110.0], None), ([100.0, 400.0], (100.0, 400.0))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rank_speeds, "_measured", lambda of=measured: of[rank])
            own = given(strategy, device_speeds="measure")
            assert own.connect().speeds == speeds
    feed = own.dataset(data(), global_batch_size=10)
    told = [share.numpy().tolist() for _, share in feed.begun_by(2).epochs(0, 1)]
    assert told == [[(2, 8)[rank], 10]] * 2 + [[(1, 4)[rank], 5]]
    with pytest.raises(OptionError, match="3 for 2 ranks"):
        given(strategy, device_speeds=[1, 2, 3])


@scenario("mirrored")
def speeds_of_what_has_one_process(strategy, folder):
    with pytest.raises(OptionError, match=r"must be on strategy 'horovod' or 'multi_worker'"):
        given(strategy, device_speeds=[1, 2])
    for wrong in ([1, 0], [1, -2], "fast", 3, [True, 1], [], [1, float("nan")]):
        with pytest.raises(OptionError, match="'measure', or a number above 0 for each rank"):
            tfdist.strategy("horovod", device_speeds=wrong)
