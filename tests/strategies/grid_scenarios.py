"""A model divided in each of two ranks, against one device: strategies inside of strategies."""

from __future__ import annotations

import contextlib
import io
import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from one_device import assert_near, pair, trains_as_one_device
from scenarios import scenario
from tensorflow import keras

import tfdist
from tfdist.errors import LaunchError, ModelError, OptionError
from tfdist.strategies.mesh.model import MeshModel
from tfdist.strategies.multi_worker.cluster import Cluster
from tfdist.strategies.multi_worker.strategy import MultiWorker
from tfdist.training.engine.binding import binding_of, known_of
from tfdist.training.layers import eager_variables

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


def ranks_of(strategy: Any) -> str:
    """Returns the strategy whose ranks each hold a model."""
    return "multi_worker" if isinstance(strategy.connect(), Cluster) else "horovod"


def other(strategy: Any, **options: Any) -> Any:
    """Returns a strategy with other options in the same job."""
    made = tfdist.strategy(strategy.name, replicas=ranks_of(strategy), **options)
    made.start()
    return made


def fit_both(strategy: Any, *models_and_data: Any, **options: Any) -> None:
    trains_as_one_device(strategy, *models_and_data, global_batch_size=12, **options)


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
    assert {row.optimizer_bytes for row in grid} == {None}  # No step has been taken.
    assert {w.device.rpartition("/")[2] for w in model.weights} == {"device:CPU:0", "device:CPU:1"}


@scenario("stages", "stages_of_workers", "mesh", "mesh_of_workers", long=True)
def statistics_of_all_ranks(strategy, folder):
    fit_both(strategy, *pair(strategy, normed), (X, Y))


@scenario("stages", "mesh", "mesh_of_workers", long=True)
def statistics_of_all_ranks_computed_again(strategy, folder):
    shape = {"model": 2} if strategy.name == "mesh" else {"stages": 2, "microbatches": 3}
    again = other(strategy, **shape, recompute="blocks")
    fit_both(again, *pair(again, normed), (X, Y))


