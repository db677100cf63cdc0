"""A model divided in each of two ranks, against one device: strategies inside of strategies."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from scenarios import scenario
from tensorflow import keras

import tfdist
from tfdist.errors import ModelError, OptionError
from tfdist.training import early_variables
from tfdist.training.binding import binding_of

layers = keras.layers
RNG = np.random.default_rng(0)
# Batches of 12 leave a tail of one row, and so one rank without any.
X, Y = RNG.normal(size=(49, 6)).astype(np.float32), RNG.integers(0, 3, 49)
ONE_HOT = np.eye(3, dtype=np.float32)[Y]
EPOCHS = 2


def adam() -> Any:
    return keras.optimizers.Adam(0.01, epsilon=1e-3)


def normed(optimizer: Any = None, loss: Any = "sparse_categorical_crossentropy") -> keras.Model:
    """With statistics and losses of all that a batch has."""
    l2 = keras.regularizers.L2(1e-2)
    inputs = keras.Input((6,))
    options = {"kernel_regularizer": l2, "activity_regularizer": l2, "name": "first"}
    x = layers.Dense(16, "tanh", **options)(inputs)
    x = layers.BatchNormalization(momentum=0.9)(x)
    x = layers.Dense(16, "gelu")(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    model = keras.Model(inputs, layers.Dense(3, "softmax")(x))
    model.compile(optimizer or adam(), loss, metrics=["accuracy"])
    return model


def pair(strategy: Any, model_fn: Any) -> tuple[keras.Model, keras.Model]:
    """Returns a model of the strategy and one of plain Keras, with the same weights."""
    keras.utils.set_random_seed(1)
    reference = model_fn()
    model = strategy.build(model_fn)
    model.set_weights(reference.get_weights())
    return model, reference


def other(strategy: Any, **options: Any) -> Any:
    """Returns a strategy with other options in the same job."""
    made = tfdist.strategy(strategy.name, replicas="horovod", **options)
    made.start()
    return made


def near(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for one, another in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, another, atol=tolerance)


def fit_both(
    strategy: Any, model: keras.Model, reference: keras.Model, data: tuple, tolerance: float = 1e-5
) -> None:
    start = reference.get_weights()
    feed = strategy.dataset(data, global_batch_size=12, seed=3)
    found = model.fit(feed, epochs=EPOCHS, verbose=0).history
    early_variables.make_slots(reference)
    batches = feed.on_one_device().epochs(0, EPOCHS)
    expected = reference.fit(
        batches, epochs=EPOCHS, steps_per_epoch=len(feed), verbose=0, shuffle=False
    ).history
    near(model.get_weights(), reference.get_weights(), tolerance)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=10 * tolerance, err_msg=name)
    moved = zip(start, reference.get_weights(), strict=True)
    assert max(np.max(np.abs(a - b)) for a, b in moved) > 0.01


@scenario
def a_rank_is_one_of_two_and_has_devices_of_its_own(strategy, folder):
    assert (strategy.num_replicas, strategy.topology.world_size) == (2, 2)
    model = strategy.build(normed)
    text = str(strategy.describe(model))
    grid = strategy.describe(model).grid
    assert [(row.rank, row.device, row.stage) for row in grid] == [
        (rank, f"CPU:{stage}", stage) for rank in range(2) for stage in range(2)
    ]
    weights = sum(w.shape.num_elements() * 4 for w in model.weights)
    assert sum(row.weight_bytes for row in grid) == 2 * weights
    assert {row.host for row in grid} == {grid[0].host}
    assert "rows 2 of 2" in text
    assert "stage 1 of 2" in text
    assert {w.device.rpartition("/")[2] for w in model.weights} == {"device:CPU:0", "device:CPU:1"}


@scenario
def statistics_of_all_ranks(strategy, folder):
    fit_both(strategy, *pair(strategy, normed), (X, Y))


@scenario
def statistics_of_all_ranks_computed_again(strategy, folder):
    again = other(strategy, stages=2, microbatches=3, recompute="blocks")
    fit_both(again, *pair(again, normed), (X, Y))


@scenario
def sums_over_rows(strategy, folder):
    def model_fn():
        loss = keras.losses.SparseCategoricalCrossentropy(reduction="sum")
        return normed(keras.optimizers.Adam(1e-3, epsilon=1e-2), loss)

    fit_both(strategy, *pair(strategy, model_fn), (X, Y))


@scenario
def a_loss_of_ones_own_that_is_no_number_of_no_rows(strategy, folder):
    def mean(y, y_pred):
        return tf.reduce_mean(tf.square(y - y_pred))

    model, reference = pair(strategy, lambda: normed(loss=mean))
    fit_both(strategy, model, reference, (X, ONE_HOT))
    held_out = strategy.dataset((X, ONE_HOT), global_batch_size=12, training=False)
    near(model.evaluate(held_out, verbose=0), reference.evaluate(X, ONE_HOT, 12, verbose=0))


@scenario
def words_that_are_looked_up(strategy, folder):
    def model_fn():
        inputs = keras.Input((5,), dtype="int32")
        x = layers.Embedding(11, 16)(inputs)
        x = layers.Dense(16, "tanh")(layers.GlobalAveragePooling1D()(x))
        model = keras.Model(inputs, layers.Dense(3, "softmax")(x))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy")
        return model

    words = RNG.integers(0, 11, (49, 5)).astype(np.int32)
    fit_both(strategy, *pair(strategy, model_fn), (words, Y))


@scenario
def mixed_precision(strategy, folder):
    mixed = other(strategy, stages=2, microbatches=3, precision="mixed_float16")

    def model_fn():
        inputs = keras.Input((6,))
        x = layers.Dense(16, "tanh")(inputs)
        x = layers.Dense(16, "tanh")(x)
        model = keras.Model(inputs, layers.Dense(3, "softmax", dtype="float32")(x))
        model.compile(
            # A scale at which nothing overflows: a skipped update would be another training.
            keras.mixed_precision.LossScaleOptimizer(
                keras.optimizers.SGD(0.05), dynamic=False, initial_scale=128
            ),
            "sparse_categorical_crossentropy",
        )
        return model

    keras.utils.set_random_seed(1)
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        reference = model_fn()
    finally:
        keras.mixed_precision.set_global_policy("float32")
    model = mixed.build(model_fn)
    reference.set_weights(mixed.from_chief(reference.get_weights()))
    model.set_weights(reference.get_weights())
    fit_both(mixed, model, reference, (X, Y), tolerance=2e-3)


@scenario
def ranks_drop_other_units(strategy, folder):
    def model_fn():
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(8), layers.Dropout(0.5), layers.Dense(3, "softmax")]
        )
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    keras.utils.set_random_seed(1)
    binding = binding_of(strategy.build(model_fn), "this test")
    seed = binding.engine.steps.seeds.of_step().numpy().tolist()
    first, second = strategy.connect().gather(seed)
    assert first != second


@scenario
def one_batch(strategy, folder):
    model, reference = pair(strategy, normed)
    for rows in (5, 1):
        x, y = X[:rows], Y[:rows]
        near(model.train_on_batch(x, y), reference.train_on_batch(x, y))
        near(model.get_weights(), reference.get_weights())
    near(model.test_on_batch(X[:5], Y[:5]), reference.test_on_batch(X[:5], Y[:5]))
    near(model.predict_on_batch(X[:3]), reference.predict_on_batch(X[:3]))


@scenario
def batches_that_keras_takes(strategy, folder):
    model, reference = pair(strategy, normed)
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(12)
    model.fit(batches, epochs=EPOCHS, verbose=0)
    reference.fit(batches, epochs=EPOCHS, verbose=0)
    near(model.get_weights(), reference.get_weights())
    near(model.evaluate(batches, verbose=0), reference.evaluate(batches, verbose=0))


class Stop(keras.callbacks.Callback):
    """Ends a fit within its second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (1, 2):
            raise KeyboardInterrupt


