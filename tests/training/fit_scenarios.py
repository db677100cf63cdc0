"""What people do with fit, evaluate and predict; each on every strategy."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from one_device import (
    TOLERANCE,
    assert_same_results,
    each_replica_drops_its_own,
    equals_one_device,
    pair,
)
from scenarios import scenario
from tensorflow import keras

import tfdist
from tfdist.errors import DataError, LaunchError, ModelError, OptionError

layers = keras.layers


def data(rows: int = 25, features: int = 5, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, features)).astype(np.float32), rng.integers(0, 3, rows)


def mlp(**compile_options: Any) -> keras.Model:
    model = keras.Sequential(
        [keras.Input((5,)), layers.Dense(8, "tanh"), layers.Dense(3, "softmax")]
    )
    options = {
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.9),
        "loss": "sparse_categorical_crossentropy",
        "metrics": ["accuracy"],
    }
    model.compile(**(options | compile_options))
    return model


# Models ------------------------------------------------------------------------------------------


@scenario("mirrored", "horovod", long=True)
def sum_reduction(strategy, folder):
    loss = keras.losses.SparseCategoricalCrossentropy(reduction="sum")
    optimizer = keras.optimizers.SGD
    equals_one_device(strategy, lambda: mlp(loss=loss, optimizer=optimizer(0.01)), data())


@scenario("mirrored", "horovod", long=True)
def dropout_draws_other_numbers_on_each_replica(strategy, folder):
    """After set_random_seed, too, which all ranks call alike."""
    keras.utils.set_random_seed(0)
    each_replica_drops_its_own(strategy)


@scenario("mirrored", "horovod", long=True)
def records_that_are_changed_at_random(strategy, folder):
    """The numbers of a record are a function of seed, epoch and record, whoever reads it."""

    def noisy(x, y, seed):
        return x + tf.random.stateless_normal([5], seed), y

    equals_one_device(strategy, mlp, data(), epochs=3, record_fn=noisy)


@scenario(long=True)
def regularizers_count_once(strategy, folder):
    def model_fn():
        l2 = keras.regularizers.L2(0.1)
        model = keras.Sequential(
            [
                keras.Input((5,)),
                layers.Dense(8, "tanh", kernel_regularizer=l2, activity_regularizer=l2),
                layers.Dense(3, "softmax", bias_regularizer=l2),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy")
        return model

    equals_one_device(strategy, model_fn, data())


@scenario
def mask_of_an_embedding(strategy, folder):
    rng = np.random.default_rng(0)
    words = rng.integers(0, 6, (25, 7)) * (np.arange(7) < rng.integers(1, 8, (25, 1)))

    def pooled():
        model = keras.Sequential(
            [
                keras.Input((7,), dtype="int64"),
                layers.Embedding(6, 4, mask_zero=True),
                layers.GlobalAveragePooling1D(),
                layers.Dense(3, "softmax"),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "sparse_categorical_crossentropy")
        return model

    equals_one_device(strategy, pooled, (words, data()[1]))


@scenario("mirrored", "horovod", long=True)
def batches_padded_to_their_longest_record(strategy, folder):
    """Seen by a mean that counts padding, beside one that masks it; 26 records of 8 a step."""
    if strategy.topology.is_chief:
        rng = np.random.default_rng(0)
        tokens = [rng.integers(1, 9, n) for n in rng.integers(1, 30, 26)]
        labels = rng.integers(0, 2, 26)
        tfdist.records.write((tokens, labels), folder / "tokens", split="train=1", num_shards=2)
    strategy.from_chief(None)

    def model_fn():
        tokens = keras.Input((None,), dtype="int64")
        masked = layers.Embedding(9, 4, mask_zero=True)(tokens)
        unmasked = layers.Embedding(9, 4)(tokens)
        means = [layers.GlobalAveragePooling1D()(of) for of in (masked, unmasked)]
        model = keras.Model(tokens, layers.Dense(2, "softmax")(layers.Concatenate()(means)))
        model.compile(keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy", ["accuracy"])
        return model

    def shortened(tokens, label, seed):
        """Words of a record are exchanged at random, and every other record is cut."""
        drawn = tf.random.stateless_uniform(tf.shape(tokens), seed, 1, 9, tf.int64)
        tokens = tf.where(drawn > 6, drawn, tokens)
        return tokens[: tf.maximum(1, tf.size(tokens) - 9 * tf.cast(label, tf.int32))], label

    model, reference = pair(strategy, model_fn)
    for options in (
        {"pad_to": "batch", "record_fn": shortened},
        {"pad_to": 8, "bucket_by_length": True},
    ):
        feed = strategy.dataset(folder / "tokens", global_batch_size=8, **options)
        whole = feed.on_one_device().epochs(0, 2)
        assert len({x.shape[1] for x, _ in whole}) > 1
        model.fit(feed, epochs=2, verbose=0)
        reference.fit(whole, epochs=2, steps_per_epoch=4, verbose=0)
        for mine, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=TOLERANCE)
    same = feed.in_record_order().on_one_device().epochs(0, 1)
    predicted = reference.predict(same, verbose=0)
    np.testing.assert_allclose(model.predict(feed, verbose=0), predicted, atol=TOLERANCE)
    losses = reference.evaluate(same, verbose=0)
    np.testing.assert_allclose(model.evaluate(feed, verbose=0), losses, atol=TOLERANCE)

    def of_one_length():
        model = keras.Sequential([keras.Input((29,)), layers.Dense(2, "softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    with pytest.raises(DataError, match="must take any length"):
        strategy.build(of_one_length).fit(feed, verbose=0)


@scenario("mirrored", "horovod", long=True)
def mask_on_the_output(strategy, folder):
    """The loss is a mean over unmasked positions; some replicas have rows without any,
    but each batch has some."""
    rng = np.random.default_rng(0)
    # Of the last batches, which have a row, too: without a word Keras' loss is no number.
    has_words = (np.arange(25) % 3 == 0) | (np.arange(25) == 1)
    lengths = np.where(has_words, 7, 0)
    words = rng.integers(1, 6, (25, 7)) * (np.arange(7) < lengths[:, None])
    tags = rng.integers(0, 3, (25, 7))
    weights = rng.uniform(0.5, 2, 25)

    def tagger():
        model = keras.Sequential(
            [
                keras.Input((7,), dtype="int64"),
                layers.Embedding(6, 4, mask_zero=True),
                layers.SimpleRNN(4, return_sequences=True, unroll=True),
                layers.Dense(3, "softmax"),
            ]
        )
        model.compile(
            keras.optimizers.SGD(0.1),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
            weighted_metrics=["sparse_categorical_crossentropy"],
        )
        return model

    model, reference = equals_one_device(strategy, tagger, (words, tags))
    in_order = strategy.dataset((words, tags), global_batch_size=8, training=False)
    found = model.evaluate(in_order, verbose=0, return_dict=True)
    expected = reference.evaluate(words, tags, batch_size=8, verbose=0, return_dict=True)
    assert_same_results(found, expected)
    equals_one_device(strategy, tagger, (words, tags, weights))
    of_words = rng.uniform(0.5, 2, (25, 7))
    equals_one_device(strategy, tagger, (words, tags, of_words))


@scenario("mirrored", "horovod")
def sparse_gradients_and_unused_weights(strategy, folder):
    class Unused(layers.Layer):
        def build(self, shape):
            self.weight = self.add_weight("unused", (2,))

        def call(self, x):
            return x

    def model_fn():
        model = keras.Sequential(
            [
                keras.Input((7,), dtype="int64"),
                layers.Embedding(50, 4),
                Unused(),
                layers.Flatten(),
                layers.Dense(3, "softmax"),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "sparse_categorical_crossentropy")
        return model

    words = np.random.default_rng(0).integers(0, 50, (25, 7))
    equals_one_device(strategy, model_fn, (words, data()[1]))


@scenario(long=True)
def custom_scalar_loss(strategy, folder):
    """It gives a mean itself; a replica without a row in the tail must not turn it to NaN."""

    def loss(y_true, y_pred):
        one_hot = tf.one_hot(tf.cast(tf.reshape(y_true, [-1]), tf.int32), 3)
        return tf.reduce_mean(tf.square(one_hot - y_pred))

    equals_one_device(strategy, lambda: mlp(loss=loss), data())


@scenario(long=True)
def several_outputs_as_keras_takes_them(strategy, folder):
    """Labels as a list beside x; tests/conformance has datasets, losses and metrics."""

    def model_fn():
        inputs = keras.Input((5,))
        heads = [layers.Dense(3, "softmax", name="kind"), layers.Dense(1, name="size")]
        model = keras.Model(inputs, [head(inputs) for head in heads])
        model.compile("sgd", ["sparse_categorical_crossentropy", "mse"])
        return model

    x, y = data()
    size = x[:, :1] * 2
    model, reference = pair(strategy, model_fn)
    assert len(model.fit(x, [y, size], epochs=2, verbose=0).history["kind_loss"]) == 2
    found = model.evaluate(x, [y, size], verbose=0, return_dict=True)
    reference.set_weights(model.get_weights())
    expected = reference.evaluate(x, [y, size], verbose=0, return_dict=True)
    assert found == pytest.approx(expected, abs=TOLERANCE)


@scenario(long=True)
def nested_model_with_a_frozen_part(strategy, folder):
    def model_fn():
        def block(name, width):
            inputs = keras.Input((width,))
            x = layers.Dense(6)(inputs)
            return keras.Model(inputs, layers.BatchNormalization()(x), name=name)

        frozen = block("frozen", 5)
        frozen.trainable = False
        inputs = keras.Input((5,))
        x = layers.Activation("tanh")(frozen(inputs))
        x = layers.Activation("tanh")(block("trained", 6)(x))
        model = keras.Model(inputs, layers.Dense(3, "softmax")(x))
        model.compile(keras.optimizers.SGD(0.05), "sparse_categorical_crossentropy")
        return model

    equals_one_device(strategy, model_fn, data())
    model, _ = pair(strategy, model_fn)
    before = model.get_layer("frozen").get_weights()
    model.fit(*data(), verbose=0)
    for old, new in zip(before, model.get_layer("frozen").get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@scenario(long=True)
def legacy_optimizers(strategy, folder):
    for make in (
        lambda: keras.optimizers.legacy.Adam(0.01, epsilon=1e-3),
        lambda: keras.optimizers.legacy.SGD(
            keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.9)
        ),
    ):
        equals_one_device(strategy, lambda make=make: mlp(optimizer=make()), data())


@scenario("mirrored", "horovod", long=True)
def mixed_precision(strategy, folder):
    def model_fn():
        # As Keras advises: a loss of float16 would overflow by its scale on one device.
        last = layers.Dense(3, dtype="float32")
        model = keras.Sequential([keras.Input((5,)), layers.Dense(8, "tanh"), last])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
        return model

    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        # Some roundings of float16.
        model, reference = equals_one_device(strategy, model_fn, data(), epochs=3, tolerance=2e-3)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert model.optimizer.loss_scale == reference.optimizer.loss_scale


# Losses of one's own ----------------------------------------------------------------------------


class Own(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return tf.reduce_mean(tf.square(tf.one_hot(y, 3) - y_pred))


def own(kind: type[keras.Model], **options: Any) -> keras.Model:
    inputs = keras.Input((5,))
    model = kind(inputs, layers.Dense(3, "softmax")(inputs))
    model.compile(keras.optimizers.SGD(0.1), **options)
    return model


class Relative(Own):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.usual = tf.Variable(
            1.0,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.MEAN,
        )

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        loss, usual = super().compute_loss(x, y, y_pred, sample_weight), tf.identity(self.usual)
        self.usual.assign(0.5 * usual + 0.5 * loss)
        return loss / usual


@scenario("mirrored", "horovod")
def a_loss_that_keeps_a_mean(strategy, folder):
    model, reference = equals_one_device(strategy, lambda: own(Relative), data())
    np.testing.assert_allclose(model.usual.numpy(), reference.usual.numpy(), rtol=1e-5)


@scenario("mirrored", "horovod", long=True)
def a_loss_that_shows_nothing(strategy, folder):
    """As with Keras, where compute_loss updates no metric; verify compares what there is."""
    equals_one_device(strategy, lambda: own(Own, loss="mse"), data())
    report = tfdist.verify(lambda: own(Own), data(), strategy, steps=4, global_batch_size=8)
    if strategy.topology.is_chief:
        assert report.exact, str(report)
        assert report.loss_difference is None
        assert "the loss" not in str(report)


@scenario(long=True)
def loss_objects_within_compute_loss(strategy, folder):
    """Their mean is that of a replica's rows, which Keras forbids, and counts by these."""

    def with_loss(**options: Any) -> Callable[[], keras.Model]:
        loss = keras.losses.SparseCategoricalCrossentropy(**options)

        class Calling(keras.Model):
            def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
                return tf.reduce_mean(loss(y, y_pred))

        return lambda: own(Calling)

    equals_one_device(strategy, with_loss(reduction="none"), data())
    equals_one_device(strategy, with_loss(), data())


