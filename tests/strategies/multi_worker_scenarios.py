"""What only MultiWorkerMirroredStrategy has, on two workers."""

from __future__ import annotations

import csv
import time

import numpy as np
import pytest
import tensorflow as tf
from scenarios import scenario
from tensorflow import keras

import tfdist
from tfdist.errors import LaunchError, OptionError

layers = keras.layers
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(45, 5)).astype(np.float32), RNG.integers(0, 3, 45)


def model_fn():
    model = keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(8, "tanh"),
            layers.BatchNormalization(),
            layers.Dense(3, "softmax"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.01, epsilon=1e-3),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


@scenario
def variables_are_of_the_named_engine(strategy, folder):
    model = strategy.build(model_fn)
    assert type(model.distribute_strategy) is tf.distribute.MultiWorkerMirroredStrategy
    assert model.distribute_strategy.num_replicas_in_sync == 2


@scenario(long=True)
def a_program_enters_it_again(strategy, folder):
    """Two blocks, each with two models, on one connection: the weights are the same each time."""
    found = []
    for _ in range(2):
        with tfdist.strategy("multi_worker", stall_timeout_s=3) as again:
            for _ in range(2):
                keras.utils.set_random_seed(0)
                model = again.build(model_fn)
                model.fit(again.dataset((X, Y), global_batch_size=8), verbose=0)
                found.append(model.get_weights())
    for weights in found[1:]:
        for one, other in zip(weights, found[0], strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)
    with pytest.raises(OptionError, match="connected once, but found communication='ring'"):
        tfdist.strategy("multi_worker", communication="ring").start()


@scenario(long=True)
def a_model_made_outside_is_cloned(strategy, folder):
    model = strategy.build(model_fn())
    assert type(model.distribute_strategy) is tf.distribute.MultiWorkerMirroredStrategy
    model.fit(strategy.dataset((X, Y), global_batch_size=8), verbose=0)


@scenario
def all_ranks_have_the_chiefs_weights(strategy, folder):
    keras.utils.set_random_seed(strategy.topology.rank)  # Each rank starts with its own.
    model = strategy.build(model_fn)
    model.fit(strategy.dataset((X, Y), global_batch_size=8), verbose=0)
    for mine, chiefs in zip(
        model.get_weights(), strategy.from_chief(model.get_weights()), strict=True
    ):
        np.testing.assert_array_equal(mine, chiefs)


@scenario(long=True)
def several_steps_per_execution(strategy, folder):
    """Predictions of all steps of an execution, of which the last one may have fewer."""
    rows = np.random.default_rng(0).normal(size=(53, 5)).astype(np.float32)

    def model_fn() -> keras.Model:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse", steps_per_execution=4)
        return model

    model, one_device = strategy.build(model_fn), model_fn()
    for count in (53, 4):
        data = strategy.dataset(rows[:count], global_batch_size=8, training=False)
        found = model.predict(data, verbose=0)
        np.testing.assert_allclose(found, one_device.predict(rows[:count], verbose=0), atol=1e-5)


@scenario("multi_worker", "keras_3", long=True)
def callbacks_that_write_leave_one_of_each_file(strategy, folder):
    model = strategy.build(model_fn)
    model.fit(
        strategy.dataset((X, Y), global_batch_size=8),
        epochs=2,
        callbacks=[
            keras.callbacks.ModelCheckpoint(str(folder / "kept" / "{epoch}.keras")),
            keras.callbacks.TensorBoard(str(folder / "board"), histogram_freq=1),
            keras.callbacks.CSVLogger(str(folder / "log.csv")),
            tfdist.Checkpoints(folder / "checkpoints"),
        ],
        verbose=0,
    )
    strategy.from_chief(None)
    assert sorted(path.name for path in (folder / "kept").iterdir()) == ["1.keras", "2.keras"]
    assert len(list((folder / "board").rglob("events.*"))) == 1
    assert len(list(csv.DictReader((folder / "log.csv").open()))) == 2
    names = {path.name for path in (folder / "checkpoints").glob("*.index")}
    assert names == {"ckpt-6.index", "ckpt-12.index"}
    assert not list(folder.rglob("workertemp*"))


@scenario
def saving_by_keras_own_method_keeps_the_chiefs_file(strategy, folder):
    model = strategy.build(model_fn)
    model.save(folder / f"{strategy.topology.rank}.keras")
    model.save_weights(filepath=folder / f"{strategy.topology.rank}.weights.h5")
    strategy.from_chief(None)
    assert {path.name for path in folder.iterdir()} == {"0.keras", "0.weights.h5"}


@scenario(long=True)
def a_chief_that_cannot_save_tells_all(strategy, folder):
    model = strategy.build(model_fn)
    with pytest.raises((OptionError, LaunchError), match="folder of a saved model must exist"):
        strategy.save(model, folder / "missing" / "model.keras")
    strategy.save(model, folder / "model.keras")
    assert (folder / "model.keras").is_file()


@scenario
def objects_of_other_sizes_are_gathered_in_the_order_of_ranks(strategy, folder):
    rank = strategy.topology.rank
    gathered = strategy.connect().gather("x" * (rank * 1000 + 1))
    assert [len(text) for text in gathered] == [1, 1001]


@scenario
def a_worker_that_does_not_step_is_waited_for_until_the_deadline(strategy, folder):
    """Last: the collectives are ended by it."""

    class Sleepy(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2 and not strategy.topology.is_chief:
                time.sleep(8)

    model = strategy.build(model_fn)
    with pytest.raises(LaunchError, match="all workers must take every step together") as caught:
        model.fit(strategy.dataset((X, Y), global_batch_size=8), callbacks=[Sleepy()], verbose=0)
    if strategy.topology.is_chief:
        assert "rank 0" in str(caught.value)
        assert "epoch 1, step 4" in str(caught.value)
