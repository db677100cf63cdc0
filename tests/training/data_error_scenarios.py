"""What people write that the replicas must share exactly, or hear of; each on every strategy."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from one_device import TOLERANCE, assert_same_weights, pair
from scenarios import scenario
from tensorflow import keras

import tfdist
from tfdist.errors import DataError, ModelError

layers = keras.layers
_SENTENCES = ["a b c", "d e", "a", "f g h a", "b b", "c d e f", "h", "a h"]


def data(rows: int = 25) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 5)).astype(np.float32), rng.integers(0, 3, rows)


def sentences() -> tuple[np.ndarray, np.ndarray]:
    return np.array([_SENTENCES[n % 8] for n in range(25)])[:, None], data()[1]


def mlp() -> keras.Model:
    model = keras.Sequential(
        [keras.Input((5,)), layers.Dense(8, "tanh"), layers.Dense(3, "softmax")]
    )
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", ["accuracy"])
    return model


def reader(
    words: Callable[[], np.ndarray] = lambda: sentences()[0],
    mode: str = "int",
    length: int | None = 4,
) -> keras.Model:
    """A model that has learned its vocabulary before the training."""
    inputs = keras.Input((1,), dtype="string")
    split = layers.TextVectorization(
        output_mode=mode, output_sequence_length=length if mode == "int" else None
    )
    split.adapt(words())
    hidden = split(inputs)
    if mode == "int":
        hidden = layers.GlobalAveragePooling1D()(layers.Embedding(30, 4)(hidden))
    model = keras.Model(inputs, layers.Dense(3, "softmax")(layers.Dense(4)(hidden)))
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    return model


@contextlib.contextmanager
def heard(strategy: Any, *words: str) -> Any:
    """Encloses what the chief, and nobody else, warns of with these words, once."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        yield
    lines = [line for line in said.getvalue().splitlines() if "tfdist: warning" in line]
    assert len(lines) == bool(words and strategy.topology.is_chief), lines
    assert all(word in lines[0] for word in words if lines), lines


# One batch at a time -----------------------------------------------------------------------------


@scenario("single", "mirrored", "horovod", "multi_worker")
def one_batch_is_divided(strategy, folder):
    model, reference = pair(strategy, mlp)
    for rows in (9, 1, 4):  # One row leaves a replica with none.
        x, y = data(rows)
        for method in ("test_on_batch", "train_on_batch"):
            ours, theirs = getattr(model, method)(x, y), getattr(reference, method)(x, y)
            np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, err_msg=method)
        predicted = reference.predict_on_batch(x)
        np.testing.assert_allclose(model.predict_on_batch(x), predicted, atol=TOLERANCE)
    assert_same_weights(model, reference)
    model.compile("adam", "sparse_categorical_crossentropy")
    reference.compile("adam", "sparse_categorical_crossentropy")
    assert model.train_on_batch(*data(9)) == pytest.approx(reference.train_on_batch(*data(9)))


@scenario(long=True)
def one_batch_has_weights_and_goes_on_counting(strategy, folder):
    model, reference = pair(strategy, mlp)
    x, y = data(9)
    options = {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}, "sample_weight": np.arange(9.0)}
    for _ in range(2):
        ours, theirs = (
            m.train_on_batch(x, y, **options, reset_metrics=False, return_dict=True)
            for m in (model, reference)
        )
        assert list(ours) == list(theirs)
        assert ours == pytest.approx(theirs, abs=TOLERANCE)
    assert_same_weights(model, reference)


@scenario(long=True)
def one_batch_is_the_same_on_all_ranks(strategy, folder):
    model = strategy.build(mlp)
    x, y = data(8)
    if strategy.topology.world_size > 1:
        with pytest.raises(DataError, match=r"must give the same batch .* other rows on rank 1"):
            model.train_on_batch(x + strategy.topology.rank, y)
    with pytest.raises(DataError, match=r"one batch, but found what strategy\.dataset .*\.fit"):
        model.train_on_batch(strategy.dataset((x, y), global_batch_size=4))


@scenario("mirrored", "horovod", "multi_worker", long=True)
def batches_come_in_the_order_of_the_arrays(strategy, folder):
    model, reference = pair(strategy, mlp)
    x, y = data()
    for m in (model, reference):
        m.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert_same_weights(model, reference)
    feed = strategy.dataset((x, y), global_batch_size=8, training=False)
    model.fit(feed, epochs=1, verbose=0)
    reference.fit(feed.on_one_device().epochs(0, 1), verbose=0)
    assert_same_weights(model, reference)