@scenario
def a_fit_goes_on_on_another_grid(strategy, folder):
    """In the middle of an epoch, in other stages, and then on whole models."""
    model, reference = pair(strategy, normed)
    start = reference.get_weights()
    feed = strategy.dataset((X, Y), global_batch_size=12, seed=3)
    batches = feed.on_one_device().epochs(0, 3)
    early_variables.make_slots(reference)
    reference.fit(batches, epochs=3, steps_per_epoch=len(feed), shuffle=False, verbose=0)
    model.set_weights(start)
    kept = tfdist.Checkpoints(folder / "kept", every_steps=1)
    with contextlib.suppress(KeyboardInterrupt):
        model.fit(feed, epochs=3, callbacks=[kept, Stop()], verbose=0)
    whole = tfdist.strategy("horovod")
    with contextlib.suppress(OptionError):  # It runs already, with as many threads as stages need.
        whole.start()
    options = {"stages": 2, "microbatches": 2, "cut_after": "first"}
    if strategy.name == "mesh":
        options = {"batch": 2, "model": 1}
    for number, another in enumerate((other(strategy, **options), whole)):
        again = another.build(normed)
        going_on = another.dataset((X, Y), global_batch_size=12, seed=3)
        resume = tfdist.Checkpoints(folder / "kept", resume=True)
        again.fit(going_on, epochs=2 + number, callbacks=[resume], verbose=0)
    near(again.get_weights(), reference.get_weights())


