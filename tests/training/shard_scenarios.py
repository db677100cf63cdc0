"""Optimizers whose slots the replicas divide, against one device."""

from __future__ import annotations

import gc
import shutil
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from one_device import assert_near, equals_one_device, pair, trains_as_one_device
from scenarios import scenario
from tensorflow import keras

sys.path.append(str(Path(__file__).parent))
import options_scenarios
from options_scenarios import data, given, mlp, tagger, words

import tfdist
from tfdist.errors import ModelError, OptionError
from tfdist.training.engine.binding import binding_of
from tfdist.training.memory.sharded_slots import Parts

layers, optimizers = keras.layers, keras.optimizers


def sharded(strategy: Any, **options: Any) -> Any:
    return given(strategy, shard="optimizer", **options)


def bytes_of_each(model: keras.Model) -> list[int]:
    return binding_of(model, needed_by="the test").sharded.bytes_of_each()


def assert_slots_are_divided(strategy: Any, model: keras.Model, reference: keras.Model) -> None:
    """Looks at bytes that are held, and at the slots' numbers."""
    # The others count iterations, or are the rate.
    slots = [v for v in reference.optimizer.variables if len(v.shape)]
    trained = reference.trainable_variables
    per_weight = len(slots) // len(trained)
    parts = sum(-(-int(np.prod(v.shape)) // strategy.num_replicas) for v in trained)
    each = bytes_of_each(model)
    assert set(each) == {4 * parts * per_weight}
    whole = sum(slot.numpy().nbytes for slot in slots)
    assert each[0] <= whole / strategy.num_replicas + 4 * len(slots)
    assert not sum(v.numpy().size for v in model.optimizer.variables if len(v.shape))
    with binding_of(model, needed_by="the test").sharded.whole(everywhere=True):
        for one, other in zip(
            model.optimizer.variables, reference.optimizer.variables, strict=True
        ):
            np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-5)


def small(optimizer: Any) -> keras.Model:
    """Five elements and one: neither can be divided evenly."""
    model = keras.Sequential([keras.Input((5,)), layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model


def decaying() -> Any:
    optimizer = optimizers.AdamW(0.02, weight_decay=0.2, epsilon=1e-3, global_clipnorm=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


@scenario("mirrored", "keras_3", long=True)
def every_elementwise_optimizer(strategy, folder):
    made: list[Callable[[], Any]] = [
        lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
        lambda: optimizers.Adam(0.02, epsilon=1e-3, amsgrad=True),
        lambda: optimizers.Adamax(0.02),
        lambda: optimizers.Adagrad(0.1),
        lambda: optimizers.Adadelta(0.5),
        lambda: optimizers.RMSprop(0.02, momentum=0.5, centered=True, epsilon=1e-3),
        lambda: optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
        lambda: optimizers.Lion(0.01),
    ]
    for make in made:
        model, reference = equals_one_device(
            sharded(strategy), lambda make=make: small(make()), data(17)
        )
        assert_slots_are_divided(strategy, model, reference)


@scenario("mirrored", "keras_3", long=True)
def a_schedule_and_clipping_of_each_gradient(strategy, folder):
    def model_fn():
        rate = optimizers.schedules.ExponentialDecay(0.02, 3, 0.7)
        return mlp(optimizer=optimizers.Adam(rate, epsilon=1e-3, clipnorm=0.05))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parts, "scatter", None)  # No process ever holds whole slots.
        model, reference = equals_one_device(sharded(strategy), model_fn, data())
    assert_slots_are_divided(strategy, model, reference)
    assert model.optimizer.iterations.numpy() == reference.optimizer.iterations.numpy()


@scenario("mirrored", "horovod", "multi_worker", "keras_3", long=True)
def decay_with_exclusions_and_clipping_of_all(strategy, folder):
    two = sharded(strategy, accumulate_steps=2)
    model, reference = equals_one_device(two, lambda: mlp(optimizer=decaying()), data())
    assert_slots_are_divided(strategy, model, reference)


@scenario(long=True)
def averages_of_weights_and_constraints(strategy, folder):
    def model_fn(every: int | None = None) -> keras.Model:
        model = keras.Sequential(
            [
                keras.Input((5,)),
                layers.Dense(8, "tanh", kernel_constraint=keras.constraints.MaxNorm(0.5)),
                layers.Dense(3, "softmax"),
            ]
        )
        average = {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": every}
        optimizer = optimizers.Adam(0.02, epsilon=1e-3, **average)
        model.compile(optimizer, "sparse_categorical_crossentropy")
        return model

    for every in (None, 3):
        equals_one_device(sharded(strategy), lambda n=every: model_fn(n), data())


@scenario(long=True)
def words_that_are_looked_up(strategy, folder):
    """Keras clips the gradients of an embedding row by row, each as often as it was looked up."""
    x, y, weight = words()
    x[:, 0] = 1  # Of a batch without any word Keras' mean is not finite.
    for clip in ({"clipnorm": 0.02}, {"clipvalue": 0.001}):

        def model_fn(clip=clip):
            model = tagger(blocks=0)
            model.compile(
                optimizers.RMSprop(0.01, epsilon=1e-3, **clip), "sparse_categorical_crossentropy"
            )
            return model

        model, _ = equals_one_device(sharded(strategy), model_fn, (x, y, weight))
        assert all(np.all(np.isfinite(value)) for value in model.get_weights())


@scenario("mirrored", "horovod", long=True)
def what_overflows_on_one_replica_updates_none(strategy, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options_scenarios, "given", sharded)
        options_scenarios.what_overflows_on_one_replica_updates_none(strategy, folder)


@scenario(long=True)
def rates_that_callbacks_set(strategy, folder):
    model, reference = pair(sharded(strategy), lambda: mlp(optimizer=optimizers.Adam(0.02)))
    feed = sharded(strategy).dataset(data(), global_batch_size=8, seed=2)

    def halved(epoch: int, rate: float) -> float:
        return rate / 2

    rates = [keras.callbacks.LearningRateScheduler(halved)]
    found = model.fit(feed, epochs=3, callbacks=rates, verbose=0).history
    reference.fit(
        feed.on_one_device().epochs(0, 3),
        epochs=3,
        steps_per_epoch=feed.steps_per_epoch,
        callbacks=rates,
        verbose=0,
    )
    assert_near(model.get_weights(), reference.get_weights())
    assert found["learning_rate"][-1] == pytest.approx(0.02 / 8)


@scenario(long=True)
def a_fit_within_the_scope_of_tensorflow(strategy, folder):
    model, reference = pair(sharded(strategy), adam)
    x, y, _ = data(16)
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    with model.distribute_strategy.scope():
        model.fit(x, y, **options)
    reference.fit(x, y, **options)
    assert_near(model.get_weights(), reference.get_weights())
    assert_slots_are_divided(strategy, model, reference)


@scenario("mirrored", "horovod", "multi_worker", "keras_3", long=True)
def fewer_rows_than_replicas(strategy, folder):
    """As all that there are, and as all that is left."""
    divides = sharded(strategy)
    for rows in (1, 9):
        model, reference = pair(divides, mlp)
        trains_as_one_device(divides, model, reference, data(rows))
    assert_slots_are_divided(divides, model, reference)
    with pytest.raises(OptionError, match=r"at least the number of replicas, here 2, but found 1"):
        divides.dataset(data(), global_batch_size=1)
    if strategy.name == "multi_worker":
        # With the gathering of weights as many bytes as one sum: no worker gets whole gradients.
        scatter = tf.function(lambda: divides.connect().reduce_scatter(tf.ones([2, 3]), "this"))
        operations = scatter.get_concrete_function().graph.get_operations()
        kinds = {operation.type for operation in operations}
        assert "CollectiveAllToAllV2" in kinds
        assert "CollectiveReduceV2" not in kinds


@scenario(long=True)
def batches_by_hand_and_other_optimizers(strategy, folder):
    """An optimizer that comes back finds its slots."""
    model, reference = pair(sharded(strategy), lambda: mlp(metrics=None))
    x, y, _ = data(8)
    first = model.optimizer, reference.optimizer
    for one in (model, reference):
        for _ in range(2):
            one.train_on_batch(x, y)
        one.train_on_batch(x[:1], y[:1])  # Fewer rows than replicas.
    for one in (model, reference):
        one.compile("adagrad", "sparse_categorical_crossentropy")
        one.train_on_batch(x, y)
    for one, optimizer in zip((model, reference), first, strict=True):
        one.compile(optimizer, "sparse_categorical_crossentropy")
        one.train_on_batch(x, y)
    assert_near(model.get_weights(), reference.get_weights())


@scenario("mirrored")
def settings_that_are_changed_before_another_compile(strategy, folder):
    model, reference = pair(sharded(strategy), lambda: small(optimizers.SGD(0.1, 0.9)))
    x = data(8)[0]
    for momentum in (0.9, 0.1):
        for one in (model, reference):
            one.optimizer.momentum = momentum
            one.compile(one.optimizer, "mse")
            one.fit(x, x[:, :1], epochs=2, verbose=0)
    assert_near(model.get_weights(), reference.get_weights())


@scenario(long=True)
def optimizers_that_nobody_has_any_more(strategy, folder):
    """Phases of fine-tuning hold the slots of the last one."""
    model, reference = pair(sharded(strategy), lambda: mlp(metrics=None))
    x, y, _ = data(16)
    gone = []
    for rate in (0.02, 0.01, 0.005):
        for one in (model, reference):
            optimizer = optimizers.Adam(rate, epsilon=1e-3)
            one.compile(optimizer, "sparse_categorical_crossentropy")
            one.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        parts = binding_of(model, needed_by="the test").sharded.parts
        gone += [weakref.ref(each) for each in (model.optimizer, parts, parts.twin)]
    del optimizer, parts
    gc.collect()
    assert [each() is None for each in gone] == [True] * 6 + [False] * 3
    assert_near(model.get_weights(), reference.get_weights())


@scenario(long=True)
def a_fit_after_one_that_did_not_begin(strategy, folder):
    class Broken(tfdist.Checkpoints):
        def bind(self, *args: Any, **options: Any) -> Any:
            raise KeyboardInterrupt

    model, reference = pair(sharded(strategy), adam)
    x, y, _ = data(16)
    fit = {"batch_size": 8, "shuffle": False, "verbose": 0}
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, callbacks=[Broken(folder)], **fit)
    slots = binding_of(model, needed_by="the test").sharded
    assert slots.held(model.optimizer.variables) == list(model.optimizer.variables)
    for one in (model, reference):
        one.fit(x, y, **fit)
    assert_slots_are_divided(strategy, model, reference)
    assert_near(model.get_weights(), reference.get_weights())


@scenario(long=True)
def optimizers_that_were_made_outside_of_the_scope(strategy, folder):
    """They have one counter for all replicas."""
    model, reference = pair(sharded(strategy), lambda: mlp(metrics=None))
    x, y, _ = data(16)
    for make in (
        lambda: optimizers.Adam(optimizers.schedules.ExponentialDecay(0.02, 1, 0.5), epsilon=1e-3),
        lambda: keras.mixed_precision.LossScaleOptimizer(optimizers.Adam(0.02, epsilon=1e-3)),
    ):
        for one in (model, reference):
            one.compile(make(), "sparse_categorical_crossentropy")
            one.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        assert model.optimizer.iterations.numpy() == reference.optimizer.iterations.numpy() == 2
        assert_near(model.get_weights(), reference.get_weights())
    assert model.optimizer.dynamic_counter.numpy() == 2


class Break(keras.callbacks.Callback):
    def __init__(self, batch: int):
        super().__init__()
        self.batch = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == self.batch:
            raise KeyboardInterrupt


def adam() -> keras.Model:
    return mlp(optimizer=optimizers.Adam(0.02, epsilon=1e-3))


def in_order(strategy: Any) -> Any:
    """Returns records whose batches are the same on any number of processes."""
    return strategy.dataset(data(45), global_batch_size=8, training=False)


def broken_fit_goes_on_on_one_device(
    divides: Any, model_fn: Callable[[], keras.Model], folder: Path
) -> tuple[list[np.ndarray], keras.Model]:
    """Keeps a broken fit in ``folder / "one"``, and compares what one device makes of it.

    Returns:
        The weights of an unbroken fit, and the model that it is compared with before any step.
    """
    feed = in_order(divides)
    unbroken, other = pair(divides, model_fn)
    unbroken.fit(feed, epochs=2, verbose=0)
    broken, _ = pair(divides, model_fn)
    keep = tfdist.Checkpoints(folder / "one", every_steps=2)
    with pytest.raises(KeyboardInterrupt):
        broken.fit(feed, epochs=2, callbacks=[keep, Break(3)], verbose=0)
    divides.from_chief(None)
    alone = None
    if divides.topology.is_chief:
        shutil.copytree(folder / "one", folder / "two")
        single = tfdist.strategy("single")
        model = single.build(model_fn)
        resume = tfdist.Checkpoints(folder / "two", resume=True)
        model.fit(in_order(single), epochs=2, callbacks=[resume], verbose=0)
        alone = model.get_weights()
    expected = unbroken.get_weights()
    assert_near(divides.from_chief(alone), expected)
    return expected, other


@scenario("mirrored", "horovod", "multi_worker", "keras_3")
def a_resumed_fit(strategy, folder):
    """On as many replicas, and on one device."""
    divides = sharded(strategy)
    expected, _ = broken_fit_goes_on_on_one_device(divides, adam, folder)
    resumed = divides.build(adam)
    resume = tfdist.Checkpoints(folder / "one", every_steps=2, resume=True)
    resumed.fit(in_order(divides), epochs=2, callbacks=[resume], verbose=0)
    assert_near(resumed.get_weights(), expected, 1e-6)


@scenario("mirrored", "horovod", long=True)
def a_checkpoint_of_one_device(strategy, folder):
    """The slots of another strategy are divided."""
    divides = sharded(strategy)
    unbroken, other = pair(divides, adam)
    unbroken.fit(in_order(divides), epochs=2, verbose=0)
    if strategy.topology.is_chief:
        single = tfdist.strategy("single")
        alone = single.build(adam)
        alone.set_weights(other.get_weights())
        alone.fit(in_order(single), callbacks=[tfdist.Checkpoints(folder)], verbose=0)
    strategy.from_chief(None)
    model = divides.build(adam)
    resume = tfdist.Checkpoints(folder, resume=True)
    model.fit(in_order(divides), epochs=2, callbacks=[resume], verbose=0)
    assert_near(model.get_weights(), unbroken.get_weights())


@scenario("mirrored", "horovod", "keras_3", long=True)
def slots_that_were_restored_before_the_first_fit(strategy, folder):
    """Keras gives them to the slots when they are made; only the chief has read them."""
    divides = sharded(strategy)
    x, y, _ = data(16)
    model, reference = pair(divides, adam)
    reference.train_on_batch(x, y)
    if strategy.topology.is_chief:
        path = tf.train.Checkpoint(m=reference, o=reference.optimizer).save(folder / "own")
        tf.train.Checkpoint(m=model, o=model.optimizer).restore(path)
    strategy.from_chief(None)
    for one in (model, reference):
        one.train_on_batch(x, y)
    assert_near(model.get_weights(), reference.get_weights())


def assert_files_go_on(
    divides: Any, models: tuple[Any, Any], feed: Any, folder: Path, names: tuple[str, ...]
) -> None:
    """Compares files of a model, after two epochs, with one device's, and goes on from one."""
    model, reference = models
    batches = feed.on_one_device().epochs(0, 3)
    reference.fit(batches.take(8), epochs=2, steps_per_epoch=4, verbose=0)
    for name in names:
        loaded = keras.models.load_model(folder / name)
        assert_near(loaded.get_weights(), reference.get_weights())
        if name == "saved":  # Of which Keras reads no slots.
            continue
        pairs = zip(loaded.optimizer.variables, reference.optimizer.variables, strict=True)
        for one, other in pairs:
            np.testing.assert_allclose(one.numpy(), other.numpy(), atol=1e-5, err_msg=name)
    # What was loaded goes on where it was, and so does what was saved.
    again = divides.build(lambda: keras.models.load_model(folder / "model.keras"))
    for one in (model, again):
        one.fit(feed, epochs=3, initial_epoch=2, verbose=0)
    reference.fit(batches.skip(8), steps_per_epoch=4, verbose=0)
    assert_near(model.get_weights(), reference.get_weights())
    assert_near(again.get_weights(), reference.get_weights())


@scenario("mirrored", "horovod", "multi_worker", "keras_3", long=True)
def files_are_those_of_one_device(strategy, folder):
    divides = sharded(strategy)
    model, reference = pair(divides, adam)
    feed = divides.dataset(data(), global_batch_size=8, seed=2)
    best = keras.callbacks.ModelCheckpoint(str(folder / "best.keras"), monitor="loss")
    model.fit(feed, epochs=2, callbacks=[best], verbose=0)
    divides.save(model, folder / "model.keras")
    model.save(folder / "own.keras")
    strategy.from_chief(None)
    names = ("model.keras", "own.keras", "best.keras")
    assert_files_go_on(divides, (model, reference), feed, folder, names)


class Whole(optimizers.SGD):
    def update_step(self, gradient: Any, variable: Any) -> None:
        super().update_step(gradient / tf.norm(gradient), variable)


class OwnStep(keras.Model):
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


@scenario("mirrored", "horovod", "keras_3")
def a_file_that_is_loaded_into_a_trained_model(strategy, folder):
    """It brings slots, too, as that of one device does."""
    divides = sharded(strategy)
    model, reference = pair(divides, adam)
    batch = tuple(array[:8] for array in data())
    for one, name in (
        (model, "ours.weights.h5"),
        (reference, f"{strategy.topology.rank}.weights.h5"),
    ):
        one.train_on_batch(*batch)
        one.save_weights(folder / name)
        strategy.from_chief(None)
        for _ in range(2):
            one.train_on_batch(*batch)
        one.load_weights(folder / name)
        one.train_on_batch(*batch)
    assert_near(model.get_weights(), reference.get_weights())


@scenario("mirrored", "horovod")
def what_cannot_be_divided_is_refused(strategy, folder):
    divides = sharded(strategy)
    for optimizer in (optimizers.Adafactor(), optimizers.Nadam(), Whole()):
        with pytest.raises(ModelError, match=r"must update each element.*Choose one of"):
            divides.build(lambda optimizer=optimizer: small(type(optimizer)()))
    with pytest.raises(ModelError, match=r"found tf.keras.optimizers.legacy.SGD\."):
        divides.build(lambda: small(optimizers.legacy.SGD()))
    model = divides.build(lambda: small("sgd"))
    with pytest.raises(ModelError, match="must update each element"):
        model.compile("nadam", "mse")

    def own_step() -> keras.Model:
        inputs = keras.Input((5,))
        model = OwnStep(inputs, layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
        return model

    with pytest.raises(
        ModelError, match="accumulate_steps, recompute, shard or offload, and a train_step"
    ):
        divides.build(own_step)
    feed, model = divides.dataset(data(), global_batch_size=8), divides.build(mlp)
    with pytest.raises(ModelError, match="recompute, shard or offload, and a step of its own"):
        divides.run(lambda batch: {}, feed, model=model)
    with pytest.raises(OptionError, match=r"shard must be a known one.*optimizer, weights"):
        given(strategy, shard="slots")

    def tiny() -> keras.Model:
        model = keras.Sequential([keras.Input((1,)), layers.Dense(1, use_bias=False)])
        model.compile("sgd", "mse")
        return model

    x = np.ones((8, 1), np.float32)
    with pytest.raises(ModelError, match=r"an element of a weight for each replica"):
        divides.build(tiny).fit(x, x, verbose=0)


@scenario("mirrored", "horovod")
def a_checkpoint_of_ones_own_is_refused(strategy, folder):
    divides = sharded(strategy)
    model = divides.build(adam)
    own = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    before = own.write(str(folder / f"before{strategy.topology.rank}"))  # Nothing is divided yet.
    model.fit(divides.dataset(data(), global_batch_size=8), verbose=0)
    for checkpoint in (own, tf.train.Checkpoint(optimizer=model.optimizer)):
        for use in (lambda own: own.write(str(folder / "own")), lambda own: own.read(before)):
            with pytest.raises(ModelError, match=r"slots .* must be kept by tfdist\.Checkpoints"):
                use(checkpoint)
    assert not list(folder.glob("own*"))
    # What brings them together writes on.
    model.save_weights(folder / "weights")
    strategy.from_chief(None)  # All have come so far.
    assert list(folder.glob("weights*"))