class Broken(keras.utils.Sequence):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        if number == 3:
            raise RuntimeError("disk broken")
        return data(8)


@scenario("mirrored")
def an_error_of_a_sequence_is_told_as_its_own(strategy, folder):
    model = strategy.build(mlp)
    for loop in (model.fit, model.predict):
        with pytest.raises(tf.errors.UnknownError, match="RuntimeError: disk broken"):
            loop(Broken(), verbose=0)


# What layers have learned before the training ----------------------------------------------------


@scenario("mirrored", "horovod", "multi_worker", long=True)
def a_vocabulary_among_the_weights(strategy, folder):
    for mode in ("int", "tf_idf"):

        def model_fn(mode=mode):
            return reader(mode=mode)

        model, reference = pair(strategy, model_fn)
        feed = strategy.dataset(sentences(), global_batch_size=8)
        keep = tfdist.Checkpoints(folder / mode)
        model.fit(feed, epochs=2, verbose=0, callbacks=[keep])
        reference.fit(
            feed.on_one_device().epochs(0, 2),
            epochs=2,
            steps_per_epoch=feed.steps_per_epoch,
            verbose=0,
        )
        assert_same_weights(model, reference)
        strategy.save(model, folder / f"{mode}.keras")
        x = sentences()[0]
        loaded = keras.models.load_model(folder / f"{mode}.keras")
        np.testing.assert_allclose(
            loaded.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-6
        )
        again = strategy.build(model_fn)
        resumed = tfdist.Checkpoints(folder / mode, resume=True)
        again.fit(feed, epochs=2, verbose=0, callbacks=[resumed])
        assert_same_weights(again, model)
    report = tfdist.verify(reader, sentences(), strategy, steps=3, global_batch_size=8)
    assert report is None or report.exact, report


def columns() -> tuple[Any, np.ndarray]:
    x, y = data()
    return (sentences()[0], (np.arange(25) % 5)[:, None], x), y


def table_reader(of: int = 25) -> keras.Model:
    """A model whose layers have learned their tables and scales of the first ``of`` rows."""
    (texts, numbers, values), _ = columns()
    text = keras.Input((1,), dtype="string")
    number = keras.Input((1,), dtype="int64")
    value = keras.Input((5,))
    by_text = layers.StringLookup(output_mode="one_hot", max_tokens=9, pad_to_max_tokens=True)
    by_text.adapt(texts[:of])
    by_number = layers.IntegerLookup(max_tokens=6)
    by_number.adapt(numbers[:of])
    scale = layers.Normalization()
    scale.adapt(3 * values[:of])
    embedded = layers.Flatten()(layers.Embedding(6, 3)(by_number(number)))
    joined = layers.concatenate([by_text(text), embedded, scale(value)])
    model = keras.Model([text, number, value], layers.Dense(3, "softmax")(joined))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy")
    return model


@scenario("mirrored", "horovod", "multi_worker", long=True)
def tables_and_scales(strategy, folder):
    """Trained, kept, resumed, saved, verified."""
    x, y = columns()
    keras.utils.set_random_seed(1)  # On all ranks.
    given, reference = table_reader(), table_reader()
    reference.set_weights(given.get_weights())
    model = strategy.build(given)
    feed = strategy.dataset((x, y), global_batch_size=8)
    model.fit(feed, verbose=0, callbacks=[tfdist.Checkpoints(folder / "kept")])
    resumed = strategy.build(table_reader)
    keep = tfdist.Checkpoints(folder / "kept", resume=True)
    resumed.fit(feed, epochs=2, verbose=0, callbacks=[keep])
    batches = feed.on_one_device().epochs(0, 2)
    reference.fit(batches, epochs=2, steps_per_epoch=feed.steps_per_epoch, verbose=0)
    assert_same_weights(resumed, reference)
    in_order = tf.data.Dataset.from_tensor_slices((x,)).batch(8)
    expected = reference.predict(in_order, verbose=0)
    np.testing.assert_allclose(resumed.predict(x, verbose=0), expected, atol=TOLERANCE)
    strategy.save(resumed, folder / "model.keras")
    loaded = keras.models.load_model(folder / "model.keras")
    np.testing.assert_allclose(loaded.predict(in_order, verbose=0), expected, atol=TOLERANCE)
    again = strategy.build(lambda: keras.models.load_model(folder / "model.keras"))
    np.testing.assert_allclose(again.predict(x, verbose=0), expected, atol=TOLERANCE)
    report = tfdist.verify(table_reader, (x, y), strategy, steps=4, global_batch_size=8)
    assert report is None or report.exact, report