@scenario
def the_file_is_keras_own(strategy, folder):
    model, reference = pair(strategy, normed)
    strategy.save(model, folder / "model.keras")
    near(keras.models.load_model(folder / "model.keras").predict(X, verbose=0),
         reference.predict(X, verbose=0))  # fmt: skip
    found = strategy.connect().gather(sorted(path.name for path in folder.iterdir()))
    assert found == [["model.keras"]] * 2


@scenario
def what_ranks_cannot_share_is_refused(strategy, folder):
    with pytest.raises(OptionError, match=r"microbatches must divide.*each of 2 ranks"):
        strategy.dataset((X, Y), global_batch_size=9)
    with pytest.raises(OptionError, match=r"at least the number of replicas, here 2"):
        strategy.dataset((X, Y), global_batch_size=1, training=False)

    class OwnMetrics(keras.Model):
        def compute_metrics(self, *args):
            return super().compute_metrics(*args)

    def model_fn():
        inputs = keras.Input((6,))
        x = layers.Dense(4)(inputs)
        model = OwnMetrics(inputs, layers.Dense(3, "softmax")(x))
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    with pytest.raises(ModelError, match="must have Keras' own compute_metrics"):
        strategy.build(model_fn)


@scenario
def slices_of_all_ranks(strategy, folder):
    """What one rank alone has set is what all begin with."""
    model, reference = pair(strategy, normed)
    if not strategy.topology.is_chief:
        model.set_weights([weight + 1 for weight in reference.get_weights()])
    fit_both(strategy, model, reference, (X, Y))
    description = strategy.describe(model)
    assert [place.devices for place in description.places] == [("CPU:0", "CPU:1")] * 2


@scenario
def a_divided_batch_in_each_rank(strategy, folder):
    divided = other(strategy, batch=2, model=1, keep_host_copy=False)
    assert divided.num_replicas == 4
    fit_both(divided, *pair(divided, normed), (X, Y))


@scenario
def clipped_tables_of_words_and_of_positions(strategy, folder):
    """Keras clips the gradients of look-ups before it adds up those of equal words."""

    class Positions(layers.Layer):
        def __init__(self, **options):
            super().__init__(**options)
            self.table = layers.Embedding(5, 16)

        def call(self, x):
            return x + self.table(tf.range(5))

    def model_fn():
        inputs = keras.Input((5,), dtype="int32")
        x = Positions()(layers.Embedding(11, 16)(inputs))
        x = layers.Dense(16, "tanh")(layers.Flatten()(x))
        model = keras.Model(inputs, layers.Dense(3, "softmax")(x))
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1)
        model.compile(optimizer, "sparse_categorical_crossentropy")
        return model

    words = RNG.integers(0, 11, (49, 5)).astype(np.int32)
    fit_both(strategy, *pair(strategy, model_fn), (words, Y))


@scenario
def a_masked_output_is_refused(strategy, folder):
    def model_fn():
        inputs = keras.Input((5,), dtype="int32")
        x = layers.Dense(16, "tanh")(layers.Embedding(11, 16, mask_zero=True)(inputs))
        model = keras.Model(inputs, layers.Dense(3, "softmax")(x))
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    words = RNG.integers(0, 11, (24, 5)).astype(np.int32)
    feed = strategy.dataset((words, words % 3), global_batch_size=12)
    with pytest.raises(ModelError, match="outputs of a mesh with replicas must carry no mask"):
        strategy.build(model_fn).fit(feed, verbose=0)
