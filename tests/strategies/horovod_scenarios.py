"""What only Horovod has, on two ranks."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import tensorflow as tf
from one_device import equals_one_device
from scenarios import scenario
from tensorflow import keras

import tfdist
from tfdist.errors import DataError, LaunchError, ModelError, OptionError
from tfdist.records.reading.stored import Stored

layers = keras.layers
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(45, 5)).astype(np.float32), RNG.integers(0, 3, 45)


def model_fn():
    model = keras.Sequential(
        [keras.Input((5,)), layers.Dense(8, "tanh"), layers.Dense(3, "softmax")]
    )
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "sparse_categorical_crossentropy")
    return model


def other(strategy, **options):
    """Returns a strategy with other options in the same job."""
    made = tfdist.strategy("horovod", stall_timeout_s=100, **options)
    made.start()
    return made


@scenario
def the_maps_of_a_dataset_run_once_for_each_record_over_all_ranks(strategy, folder):
    def told(x, y):
        with open(folder / f"mapped{strategy.topology.rank}", "a") as file:
            file.write(f"{y}\n")
        return (x * 2).astype(np.float32)

    def map_fn(x, number):
        doubled = tf.numpy_function(told, [x, number], tf.float32)
        return tf.ensure_shape(doubled, [5]), tf.gather(Y, number)

    mapped = tf.data.Dataset.from_tensor_slices((X, np.arange(len(X)))).map(map_fn)
    feed = strategy.dataset(mapped, global_batch_size=8)
    file = folder / f"mapped{strategy.topology.rank}"
    file.write_text("")  # It looks at the first records twice.
    keras.utils.set_random_seed(1)
    reference = model_fn()
    model = strategy.build(model_fn)
    model.set_weights(reference.get_weights())
    model.fit(feed, epochs=1, verbose=0)
    shutil.copy(file, folder / f"fitted{strategy.topology.rank}")
    strategy.from_chief(None)  # All have written.
    lines = [n for rank in range(2) for n in (folder / f"fitted{rank}").read_text().split()]
    assert sorted(map(int, lines)) == [*range(len(X))]
    for batch in feed.on_one_device().epochs(0, 1):
        reference.train_on_batch(*batch)
    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@scenario
def what_a_callback_sets_on_one_rank_alone_is_named(strategy, folder):
    """A learning rate of its own would have the ranks part, and so would a weight."""

    class Rate(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1 and not strategy.topology.is_chief:
                self.model.optimizer.learning_rate = 0.5

    class Weight(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if not strategy.topology.is_chief:
                self.model.layers[0].kernel.assign(self.model.layers[0].kernel * 1.5)

    feed = strategy.dataset((X[:24], Y[:24]), global_batch_size=8)
    for callback, epoch, what in ((Rate(), 2, "learning_rate"), (Weight(), 1, "weight 'dense")):
        with pytest.raises(ModelError, match=f"one learning rate.*{what}.*after epoch {epoch}"):
            strategy.build(model_fn).fit(feed, epochs=3, callbacks=[callback], verbose=0)


@scenario
def hosts_that_hold_other_records_equal_one_device(strategy, folder):
    """Two shards on one host, one on the other: 4 rows of each a step, then 4 of one alone."""
    rank = strategy.topology.rank
    if strategy.topology.is_chief:
        manifest = tfdist.records.write((X, Y), folder / "all", split="train=1", num_shards=3)
        names = [shard.file for shard in manifest.splits["train"].shards]
        for host, numbers in enumerate(((0, 2), (1,))):
            (folder / f"host{host}").mkdir()
            for number in numbers:
                shutil.copy(folder / "all" / names[number], folder / f"host{host}")
    strategy.from_chief(None)

    def held(host):
        return Stored(
            manifest=folder / "all", split="train", folder=folder / f"host{host}", divided=True
        )

    keras.utils.set_random_seed(1)
    reference = model_fn()
    model = strategy.build(model_fn)
    model.set_weights(reference.get_weights())
    feed = strategy.dataset(held(rank), global_batch_size=8, training=False)
    assert (feed.num_records, feed.steps_per_epoch) == (45, 8)
    model.fit(feed, epochs=2, verbose=0)

    parts = []
    for host in range(2):
        records = tfdist.records.open_records(held(host))
        (whole,) = records.batches(
            0, records.num_records, 45, shuffle=False, seed=0, epoch=0
        ).as_numpy_iterator()
        parts.append(whole)
    for step in [*range(8)] * 2:
        rows = slice(4 * step, 4 * step + 4)
        reference.train_on_batch(
            *(np.concatenate([part[i][rows] for part in parts]) for i in (0, 1))
        )
    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    loss = model.evaluate(feed, verbose=0)
    np.testing.assert_allclose(loss, reference.evaluate(X, Y, verbose=0), atol=1e-5)
    with pytest.raises(DataError, match="every host must hold all records"):
        feed.on_one_device()


@scenario
def coarse_options_train(strategy, folder):
    # Ranks whose gradients are the same have their mean, whatever a sum makes of other ones.
    alike = np.repeat(X[:1], 48, axis=0), np.repeat(Y[:1], 48)
    for options, records, tolerance in (
        ({"compression": "fp16"}, (X, Y), 1e-3),
        ({"op": "adasum"}, alike, 1e-5),
    ):
        coarse = other(strategy, **options)
        assert coarse.approximations
        equals_one_device(coarse, model_fn, records, epochs=3, tolerance=tolerance)
        report = tfdist.verify(model_fn, (X, Y), coarse, steps=20, global_batch_size=8)
        if strategy.topology.is_chief:
            assert not report.exact
            assert next(iter(options.values())) in " ".join(report.causes)


@scenario(long=True)
def all_ranks_have_the_same_weights(strategy, folder):
    keras.utils.set_random_seed(strategy.topology.rank)  # Each rank starts with its own.
    model = strategy.build(model_fn)
    model.fit(strategy.dataset((X, Y), global_batch_size=8), verbose=0)
    for mine, chiefs in zip(
        model.get_weights(), strategy.from_chief(model.get_weights()), strict=True
    ):
        np.testing.assert_array_equal(mine, chiefs)


@scenario
def a_model_that_one_rank_makes_more_deadlocks_nobody(strategy, folder):
    if strategy.topology.is_chief:
        model_fn().fit(X, Y, verbose=0)
    model = strategy.build(model_fn)
    feed = strategy.dataset((X, Y), global_batch_size=8)
    assert np.isfinite(model.fit(feed, verbose=0).history["loss"][0])


@scenario
def ranks_with_other_data_are_refused_on_all(strategy, folder):
    rows = 40 + strategy.topology.rank
    model = strategy.build(model_fn)
    feed = strategy.dataset((X[:rows], Y[:rows]), global_batch_size=8)
    for method in (model.fit, model.evaluate, model.predict):
        with pytest.raises(DataError, match=r"rank 0: 40 records.*rank 1: 41 records"):
            method(feed, verbose=0)
    good = strategy.dataset((X, Y), global_batch_size=8)
    with pytest.raises(DataError, match="rank 1: 41 records"):
        model.fit(good, validation_data=feed, verbose=0)
    model.fit(good, verbose=0)


@scenario
def a_chief_that_cannot_save_tells_all(strategy, folder):
    model = strategy.build(model_fn)
    with pytest.raises((OptionError, LaunchError), match="folder of a saved model must exist"):
        strategy.save(model, folder / "missing" / "model.keras")


@scenario
def saving_by_keras_own_method_writes_once(strategy, folder):
    model = strategy.build(model_fn)
    model.save(folder / f"{strategy.topology.rank}.keras")
    model.save_weights(folder / f"{strategy.topology.rank}.weights.h5")
    strategy.from_chief(None)
    assert {path.name for path in folder.iterdir()} == {"0.keras", "0.weights.h5"}


@scenario
def a_rank_whose_step_fails_ends_the_others(strategy, folder):
    """Last: Horovod is shut down by it."""

    def fail_on_rank_1(x, y):
        def fail(x):
            if strategy.topology.rank == 1 and x.max() > 1:
                raise ValueError("broken row")
            return x

        return tf.ensure_shape(tf.numpy_function(fail, [x], tf.float32), x.shape), y

    x = np.zeros((45, 5), np.float32)
    x[-4] = 9
    model = strategy.build(model_fn)
    feed = strategy.dataset((x, Y), global_batch_size=8, training=False, map_fn=fail_on_rank_1)
    kind = LaunchError if strategy.topology.is_chief else tf.errors.OpError
    with pytest.raises(kind):
        model.fit(feed, verbose=0)