@scenario("mirrored", "horovod", "multi_worker", long=True)
def a_table_of_the_training_is_that_of_its_resume(strategy, folder):
    """The data has grown meanwhile: weights stand for what the table was then."""
    x, y = columns()
    feed = strategy.dataset((x, y), global_batch_size=8)
    model = strategy.build(lambda: table_reader(of=9))
    model.fit(feed, verbose=0, callbacks=[tfdist.Checkpoints(folder / "kept")])
    expected = model.predict(x, verbose=0)
    resumed = strategy.build(table_reader)
    keep = tfdist.Checkpoints(folder / "kept", resume=True)
    resumed.fit(feed, epochs=1, verbose=0, callbacks=[keep])
    np.testing.assert_allclose(resumed.predict(x, verbose=0), expected, atol=TOLERANCE)


@scenario(long=True)
def texts_padded_to_the_longest_of_a_replica_are_named(strategy, folder):
    with heard(strategy, "output_sequence_length"):
        strategy.build(lambda: reader(length=None))
    report = tfdist.verify(
        lambda: reader(length=None), sentences(), strategy, steps=3, global_batch_size=8
    )
    assert report is None or "pads texts to the longest that a replica sees" in str(report)


@scenario(ranks=True)
def ranks_with_other_vocabularies_are_refused(strategy, folder):
    rank = strategy.topology.rank
    model = strategy.build(lambda: reader(lambda: np.array(["a b c d"[: 3 + 2 * rank]])))
    feed = strategy.dataset(sentences(), global_batch_size=8)
    if strategy.topology.world_size == 1:
        model.fit(feed, verbose=0)
        return
    with pytest.raises(DataError, match=r"the same vocabulary.* 4 words on rank 0 and 5 on rank 1"):
        model.fit(feed, verbose=0)


@scenario("single", "mirrored", "horovod", long=True)
def constants_follow_what_is_restored(strategy, folder):
    """Normalization computes with constants; a rank or a later run may have made others."""

    def model_fn(seen):
        inputs = keras.Input((5,))
        scale = layers.Normalization()
        scale.adapt(seen)
        model = keras.Model(inputs, layers.Dense(3, "softmax")(scale(inputs)))
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        return model

    x, y = data()
    model, reference = pair(strategy, lambda: model_fn(x))
    feed = strategy.dataset((x, y), global_batch_size=8)
    model.fit(feed, verbose=0, callbacks=[tfdist.Checkpoints(folder / "kept")])
    later = strategy.build(lambda: model_fn(x * 3 + strategy.topology.rank))
    before = later.predict(x, verbose=0)
    resumed = tfdist.Checkpoints(folder / "kept", resume=True)
    later.fit(feed, epochs=2, verbose=0, callbacks=[resumed])
    reference.fit(
        feed.on_one_device().epochs(0, 2),
        epochs=2,
        steps_per_epoch=feed.steps_per_epoch,
        verbose=0,
    )
    assert_same_weights(later, reference)
    after, expected = later.predict(x, verbose=0), reference.predict(x, verbose=0)
    np.testing.assert_allclose(after, expected, atol=TOLERANCE)
    assert np.max(np.abs(after - before)) > 0.01


# By hand -----------------------------------------------------------------------------------------