@scenario
def losses_of_ones_own_that_do_not_divide_are_refused(strategy, folder):
    summed = keras.losses.MeanSquaredError(reduction="sum")
    with pytest.raises(ModelError, match="must be a mean over rows"):
        strategy.build(lambda: own(Own, loss=summed))

    def masked():
        inputs = keras.Input((7,), dtype="int64")
        x = layers.Embedding(6, 4, mask_zero=True)(inputs)
        model = Own(inputs, layers.Dense(3)(x))
        model.compile("sgd")
        return model

    model = strategy.build(masked)
    words = np.ones((8, 7), np.int64)
    with pytest.raises(ModelError, match="must carry no mask"):
        model.fit(words, words % 3, verbose=0)


@scenario
def layers_that_mix_rows_are_named(strategy, folder):
    """Beside BatchNormalization, whose statistics some engines read from all processes."""

    class MeanOfBatch(layers.Layer):
        def call(self, x):
            return x - tf.reduce_mean(x, 0, keepdims=True)

    def model_fn():
        hidden = [layers.Dense(4), layers.BatchNormalization(), MeanOfBatch(name="mixes")]
        model = keras.Sequential([keras.Input((5,)), *hidden, layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    model = strategy.build(model_fn)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for _ in range(2):
            model.fit(strategy.dataset(data(), global_batch_size=8), epochs=1, verbose=0)
    told = said.getvalue().count("warning: layer 'mixes' looks at several rows")
    is_divided = strategy.num_replicas > 1
    assert told == int(is_divided and strategy.topology.is_chief)


@scenario("mirrored", "horovod")
def losses_that_couple_rows_are_named(strategy, folder):
    def spread(y, y_pred):
        return -tf.math.reduce_variance(y_pred, axis=0)

    model = strategy.build(lambda: mlp(loss=spread))
    for fits in range(2):  # Once a compilation.
        with contextlib.redirect_stdout(io.StringIO()) as said:
            model.fit(*data(), verbose=0)
        told = said.getvalue().count("warning: loss 'spread' is no mean over the rows")
        assert told == (1 if strategy.topology.is_chief and not fits else 0)
    report = tfdist.verify(lambda: mlp(loss=spread), data(), strategy, steps=4, global_batch_size=8)
    if strategy.topology.is_chief:
        assert not report.exact
        assert "loss 'spread' is no mean" in str(report)


@scenario("mirrored", "horovod")
def what_looks_at_rows_is_named_where_nothing_is_trained(strategy, folder):
    def centred() -> keras.Model:
        inputs = keras.Input((5,))
        outputs = layers.Lambda(lambda x: x - tf.reduce_mean(x, 0), name="centred")(inputs)
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "mse")
        return model

    x, _ = data()
    for make, loop, count in (
        (centred, lambda model: model.evaluate(x, x, verbose=0), 1),
        (centred, lambda model: model.predict(x, verbose=0), 1),
        (mlp, lambda model: model.predict(x, verbose=0), 0),
    ):
        model = strategy.build(make)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            for _ in range(2):
                loop(model)
        told = said.getvalue()
        assert told.count("warning") == count * strategy.topology.is_chief, told
        assert told.count("'centred' looks at several rows") == told.count("warning")


@scenario("mirrored", "horovod", long=True)
def metrics_that_layers_add(strategy, folder):
    """A mean over rows is right on uneven shares; a sum is named."""

    def adding(reduce: Callable) -> Callable[[], keras.Model]:
        def model_fn():
            model = mlp()
            model.add_metric(reduce(tf.square(model.output)), name="size")
            model.add_loss(0.1 * tf.reduce_mean(tf.square(model.output)))
            return model

        return model_fn

    equals_one_device(strategy, adding(tf.reduce_mean), data())
    model = strategy.build(adding(tf.reduce_sum))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        model.fit(*data(), verbose=0)
    assert said.getvalue().count("metric 'size'") == (1 if strategy.topology.is_chief else 0)


# Ways to run -------------------------------------------------------------------------------------


@scenario("single", "mirrored", "horovod", long=True)
def arrays_are_validated_in_the_batches_of_the_fit(strategy, folder):
    """A loss that depends on which rows meet is Keras' own then."""

    class Spread(keras.losses.Loss):
        def call(self, y, y_pred):
            return tf.math.reduce_std(y_pred, 0)[None, 0] + 0 * tf.reduce_sum(y_pred, 1)

    def model_fn() -> keras.Model:
        return mlp(loss=Spread(), metrics=None, optimizer=keras.optimizers.SGD(0.0))

    model, reference = pair(strategy, model_fn)
    x, y = data(24)
    given = {"batch_size": 8, "validation_data": (x, y), "verbose": 0, "shuffle": False}
    found, expected = model.fit(x, y, **given), reference.fit(x, y, **given)
    if strategy.num_replicas == 1:
        assert found.history["val_loss"] == pytest.approx(expected.history["val_loss"], abs=1e-6)
    batches = []
    watch = keras.callbacks.LambdaCallback()
    watch.on_test_batch_end = lambda batch, logs=None: batches.append(batch)
    model.fit(x, y, **given, callbacks=[watch])
    assert batches == [0, 1, 2]


@scenario("single", "mirrored", "horovod", long=True)
def several_steps_per_execution(strategy, folder):
    equals_one_device(strategy, lambda: mlp(steps_per_execution=3), data(57))


@scenario
def eager_steps(strategy, folder):
    equals_one_device(strategy, lambda: mlp(run_eagerly=True), data(17), epochs=1)


@scenario("single", "mirrored", "horovod", long=True)
def a_step_is_traced_once(strategy, folder):
    traced = []

    class Counted(layers.Layer):
        def call(self, x, training=None):
            # A layer of one's own is also tried on a few rows, before it is traced.
            if training is True and not tf.executing_eagerly():
                traced.append(self)
            return x

    def model_fn():
        model = keras.Sequential([keras.Input((5,)), Counted(), layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
        return model

    model = strategy.build(model_fn)
    model.fit(strategy.dataset(data(), global_batch_size=8), epochs=2, verbose=0)
    assert len(traced) == strategy.num_replicas // strategy.topology.world_size


@scenario("single", "mirrored", long=True)
def compiled_by_xla(strategy, folder):
    if strategy.num_replicas == 1:
        equals_one_device(strategy, lambda: mlp(jit_compile=True), data())
        return
    with pytest.raises(ModelError, match="jit_compile"):
        strategy.build(lambda: mlp(jit_compile=True))


@scenario("single", "mirrored", "horovod", long=True)
def unbatched_dataset(strategy, folder):
    x, y = data()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).filter(lambda x, y: y >= 0)
    model, reference = pair(strategy, mlp)
    from_dataset = strategy.dataset(dataset, global_batch_size=8, training=False)
    found = model.evaluate(from_dataset, verbose=0, return_dict=True)
    expected = reference.evaluate(x, y, verbose=0, return_dict=True)
    assert found == pytest.approx(expected, abs=TOLERANCE)
    equals_one_device(strategy, mlp, dataset)


class InBatches(keras.utils.Sequence):
    """The records of ``data`` in batches of 6, the last of which is smaller."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        return tuple(part[number * 6 : number * 6 + 6] for part in data())


@scenario("single", "mirrored", "horovod", long=True)
def batches_as_keras_takes_them(strategy, folder):
    x, y = data()
    records = tf.data.Dataset.from_tensor_slices((x, y))

    def generate():
        yield from (InBatches()[number] for number in range(5))

    model, reference = pair(strategy, mlp)
    expected = reference.evaluate(x, y, verbose=0)
    predictions = reference.predict(x, verbose=0)
    for source in (records.batch(6), records.shuffle(25).batch(6).prefetch(1), generate):
        feed = strategy.dataset(source, global_batch_size=8, training=False)
        assert feed.num_records == 25
        assert model.evaluate(feed, verbose=0) == pytest.approx(expected, abs=TOLERANCE)
        predicted = model.predict(feed, verbose=0)
        np.testing.assert_allclose(predicted, predictions, atol=TOLERANCE)
    with pytest.raises(DataError, match=r"batched=True or batched=False"):
        strategy.dataset(tf.data.Dataset.from_tensors((x, y)), global_batch_size=8)
    equals_one_device(strategy, mlp, InBatches())


@scenario("mirrored")
def batches_that_cannot_be_divided_are_told(strategy, folder):
    model = strategy.build(mlp)
    batches = {"__module__": "keras", "num_batches": None, "__getitem__": InBatches.__getitem__}
    endless = type("PyDataset", (), batches)()
    rows = tf.data.Dataset.from_tensor_slices(data())
    unequal = rows.map(lambda x, y: (x[: tf.random.uniform([], 1, 5, tf.int32)], y)).ragged_batch(6)
    for source, steps, message in (
        (endless, None, "a number of batches"),
        (unequal, 2, "must give dense"),
    ):
        with pytest.raises(DataError, match=message):
            model.fit(source, steps_per_epoch=steps, verbose=0)


@scenario("mirrored", "horovod", ranks=True)
def ranks_that_read_other_records_are_told(strategy, folder):
    rank = strategy.topology.rank
    x, y = data(seed=rank)
    model, _ = pair(strategy, mlp)
    for source in ((x, y), tf.data.Dataset.from_tensor_slices((x, y)).batch(6)):
        feed = strategy.dataset(source, global_batch_size=8)
        if strategy.topology.world_size == 1:
            model.fit(feed, verbose=0)
            continue
        with pytest.raises(DataError, match=r"other records.* on rank 1 than on rank 0"):
            model.fit(feed, verbose=0)


@scenario("mirrored", "horovod")
def fewer_records_than_replicas(strategy, folder):
    model, reference = pair(strategy, mlp)
    x, y = data()
    one = strategy.dataset((x[:1], y[:1]), global_batch_size=8, training=False)
    history = model.fit(x, y, batch_size=8, epochs=2, validation_data=one, verbose=0).history
    reference.set_weights(model.get_weights())
    expected = reference.evaluate(x[:1], y[:1], verbose=0)
    assert [history["val_loss"][-1], history["val_accuracy"][-1]] == pytest.approx(
        expected, abs=TOLERANCE
    )
    assert model.predict(one, verbose=0).shape == (1, 3)


@scenario("single", "mirrored", "horovod")
def arrays_as_keras_takes_them(strategy, folder):
    x, y = data(40)
    model, reference = pair(strategy, mlp)
    found = model.fit(x, y, 8, 3, verbose=0, shuffle=False, validation_split=0.25).history
    expected = reference.fit(x, y, 8, 3, verbose=0, shuffle=False, validation_split=0.25).history
    assert list(expected) == [name for name in found if name != "learning_rate"]
    for name, values in expected.items():
        if strategy.topology.world_size == 1:  # Ranks read ranges: other rows share a batch.
            np.testing.assert_allclose(found[name], values, atol=TOLERANCE, err_msg=name)
        assert len(found[name]) == 3
    own = {"validation_split": 0.25, "validation_data": (x[:7], y[:7])}  # Keras takes the data.
    model.fit(x, y, 8, verbose=0, shuffle=False, **own)
    reference.fit(x, y, 8, verbose=0, shuffle=False, **own)
    assert int(model.optimizer.iterations) == int(reference.optimizer.iterations)
    reference.set_weights(model.get_weights())
    assert model.predict(x, 8, verbose=0).shape == (40, 3)
    expected = reference.evaluate(x, y, 8, 0, np.arange(40))
    assert model.evaluate(x, y, 8, 0, np.arange(40)) == pytest.approx(expected, abs=TOLERANCE)


class Sliding(keras.utils.Sequence):
    """Batches of 8 rows, which another epoch gives otherwise."""

    def __init__(self):
        super().__init__()
        self.x, self.y = data()

    def __len__(self):
        return 4

    def __getitem__(self, number):
        rows = slice(8 * number, 8 * number + 8)
        return self.x[rows], self.y[rows]

    def on_epoch_end(self):
        self.x += 0.1  # In the place of the rows that were given.


def endless_batches():
    x, y = data()
    while True:
        for first in range(0, 25, 8):
            yield x[first : first + 8], y[first : first + 8]


def records_in_order():
    return tf.data.Dataset.from_tensor_slices(data())


def shuffled_batches():
    return records_in_order().shuffle(25, seed=3).batch(8)


def noisy_batches():
    """In each pass another order, and the same noise: that of new kernels."""
    return shuffled_batches().map(lambda x, y: (x + tf.random.normal(tf.shape(x), seed=1), y))


# What Keras is given, and the options beside it.
GIVEN = {
    "shuffled": (shuffled_batches, {"validation_data": Sliding}),
    "noisy": (noisy_batches, {"validation_data": noisy_batches}),
    "filtered": (lambda: shuffled_batches().unbatch().filter(lambda x, y: y < 2).batch(4), {}),
    "repeated": (lambda: shuffled_batches().repeat(), {"steps_per_epoch": 3}),
    "longer": (lambda: records_in_order().batch(3), {"steps_per_epoch": 4}),
    "Sequence": (Sliding, {"validation_data": shuffled_batches, "validation_steps": 2}),
    "generator": (
        endless_batches,
        {"steps_per_epoch": 3, "class_weight": {0: 2.0, 1: 1.0, 2: 1.0}},
    ),
}


@scenario("mirrored", "horovod", long=True)
def batches_are_taken_as_keras_takes_them(strategy, folder):
    model, reference = pair(strategy, mlp)
    for name, (make, options) in GIVEN.items():
        histories = []
        for each in (model, reference):
            keras.utils.set_random_seed(7)
            made = {key: value() if callable(value) else value for key, value in options.items()}
            histories.append(each.fit(make(), epochs=2, verbose=0, **made).history)
        found, expected = histories
        for key in expected:
            np.testing.assert_allclose(found[key], expected[key], atol=1e-6, err_msg=name)
        for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-6, err_msg=name)
    x, y = data()
    np.testing.assert_allclose(
        model.predict(Sliding(), verbose=0), reference.predict(x, verbose=0), atol=1e-6
    )
    expected = reference.evaluate(x[:24], y[:24], verbose=0)
    assert model.evaluate(endless_batches(), steps=3, verbose=0) == pytest.approx(expected)


@scenario("mirrored", "horovod", ranks=True)
def what_can_be_read_once_is_read_once(strategy, folder):
    model, reference = pair(strategy, mlp)
    x, y = data()
    spec = tf.TensorSpec((None, 5)), tf.TensorSpec((None,), tf.int64)

    def read(rows=25):
        return iter([(x[n : n + 8], y[n : n + 8]) for n in range(0, rows, 8)])

    def once(rows=25):
        batches = read(rows)
        return tf.data.Dataset.from_generator(lambda: batches, output_signature=spec)

    refused = pytest.raises(DataError, match="must give as many batches in each pass")
    alone = contextlib.nullcontext() if strategy.topology.world_size == 1 else refused
    with alone:
        expected = reference.evaluate(x, y, batch_size=8, verbose=0)
        assert model.evaluate(once(), verbose=0) == pytest.approx(expected)
    with alone:
        expected = reference.predict(x, verbose=0)
        np.testing.assert_allclose(model.predict(once(), verbose=0), expected, atol=1e-6)
    with refused:  # Its steps are told to callbacks, checkpoints and schedules.
        model.fit(once(), verbose=0)
    longer = itertools.count(16, 8)
    with refused:
        made = tf.data.Dataset.from_generator(lambda: read(next(longer)), output_signature=spec)
        model.fit(made, verbose=0)
    with pytest.raises(DataError, match="at least one batch"):
        model.evaluate(once(0), verbose=0)


@scenario("mirrored", "horovod", long=True)
def each_validation_goes_on_with_a_generator(strategy, folder):
    model, reference = pair(strategy, mlp)
    taken = []

    def counted():
        for batch in endless_batches():
            taken.append(batch)
            yield batch

    given = {"validation_data": counted(), "validation_steps": 3}
    found = model.fit(Sliding(), epochs=2, verbose=0, **given).history
    # Keras would have lost some that it had read ahead, others from run to run.
    assert len(taken) == 6
    reference.set_weights(model.get_weights())
    expected = reference.evaluate(iter(taken[3:]), steps=3, verbose=0)
    assert [found["val_loss"][-1], found["val_accuracy"][-1]] == pytest.approx(expected)


class Broken(keras.callbacks.Callback):
    """Ends a fit in the middle of its second epoch."""

    def on_train_batch_begin(self, batch, logs=None):
        if self.model.optimizer.iterations == 4:
            raise KeyboardInterrupt


@scenario("single", "mirrored", "horovod", long=True)
def given_batches_are_resumed(strategy, folder):
    weights = {}
    for name, more in (("unbroken", []), ("broken", [Broken()]), ("broken", [])):
        keras.utils.set_random_seed(1)
        model = strategy.build(mlp)
        keep = tfdist.Checkpoints(folder / name, resume=True, every_steps=1)
        with contextlib.suppress(KeyboardInterrupt):
            batches = shuffled_batches().repeat()
            model.fit(batches, epochs=3, steps_per_epoch=3, verbose=0, callbacks=[keep, *more])
        weights[name] = model.get_weights()
    for ours, theirs in zip(weights["broken"], weights["unbroken"], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@scenario("mirrored", "horovod", ranks=True)
def ranks_that_read_other_batches_are_told(strategy, folder):
    if strategy.topology.world_size == 1:
        return
    model, _ = pair(strategy, mlp)
    own = records_in_order().shuffle(25, seed=strategy.topology.rank).batch(8)
    with pytest.raises(DataError, match="must read the same batches"):
        model.fit(own, verbose=0)
    random.seed(strategy.topology.rank)  # The chief's order counts.
    model.fit(Sliding(), epochs=2, verbose=0)
    fewer = records_in_order().batch(8 + strategy.topology.rank)
    with pytest.raises(DataError, match="must be given the same batches"):
        model.fit(fewer, verbose=0)


class Counting(keras.Model):
    """Tells a tracker of its own one number a batch, and shows what no metric counts."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.tracker = keras.metrics.Mean(name="largest")

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> dict[str, Any]:
        self.tracker.update_state(tf.reduce_mean(tf.reduce_max(y_pred, -1)))
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        own = {"mean": tf.reduce_mean(y_pred[:, 0]), "highest": tf.reduce_max(y_pred)}
        return {**results, **own, "largest": self.tracker.result()}


@scenario("mirrored", "horovod", long=True)
def numbers_of_compute_metrics(strategy, folder):
    def model_fn() -> keras.Model:
        inputs = keras.Input((5,))
        model = Counting(inputs, layers.Dense(3, "softmax")(inputs))
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        return model

    equals_one_device(strategy, model_fn, data())


class Late(keras.Model):
    """Knows the shapes of its weights when it is called."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = layers.BatchNormalization(), layers.Dense(3, "softmax")

    def call(self, inputs, training=None):
        return self.out(self.norm(inputs, training=training))


def compiled(model: keras.Model) -> keras.Model:
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", ["accuracy"])
    return model


def late() -> keras.Model:
    return compiled(Late())


def late_sequential() -> keras.Model:
    return compiled(keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(3, "softmax")]))


@scenario("mirrored")
def a_sequential_without_an_input_is_built_by_arrays(strategy, folder):
    x, y = data()
    model, reference = strategy.build(late_sequential), late_sequential()
    for each in (model, reference):
        keras.utils.set_random_seed(3)
        each.fit(x, y, epochs=2, batch_size=8, shuffle=False, verbose=0)
    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)


@scenario("single", "mirrored", "horovod", long=True)
def models_that_data_builds(strategy, folder):
    feed = strategy.dataset(data(), global_batch_size=8, seed=2)
    model, reference = strategy.build(late), late()
    keras.utils.set_random_seed(3 + strategy.topology.rank)  # The chief's weights count.
    found = model.fit(feed, epochs=2, verbose=0).history
    keras.utils.set_random_seed(3)
    batches = feed.on_one_device().epochs(0, 2)
    expected = reference.fit(batches, epochs=2, steps_per_epoch=len(feed), verbose=0).history
    np.testing.assert_allclose(found["accuracy"], expected["accuracy"], atol=TOLERANCE)
    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)
    weights = []
    for epochs in (1, 2, 2):  # The last one finds nothing left to do.
        keep = tfdist.Checkpoints(folder / "late", resume=True)
        model = strategy.build(late_sequential)
        batches = iter([data()] * 5)
        model.fit(batches, epochs=epochs, steps_per_epoch=2, verbose=0, callbacks=[keep])
        weights.append(model.get_weights())
    for ours, theirs in zip(*weights[1:], strict=True):
        np.testing.assert_array_equal(ours, theirs)


@scenario("single", "mirrored")
def a_model_that_fails_in_its_call_stays_to_be_built(strategy, folder):
    class Failing(Late):
        def call(self, inputs):
            raise ValueError("mine")

    model = strategy.build(lambda: compiled(Failing()))
    for _ in range(2):  # Keras' own loop would not be reached.
        with pytest.raises(ValueError, match="mine"):
            model.fit(strategy.dataset(data(), global_batch_size=8))


@scenario("mirrored")
def weights_from_elsewhere_are_refused(strategy, folder):
    model = strategy.build(lambda: compiled(Late()))
    model(data()[0])
    with pytest.raises(ModelError, match=r"scope of its strategy.*Call it in model_fn"):
        model.fit(strategy.dataset(data(), global_batch_size=8))


@scenario(long=True)
def several_inputs_as_a_list(strategy, folder):
    def model_fn():
        inputs = [keras.Input((5,)), keras.Input((5,))]
        model = keras.Model(inputs, layers.Dense(3, "softmax")(layers.Add()(inputs)))
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    x, y = data()
    model, reference = pair(strategy, model_fn)
    expected = reference.predict([x, -x], verbose=0)
    np.testing.assert_allclose(model.predict([x, -x], verbose=0), expected, atol=TOLERANCE)
    assert len(model.fit([x, x], y, epochs=2, verbose=0).history["loss"]) == 2


@scenario("single", "mirrored", "horovod", long=True)
def no_epochs_and_more_fits(strategy, folder):
    x, y = data()
    model, reference = pair(strategy, mlp)
    feed = strategy.dataset((x, y), global_batch_size=8)
    assert model.fit(feed, epochs=0, verbose=0).history == {}
    for _ in range(2):
        history = model.fit(feed, epochs=2, verbose=0)
        assert history is model.history
        assert history.epoch == [0, 1]
        batches = feed.on_one_device().epochs(0, 2)
        reference.fit(batches, epochs=2, steps_per_epoch=len(feed), verbose=0)
    assert model.fit(feed, initial_epoch=3, epochs=5, verbose=0).epoch == [3, 4]
    batches = feed.on_one_device().epochs(3, 5)
    reference.fit(batches, epochs=2, steps_per_epoch=len(feed), verbose=0)
    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)


@scenario("single", "mirrored", long=True)
def compiled_anew_for_fine_tuning(strategy, folder):
    x, y = data()
    model, reference = pair(strategy, mlp)
    feed = strategy.dataset((x, y), global_batch_size=8)
    for trainable in (False, True):
        for each in (model, reference):
            each.layers[0].trainable = trainable
            each.compile(
                "adam", keras.losses.SparseCategoricalCrossentropy(reduction="sum"), ["accuracy"]
            )
        model.fit(feed, verbose=0)
        batches = feed.on_one_device().epochs(0, 1)
        reference.fit(batches, steps_per_epoch=len(feed), verbose=0)
    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


# Callbacks ---------------------------------------------------------------------------------------


@scenario("single", "mirrored", "horovod", long=True)
def files_are_written_once(strategy, folder):
    x, y = data()
    model, _ = pair(strategy, mlp)
    rank = strategy.topology.rank
    callbacks = [
        keras.callbacks.CSVLogger(folder / f"log-{rank}.csv"),
        keras.callbacks.ModelCheckpoint(str(folder / f"best-{rank}-{{epoch}}.keras")),
        keras.callbacks.TensorBoard(folder / f"board-{rank}"),
    ]
    model.fit(x, y, epochs=2, validation_data=(x, y), callbacks=callbacks, verbose=0)
    strategy.from_chief(None)
    written = {path.name for path in folder.iterdir()}
    assert written == {"log-0.csv", "best-0-1.keras", "best-0-2.keras", "board-0"}
    with open(folder / "log-0.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2
    assert {"loss", "val_loss"} <= set(rows[0])
    loaded = keras.models.load_model(folder / "best-0-2.keras")
    assert loaded.evaluate(x, y, verbose=0)[0] == pytest.approx(float(rows[1]["val_loss"]), 1e-4)


@scenario("mirrored")
def a_model_object_goes_on_where_it_is(strategy, folder):
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=1.0, epsilon=1e-3)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    one = mlp(optimizer=optimizer)
    whole = {"batch_size": 25, "verbose": 0}
    one.fit(*data(), epochs=2, **whole)
    model = strategy.build(one)
    one.fit(*data(), **whole)
    model.fit(strategy.dataset(data(), global_batch_size=25), verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 3
    for found, expected in zip(model.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)


@scenario("single", "mirrored", "horovod")
def callbacks_that_decide(strategy, folder):
    x, y = data()
    model, _ = pair(strategy, mlp)
    feed = strategy.dataset((x, y), global_batch_size=8)
    stop = keras.callbacks.EarlyStopping("loss", min_delta=10.0, patience=1)
    history = model.fit(feed, epochs=9, callbacks=stop, verbose=0)
    assert history.epoch == [0, 1]
    plan = keras.callbacks.LearningRateScheduler(lambda epoch: 0.5 / (epoch + 1))
    plan = keras.callbacks.CallbackList([plan])  # As a loop of one's own has them.
    rates = model.fit(feed, epochs=2, callbacks=plan, verbose=0).history["learning_rate"]
    np.testing.assert_allclose(rates, [0.5, 0.25])
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.1, patience=1, min_delta=10.0)
    rates = model.fit(feed, epochs=3, callbacks=[plateau], verbose=0).history["learning_rate"]
    np.testing.assert_allclose(rates, [0.25, 0.25, 0.025], rtol=1e-5)


@scenario("mirrored", "horovod", ranks=True)
def a_stop_within_an_epoch_hangs_nobody(strategy, folder):
    class StopHere(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 0 and strategy.topology.is_chief:
                self.model.stop_training = True

    model, _ = pair(strategy, mlp)
    feed = strategy.dataset(data(), global_batch_size=8)
    assert model.fit(feed, epochs=5, callbacks=[StopHere()], verbose=0).epoch == [0]
    x, y = data()
    x[3] = np.nan
    feed = strategy.dataset((x, y), global_batch_size=8, training=False)
    stop = keras.callbacks.TerminateOnNaN()
    assert model.fit(feed, epochs=5, callbacks=[stop], verbose=0).epoch == [0]


@scenario("single", "mirrored", "horovod", long=True)
def checkpoints_with_arrays(strategy, folder):
    x, y = data()
    model, _ = pair(strategy, mlp)
    model.optimizer.learning_rate = 0.003
    model.fit(x, y, epochs=2, callbacks=[tfdist.Checkpoints(folder)], verbose=0)
    model, _ = pair(strategy, mlp)
    go_on = tfdist.Checkpoints(folder, resume=True)
    assert model.fit(x, y, epochs=3, callbacks=[go_on], verbose=0).epoch == [2]
    # On all ranks, though the chief alone has read it.
    assert float(model.optimizer.learning_rate.numpy()) == pytest.approx(0.003)
    go_on = tfdist.Checkpoints(folder, resume=True)
    assert model.fit(x, y, epochs=3, callbacks=[go_on], verbose=0).history == {}


# Files -------------------------------------------------------------------------------------------


@scenario("single", "mirrored", "horovod", long=True)
def saved_models_load(strategy, folder):
    def model_fn():
        model = keras.Sequential(
            [
                keras.Input((5,)),
                layers.Dense(8, "tanh"),
                layers.BatchNormalization(),
                layers.Dense(3, "softmax"),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    x, y = data()
    model, _ = pair(strategy, model_fn)
    model.fit(x, y, epochs=2, verbose=0)
    expected = model.predict(x, verbose=0)
    for name in ("model.keras", "model.h5", "saved_model"):
        for _ in range(2):  # The second time it replaces.
            strategy.save(model, folder / name)
        loaded = keras.models.load_model(folder / name)
        np.testing.assert_allclose(loaded.predict(x, verbose=0), expected, atol=1e-6)
        loaded.fit(x, y, verbose=0)
        strategy.from_chief(None)  # No rank replaces what another still reads.
    with pytest.raises((OptionError, LaunchError), match="folder"):
        strategy.save(model, folder / "missing" / "model.keras")
    assert {path.name for path in folder.iterdir()} == {"model.keras", "model.h5", "saved_model"}
    model.fit(x, y, verbose=0)


# Refusals ----------------------------------------------------------------------------------------


@scenario("single", "mirrored", "horovod")
def refusals_say_what_to_do(strategy, folder):
    x, y = data()
    model, _ = pair(strategy, mlp)
    feed = strategy.dataset((x, y), global_batch_size=8)
    batched = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    with pytest.raises(OptionError, match="batch_size, shuffle"):
        model.fit(feed, batch_size=4, shuffle=False)
    with pytest.raises(OptionError, match="steps_per_epoch"):
        model.fit(feed, steps_per_epoch=3)
    with pytest.raises(DataError, match=r"strategy\.dataset"):
        model.fit(feed, validation_data="data/test")
    with pytest.raises(OptionError, match="what batches hold"):
        model.fit(feed, validation_data=batched, validation_batch_size=3)
    with pytest.raises(OptionError, match="Checkpoints"):
        model.fit(feed, callbacks=[keras.callbacks.BackupAndRestore(folder / "backup")])
    with pytest.raises(DataError, match="one label a record"):
        model.fit(strategy.dataset((x, {"a": y}), global_batch_size=8), class_weight={0: 2.0})
    for size in (0, True):
        with pytest.raises(OptionError, match=r"at least 1.* Choose 1 or more"):
            strategy.dataset((x, y), global_batch_size=size)
    with pytest.raises(ModelError, match="compiled"):
        strategy.build(lambda: keras.Sequential([keras.Input((5,)), layers.Dense(1)]))
    never_called = keras.Model()
    never_called.compile("sgd", "mse")
    with pytest.raises(ModelError, match="input shape"):
        strategy.build(lambda: never_called)
    with pytest.raises(ModelError, match="must return"):
        strategy.build(lambda: None)
    with pytest.raises(ModelError, match="a function that returns it"):
        strategy.build("model")
    if strategy.num_replicas == 1:
        model.fit(batched, verbose=0)
        return
    for method in (model.fit, model.evaluate, model.predict):
        with pytest.raises(DataError, match=r"strategy\.dataset"):
            method("data/test")
        with pytest.raises(DataError, match="must come with the number of steps"):
            method(batched.repeat())
        with pytest.raises(DataError, match="must come with the number of steps"):
            method(iter([(x, y)]))
    with pytest.raises(DataError, match="must last for all steps"):
        model.fit(batched, steps_per_epoch=3, epochs=2)
    short = batched.take(2).filter(lambda *_: True)  # Of no known length.
    with pytest.raises(DataError, match=r"for all steps, or come with \.repeat\(\)"):
        model.fit(short, steps_per_epoch=3, epochs=1)
    with pytest.raises(OptionError, match="what batches hold"):
        model.fit(batched, batch_size=8)
    with pytest.raises(OptionError, match=r"found y, sample_weight beside a \w+Dataset"):
        model.fit(batched, y, sample_weight=np.zeros(1))
    of_any_rank = tf.data.Dataset.from_generator(lambda: [(x, y)], (tf.float32, tf.int64))
    for steps in (None, 1):
        with pytest.raises(DataError, match=r"known numbers of dimensions.*output_signature"):
            model.fit(of_any_rank, steps_per_epoch=steps)
    ragged = tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1.0], [1.0, 2.0]] * 8))
    with pytest.raises(DataError, match=r"[Rr]agged"):
        model.fit(ragged.batch(8).filter(lambda _: True))
    with pytest.raises(DataError, match="first dimension of rows"):
        model.fit(batched.unbatch())
    with pytest.raises(OptionError, match="steps_per_epoch must be"):
        model.fit(batched, steps_per_epoch=0)
    some = batched.filter(lambda x, y: True).repeat(1)  # Of a length that nobody knows.
    with pytest.raises(DataError, match="batches must last"):
        model.fit(some, steps_per_epoch=3, epochs=2, verbose=0)
    with pytest.raises(OptionError, match="at least the number of replicas"):
        strategy.dataset((x, y), global_batch_size=1)
    with pytest.raises(ModelError, match="reduction"):
        strategy.build(lambda: mlp(loss=keras.losses.MeanSquaredError(reduction="none")))
    with pytest.raises(ModelError, match="all be sums or all be means"):
        strategy.build(_mixed_reductions)
    with pytest.raises(ModelError, match="found the optimizer Nadam"):
        strategy.build(lambda: mlp(optimizer="nadam"))
    with pytest.raises(ModelError, match="found the optimizer Nadam"):
        strategy.build(mlp).compile("nadam", "mse")
    alone = tfdist.strategy("single")
    with pytest.raises(DataError, match="the strategy that built the model"):
        model.fit(alone.dataset((x, y), global_batch_size=8))


def _mixed_reductions() -> keras.Model:
    inputs = keras.Input((5,))
    model = keras.Model(inputs, [layers.Dense(1)(inputs), layers.Dense(1)(inputs)])
    losses = [keras.losses.MeanSquaredError(reduction=kind) for kind in ("sum", "auto")]
    model.compile("sgd", losses)
    return model


@scenario("single", "mirrored")
def a_compiled_model_is_taken_as_it_is(strategy, folder):
    keras.utils.set_random_seed(4)
    given = mlp()
    model = strategy.build(given)
    for ours, theirs in zip(model.get_weights(), given.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert model.optimizer.momentum == 0.9
    assert len(model.fit(*data(), epochs=2, verbose=0).history["accuracy"]) == 2


@scenario("mirrored", "horovod")
def labels_of_a_class_that_the_loss_leaves_out(strategy, folder):
    """Which is a mean over the others; some replicas have none of them."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(45, 6)).astype(np.float32)
    y = rng.integers(0, 3, 45)
    y[::3] = y[3:9] = -1
    weights = rng.uniform(0.3, 2, 45).astype(np.float32)
    leaves_out = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)

    def model_fn():
        inputs = keras.Input((6,))
        hidden = layers.Dense(8, "tanh")(inputs)
        outputs = {"b": layers.Dense(3, name="b")(hidden), "a": layers.Dense(1, name="a")(hidden)}
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.1), {"a": "mse", "b": leaves_out})
        return model

    labels = {"a": x[:, :1], "b": y}
    model, reference = equals_one_device(strategy, model_fn, (x, labels))
    in_order = strategy.dataset((x, labels), global_batch_size=8, training=False)
    found = model.evaluate(in_order, verbose=0, return_dict=True)
    expected = reference.evaluate(x, labels, batch_size=8, verbose=0, return_dict=True)
    assert_same_results(found, expected)
    equals_one_device(strategy, model_fn, (x, labels, weights))
    of_first = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)

    def without_the_first():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1), of_first)
        return model

    columns = np.where(y < 0, 1, y)[:, None]
    model, _ = equals_one_device(strategy, without_the_first, (x, columns))
    before = model.get_weights()
    nothing = strategy.dataset((x[:8], np.zeros((8, 1), int)), global_batch_size=8)
    assert model.fit(nothing, verbose=0).history["loss"] == [0.0]
    np.testing.assert_array_equal(before[0], model.get_weights()[0])


@scenario("single", "mirrored")
def weights_of_a_trained_model_are_read_from_a_file(strategy, folder):
    """As after a ModelCheckpoint: metrics, which have sums by then, are in that file, too."""
    model, path = strategy.build(mlp), folder / "best.weights.h5"
    model.fit(*data(), verbose=0, check_rows=False)
    model.save_weights(path)
    expected = model.get_weights()
    model.fit(*data(), verbose=0, check_rows=False)
    model.load_weights(path)
    for found, value in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(found, value, atol=TOLERANCE)