@scenario(long=True)
def slots_divided_among_ranks(strategy, folder):
    """On each stage's device lie the slots of half of its weights."""
    divided = other(strategy, stages=2, microbatches=3, shard="optimizer")

    def model_fn():
        return normed(keras.optimizers.Adam(0.01, epsilon=1e-3, global_clipnorm=0.5))

    model, reference = pair(divided, model_fn)
    fit_both(divided, model, reference, (X, Y))
    parts = binding_of(model, "this test").sharded.parts
    for (index, _), slots in parts.slots.items():
        weight = parts.weights[index]
        assert [slot.device for slot in slots] == [weight.device]
        assert slots[0].shape == [-(-weight.shape.num_elements() // 2)]
    assert len({weight.device for weight in parts.weights}) == 2
    # Of each weight a rank has half, as it updates it, and Adam's two slots of that half.
    for row in divided.describe(model).grid:
        trained = [w for w in parts.weights if w.device.endswith(row.device)]
        halves = sum(-(-weight.shape.num_elements() // 2) for weight in trained)
        assert row.optimizer_bytes == 3 * 4 * halves
    divided.save(model, folder / "model.keras")
    whole = keras.models.load_model(folder / "model.keras").optimizer.variables
    assert_near([v.numpy() for v in whole], [v.numpy() for v in reference.optimizer.variables])


@scenario(long=True)
def exchanges_of_many_shapes_in_one_step(strategy, folder):
    ranks = strategy.connect()

    @tf.function
    def summed(tensor):
        return ranks.sum(tensor, f"this.{tensor.shape[0]}")

    @tf.function
    def step(own):
        for size in range(1, 7):
            row = tf.fill([size], own)
            rows = ranks.all_gather(row, f"this.gather.{size}")
            tf.debugging.assert_equal(rows, tf.repeat([[1.0], [2.0]], size, axis=1))
            mean = ranks.reduce_scatter(tf.stack([row, 10 * row]), f"this.scatter.{size}")
            tf.debugging.assert_equal(mean, tf.fill([size], 15.0 if ranks.process else 1.5))
            tf.debugging.assert_equal(summed(row), tf.fill([size], 3.0))
        return summed(tf.fill([9], own))

    for _ in range(3):
        assert_near(step(tf.constant(ranks.process + 1.0)), np.full(9, 3.0))
    if ranks_of(strategy) == "multi_worker":
        # Both together send what one sum does.
        operations = step.get_concrete_function(tf.TensorSpec([])).graph.get_operations()
        kinds = [operation.type for operation in operations]
        assert kinds.count("CollectiveAllToAllV2") == kinds.count("CollectiveGatherV2") == 6
        assert "CollectiveReduceV2" not in kinds


@scenario("mesh", long=True)
def slots_of_slices_divided_among_ranks(strategy, folder):
    """On each device lie the slots of half of its slices."""
    divided = other(strategy, model=2, shard="optimizer", recompute="blocks")

    def model_fn():
        optimizer = keras.optimizers.AdamW(0.01, epsilon=1e-3, global_clipnorm=0.5)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return normed(optimizer)

    whole = strategy.describe(strategy.build(model_fn)).bytes_per_device
    model, reference = pair(divided, model_fn)
    fit_both(divided, model, reference, (X, Y))
    state = known_of(model, MeshModel, "this test").state
    slices = parts = 0
    for weight in model.trainable_variables:
        own = state.of(weight).slices[0].shape.num_elements()
        slots = [slot.slices for slot in state.slots_of(weight)]
        assert [part.shape for each in slots for part in each] == [[-(-own // 2)]] * 4
        assert [part.device for part in slots[0]] == [s.device for s in state.of(weight).slices]
        slices, parts = slices + own, parts - (-own // 2)
    # Adam's two slots of half of the slices, and that half as this rank updates it.
    assert divided.describe(model).bytes_per_device == whole - 4 * (2 * slices - 3 * parts)
    divided.save(model, folder / "model.keras")
    saved = keras.models.load_model(folder / "model.keras").optimizer.variables
    assert_near([v.numpy() for v in saved], [v.numpy() for v in reference.optimizer.variables])
    for name in ("weights", "model.weights.h5"):
        with pytest.raises(ModelError, match=r"must read weights from a file .h5"):
            model.load_weights(folder / name)


@scenario("mesh", "mesh_of_workers", long=True)
def slots_that_the_chief_alone_has_loaded(strategy, folder):
    """They are divided whole, after whatever reads them first, and with weights off the host."""
    single = tfdist.strategy("single")
    trained = single.build(normed)
    trained.fit(X, Y, batch_size=6, verbose=0)
    file = folder / "trained.keras"
    if strategy.topology.is_chief:
        trained.save(file)
    strategy.from_chief(None)  # Others read it once it is whole.

    def model_fn():
        is_chief = strategy.topology.is_chief
        return keras.models.load_model(file) if is_chief else normed()

    for options, saves_first in (({}, False), ({"keep_host_copy": False}, True)):
        divided = other(strategy, model=2, shard="optimizer", **options)
        model = divided.build(model_fn)
        if saves_first:
            divided.save(model, folder / "again.keras")
        reference = single.build(lambda: keras.models.load_model(file))
        fit_both(divided, model, reference, (X, Y))
        divided.save(model, folder / "both.keras")
        strategy.from_chief(None)
        slots = keras.models.load_model(folder / "both.keras").optimizer.variables
        assert_near([v.numpy() for v in slots], [v.numpy() for v in reference.optimizer.variables])
        model.compile(adam(), model.loss)  # Its parts are made of slices.
        model.fit(X, Y, batch_size=6, verbose=0)


@scenario("stages", "stages_of_workers", "mesh", long=True)
def a_gradient_that_overflows_on_one_rank(strategy, folder):
    """All leave the update out, though one rank alone, or its part of the slots, has seen it."""
    stages = {"stages": 2, "microbatches": 3}
    kinds = [stages, {**stages, "shard": "optimizer"}]
    if strategy.name == "mesh":
        kinds = [{"model": 2, "shard": "optimizer"}]

    def model_fn():
        inner = [layers.Dense(16)] if strategy.name == "pipeline" else []
        model = keras.Sequential([keras.Input((6,)), *inner, layers.Dense(16, "softmax")])
        scaled = keras.mixed_precision.LossScaleOptimizer(adam(), initial_scale=2.0**15)
        model.compile(scaled, "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    x = X.copy()
    x[5, 5] = 1e36  # The last row of the kernel, which rank 1 updates.
    for options in kinds:
        divided = other(strategy, **options)
        model, reference = pair(divided, model_fn)
        fit_both(divided, model, reference, (x, Y), skip=("loss",))
        scales = [float(each.optimizer.loss_scale) for each in (model, reference)]
        assert scales == [2.0**13, 2.0**13]  # Once in each epoch.


@scenario("stages", "stages_of_workers", "mesh", "mesh_of_workers", long=True)
def sums_over_rows(strategy, folder):
    def model_fn():
        loss = keras.losses.SparseCategoricalCrossentropy(reduction="sum")
        return normed(keras.optimizers.Adam(1e-3, epsilon=1e-2), loss)

    fit_both(strategy, *pair(strategy, model_fn), (X, Y))


@scenario("stages", "stages_of_workers", "mesh", "mesh_of_workers", long=True)
def a_loss_of_ones_own_that_is_no_number_of_no_rows(strategy, folder):
    def mean(y, y_pred):
        return tf.reduce_mean(tf.square(y - y_pred))

    model, reference = pair(strategy, lambda: normed(loss=mean))
    fit_both(strategy, model, reference, (X, ONE_HOT))
    held_out = strategy.dataset((X, ONE_HOT), global_batch_size=12, training=False)
    assert_near(model.evaluate(held_out, verbose=0), reference.evaluate(X, ONE_HOT, 12, verbose=0))


class Centered(layers.Layer):
    """Takes off a running mean of the rows of the batch, as it was before."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight("mean", shape[-1:], initializer="zeros", trainable=False)

    def call(self, x: tf.Tensor, training: Any = None) -> tf.Tensor:
        centered = x - self.mean
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(x, 0))
        return centered


@scenario("stages", "stages_of_workers", long=True)
def a_state_of_ones_own_is_that_of_all_ranks(strategy, folder):
    def model_fn():
        model = keras.Sequential([keras.Input((6,)), Centered(), layers.Dense(3, "softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    whole = other(strategy, stages=2, microbatches=1)
    fit_both(whole, *pair(whole, model_fn), (X, Y))
    model = strategy.build(model_fn)
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        model.fit(X, Y, batch_size=12, verbose=0)
    if strategy.topology.is_chief:
        assert "is changed by each microbatch, not once a step" in told.getvalue()
    means = strategy.connect().gather(model.layers[0].mean.numpy())
    np.testing.assert_array_equal(*means)


def of_words(**options: Any) -> keras.Model:
    inputs = keras.Input((5,), dtype="int32")
    x = layers.Embedding(11, 16)(inputs)
    x = layers.Dense(16, "tanh")(layers.GlobalAveragePooling1D()(x))
    model = keras.Model(inputs, layers.Dense(3, "softmax")(x))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, "sparse_categorical_crossentropy", **options)
    return model


@scenario("stages", "stages_of_workers", "mesh", "mesh_of_workers", long=True)
def words_that_are_looked_up(strategy, folder):
    words = RNG.integers(0, 11, (49, 5)).astype(np.int32)
    fit_both(strategy, *pair(strategy, of_words), (words, Y))


@scenario(long=True)
def words_of_several_steps_at_a_time(strategy, folder):
    words = RNG.integers(0, 11, (49, 5)).astype(np.int32)
    options = {"stages": 2, "microbatches": 3}
    divided = other(strategy, **options, shard="optimizer")
    for each in (strategy, divided):
        model, reference = pair(each, lambda: of_words(steps_per_execution=3))
        if ranks_of(each) == "horovod" or each is divided:
            fit_both(each, model, reference, (words, Y))
            continue
        feed = each.dataset((words, Y), global_batch_size=12)
        with pytest.raises(ModelError, match="looked-up rows must be exchanged step by step"):
            model.fit(feed, verbose=0)


@scenario(long=True)
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


@scenario("stages", "stages_of_workers", "mesh", "mesh_of_workers", long=True)
def one_batch(strategy, folder):
    model, reference = pair(strategy, normed)
    for rows in (5, 1):
        x, y = X[:rows], Y[:rows]
        assert_near(model.train_on_batch(x, y), reference.train_on_batch(x, y))
        assert_near(model.get_weights(), reference.get_weights())
    assert_near(model.test_on_batch(X[:5], Y[:5]), reference.test_on_batch(X[:5], Y[:5]))
    assert_near(model.predict_on_batch(X[:3]), reference.predict_on_batch(X[:3]))


@scenario("stages", "stages_of_workers", "mesh", "mesh_of_workers", long=True)
def batches_that_keras_takes(strategy, folder):
    model, reference = pair(strategy, normed)
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(12)
    model.fit(batches, epochs=EPOCHS, verbose=0)
    reference.fit(batches, epochs=EPOCHS, verbose=0)
    assert_near(model.get_weights(), reference.get_weights())
    assert_near(model.evaluate(batches, verbose=0), reference.evaluate(batches, verbose=0))


class Stop(keras.callbacks.Callback):
    """Ends a fit within its second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (1, 2):
            raise KeyboardInterrupt


@scenario("stages", "stages_of_workers", "mesh", "mesh_of_workers", long=True)
def a_fit_goes_on_on_another_grid(strategy, folder):
    """In the middle of an epoch, in other stages, and then on whole models."""
    model, reference = pair(strategy, normed)
    start = reference.get_weights()
    feed = strategy.dataset((X, Y), global_batch_size=12, seed=3)
    batches = feed.on_one_device().epochs(0, 3)
    eager_variables.make_slots(reference)
    reference.fit(batches, epochs=3, steps_per_epoch=len(feed), shuffle=False, verbose=0)
    model.set_weights(start)
    kept = tfdist.Checkpoints(folder / "kept", every_steps=1)
    with contextlib.suppress(KeyboardInterrupt):
        model.fit(feed, epochs=3, callbacks=[kept, Stop()], verbose=0)
    whole = tfdist.strategy(ranks_of(strategy))
    with contextlib.suppress(OptionError):  # It runs already, with as many threads as stages need.
        whole.start()
    options = {"stages": 2, "microbatches": 2, "cut_after": "first", "shard": "optimizer"}
    if strategy.name == "mesh":
        options = {"batch": 2, "model": 1, "shard": "optimizer"}
    for number, another in enumerate((other(strategy, **options), whole)):
        again = another.build(normed)
        going_on = another.dataset((X, Y), global_batch_size=12, seed=3)
        resume = tfdist.Checkpoints(folder / "kept", resume=True)
        again.fit(going_on, epochs=2 + number, callbacks=[resume], verbose=0)
    assert_near(again.get_weights(), reference.get_weights())


@scenario("stages", "stages_of_workers", "mesh", "mesh_of_workers")
def the_file_is_keras_own(strategy, folder):
    model, reference = pair(strategy, normed)
    strategy.save(model, folder / "model.keras")
    assert_near(keras.models.load_model(folder / "model.keras").predict(X, verbose=0),
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


@scenario("mesh", "mesh_of_workers")
def slices_of_all_ranks(strategy, folder):
    """What one rank alone has set is what all begin with."""
    model, reference = pair(strategy, normed)
    if not strategy.topology.is_chief:
        model.set_weights([weight + 1 for weight in reference.get_weights()])
    fit_both(strategy, model, reference, (X, Y))
    description = strategy.describe(model)
    assert [place.devices for place in description.places] == [("CPU:0", "CPU:1")] * 2


@scenario("mesh", "mesh_of_workers", long=True)
def a_divided_batch_in_each_rank(strategy, folder):
    divided = other(strategy, batch=2, model=1, keep_host_copy=False)
    assert divided.num_replicas == 4
    fit_both(divided, *pair(divided, normed), (X, Y))


@scenario("stages", "stages_of_workers", "mesh", "mesh_of_workers", long=True)
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


@scenario("mesh", "mesh_of_workers", long=True)
def a_mask_of_the_output(strategy, folder):
    """Ranks have unlike numbers of words, and one of them none of some batches."""

    def model_fn():
        inputs = keras.Input((5,), dtype="int32")
        x = layers.Dense(16, "tanh")(layers.Embedding(11, 16, mask_zero=True)(inputs))
        model = keras.Model(inputs, layers.Dense(3, "softmax")(x))
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        return model

    words = RNG.integers(1, 11, (49, 5)).astype(np.int32)
    words[::2, 2:], words[40:44] = 0, 0
    fit_both(strategy, *pair(strategy, model_fn), (words, words % 3))


@scenario("stages", "stages_of_workers", "mesh", "mesh_of_workers", long=True)
def labels_of_a_class_that_the_loss_leaves_out(strategy, folder):
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=-1)

    def model_fn():
        inputs = keras.Input((5,), dtype="int32")
        x = layers.Dense(16, "tanh")(layers.Embedding(11, 16)(inputs))
        model = keras.Model(inputs, layers.Dense(3, "softmax")(x))
        model.compile(keras.optimizers.SGD(0.1), loss)
        return model

    words = RNG.integers(0, 11, (49, 5)).astype(np.int32)
    labels = np.where(words < 4, -1, words % 3)
    labels[41:44], labels[44:] = -1, 1  # A rank may have none of a batch.
    fit_both(strategy, *pair(strategy, model_fn), (words, labels))


@scenario("stages_of_workers", "mesh_of_workers", long=True)
def a_worker_that_does_not_step_is_waited_for_until_the_deadline(strategy, folder):
    """Last: the collectives are ended by it."""
    options = {"stages": 2, "microbatches": 3} if strategy.name == "pipeline" else {"model": 2}
    impatient = tfdist.strategy(strategy.name, replicas="multi_worker", **options)
    impatient._replicas = MultiWorker(stall_timeout_s=3)
    impatient.start()

    class Sleepy(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2 and not strategy.topology.is_chief:
                time.sleep(8)

    model = impatient.build(normed)
    feed = impatient.dataset((X, Y), global_batch_size=12)
    with pytest.raises(LaunchError, match="all workers must take every step together") as caught:
        model.fit(feed, callbacks=[Sleepy()], verbose=0)
    if strategy.topology.is_chief:
        assert "rank 0" in str(caught.value)
        assert "epoch 1, step 4" in str(caught.value)