def _step_by_hand(model: keras.Model, optimizer: Any, x: np.ndarray, y: np.ndarray) -> None:
    with tf.GradientTape() as tape:
        loss = keras.losses.SparseCategoricalCrossentropy()(y, model(x, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


@scenario("mirrored", "horovod", "multi_worker")
def a_loop_by_hand_is_heard_of(strategy, folder):
    x, y = data()
    model, reference = pair(strategy, mlp)
    with heard(strategy):
        model.fit(strategy.dataset((x, y), global_batch_size=8), verbose=0)
        model.train_on_batch(x, y)
        with model.distribute_strategy.scope():
            model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        model.fit(x, y, verbose=0)
    model.set_weights(reference.get_weights())
    with heard(strategy, "model.fit", "apply_gradients"):
        for _ in range(2):
            _step_by_hand(model, model.optimizer, x, y)
            _step_by_hand(reference, reference.optimizer, x, y)
    assert_same_weights(model, reference)  # What is meant is done.


@scenario(ranks=True)
def weights_that_part_are_heard_of_when_saved(strategy, folder):
    x, y = data()
    model = strategy.build(mlp)
    model.fit(strategy.dataset((x, y), global_batch_size=8), verbose=0)
    with heard(strategy):
        strategy.save(model, folder / "alike.keras")
    if strategy.topology.world_size == 1:
        return
    half = slice(strategy.topology.rank, None, 2)
    _step_by_hand(model, keras.optimizers.SGD(1.0), x[half], y[half])
    with heard(strategy, "on rank 1", "model.fit"):
        strategy.save(model, folder / "apart.keras")


# Refused in one line -----------------------------------------------------------------------------


@scenario("single", "mirrored", "horovod", "multi_worker")
def refusals_are_one_line(strategy, folder):
    def v1():
        model = mlp()
        model.compile(tf.compat.v1.train.AdamOptimizer(), "sparse_categorical_crossentropy")
        return model

    def stateful():
        inputs = keras.Input((4, 3), batch_size=8)
        model = keras.Model(inputs, layers.LSTM(3, stateful=True)(inputs))
        model.compile("sgd", "mse")
        return model

    def without_loss():
        model = mlp()
        model.compile("sgd")
        return model

    def of_odd_batches():
        return keras.Sequential([keras.Input((5,), batch_size=5), layers.Dense(3)])

    class CountsItself(layers.Layer):
        def __init__(self, **options):
            super().__init__(**options)
            self.seen = keras.metrics.Mean(name="seen")

        def call(self, x):
            self.seen.update_state(tf.reduce_mean(x))
            return x

    def with_updated_metric():
        counts = CountsItself(name="counts")
        return keras.Sequential([keras.Input((5,)), counts, layers.Dense(3)])

    x, y = data()
    names = np.array(["ape", "bee", "cat"])[y]
    texts = tf.data.Dataset.from_tensor_slices((x, names)).batch(8)
    words = tf.data.Dataset.from_tensor_slices((sentences()[0][:, 0], y))
    uneven = words.map(lambda text, label: ({"text": tf.strings.split(text)}, label))

    def lengths():
        inputs = keras.Input((None,), dtype="string", name="text")
        indices = layers.StringLookup(vocabulary=list("abcdefgh"))(inputs)
        pooled = layers.GlobalAveragePooling1D()(layers.Embedding(10, 4)(indices))
        model = keras.Model(inputs, layers.Dense(3)(pooled))
        model.compile("sgd", "mse")
        return model

    def fit(model_fn, source):
        return lambda: strategy.build(model_fn).fit(
            strategy.dataset(source, global_batch_size=8), verbose=0
        )

    tried = [
        (ModelError, fit(v1, data()), "compat.v1.train.AdamOptimizer"),
        (ModelError, fit(without_loss, data()), "must have a loss"),
        (DataError, fit(mlp, (x,)), "must have labels"),
        (DataError, fit(mlp, (x, names)), "must be numbers, but found labels of text"),
        (DataError, lambda: strategy.build(mlp).evaluate(x, names.tolist()), "labels of text"),
        (DataError, lambda: strategy.build(mlp).fit(texts), "labels of text"),
        (DataError, lambda: strategy.build(mlp).fit(x, y, validation_data=texts), "labels of text"),
        (DataError, lambda: strategy.build(mlp).train_on_batch(x, names), "labels of text"),
        (DataError, fit(mlp, (np.tile(names[:, None], 5), y)), "must be numbers, but found text"),
        (DataError, fit(lengths, (x[:, :2], y)), "must be text, but found numbers"),
        (DataError, fit(lengths, uneven), "feature 'text' must have one shape"),
        (ModelError, lambda: strategy.build(stateful), "stateful"),
    ]
    if strategy.name != "single":  # Which leaves batches to Keras.
        for method in ("fit", "evaluate"):
            read = getattr(strategy.build(lengths), method)
            tried.append((DataError, functools.partial(read, uneven.batch(5)), "padded_batch"))
    if strategy.name == "mirrored":
        tried += [
            (ModelError, lambda: strategy.build(of_odd_batches), "batch_size=5 and 2 replicas"),
            (ModelError, lambda: strategy.build(with_updated_metric), "found layer 'counts'"),
        ]
    for kind, attempt, words in tried:
        if strategy.num_replicas == 1 and words == "stateful":
            continue
        with pytest.raises(kind) as caught:
            attempt()
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
    model = strategy.build(mlp)
    with pytest.raises(ModelError, match=r"compat\.v1\.train\.AdamOptimizer"):
        model.compile(tf.compat.v1.train.AdamOptimizer(), "sparse_categorical_crossentropy")
