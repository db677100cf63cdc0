"""Weights that the replicas divide, against one device; beside the scenarios of divided slots."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from one_device import assert_near, equals_one_device, pair
from scenarios import scenario
from tensorflow import keras

sys.path.append(str(Path(__file__).parent))
from options_scenarios import assert_judges_as_one_device, data, given, tagger, words
from shard_scenarios import (
    assert_files_go_on,
    broken_fit_goes_on_on_one_device,
    decaying,
    in_order,
)

import tfdist
from tfdist.errors import ModelError, OptionError
from tfdist.training.engine.binding import binding_of

layers, optimizers = keras.layers, keras.optimizers


def divided(strategy: Any, **options: Any) -> Any:
    return given(strategy, shard="weights", **options)


def block(width: int, number: int) -> keras.Model:
    """As people write a block: a model within the model."""
    inner = [layers.Dense(width, "tanh"), layers.Dense(7)]
    return keras.Sequential([keras.Input((7,)), *inner], name=f"block{number}")


def stack(optimizer: Any = None, blocks: int = 3) -> keras.Model:
    """Of 7 and 9 columns: nothing can be divided evenly. Its ends are outside of blocks."""
    x = inputs = keras.Input((5,))
    x = layers.Dense(7, "tanh")(x)
    for number in range(blocks):
        x = layers.Add()([x, block(9, number)(x)])
    model = keras.Model(inputs, layers.Dense(3, "softmax")(x))
    model.compile(
        optimizer or optimizers.Adam(0.02, epsilon=1e-3),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def sharded(model: keras.Model) -> Any:
    return binding_of(model, needed_by="the test").sharded


def held(variable: Any) -> int:
    """Returns the elements that a variable itself has."""
    own = getattr(variable, "_variable", variable)
    try:
        return int(tf.size(tf.raw_ops.ReadVariableOp(resource=own.handle, dtype=own.dtype)))
    except tf.errors.FailedPreconditionError:
        return 0


def assert_is_divided(model: keras.Model, reference: keras.Model, names: tuple[str, ...]) -> None:
    """Looks at what is held, and at the numbers of weights and slots."""
    of_blocks = [w for name in names for w in model.get_layer(name).trainable_weights]
    assert of_blocks
    assert not any(held(weight) for weight in of_blocks)
    parts = sharded(model).trained(of_blocks)
    sizes = [-(-int(np.prod(weight.shape)) // 2) for weight in of_blocks]
    assert [part.shape.num_elements() for part in parts] == sizes
    assert not any(held(slot) for slot in model.optimizer.variables if len(slot.shape))
    with sharded(model).whole(everywhere=True):
        pairs = zip(model.optimizer.variables, reference.optimizer.variables, strict=True)
        for one, other in pairs:
            np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-5)
    assert not any(held(weight) for weight in of_blocks)


OF_STACK = ("block0", "block1", "block2")


@scenario("horovod", "multi_worker", long=True)
def a_stack_of_blocks(strategy, folder):
    """25 rows in batches of 8: the last one has one row, which is that of one rank."""
    model, reference = equals_one_device(divided(strategy), stack, data())
    assert_is_divided(model, reference, OF_STACK)
    assert_judges_as_one_device(divided(strategy), model, reference, data())


@scenario("horovod", "multi_worker", long=True)
def attention_and_masks(strategy, folder):
    records = words()
    model, reference = equals_one_device(divided(strategy), tagger, records)
    assert_is_divided(model, reference, ("block0", "block1"))
    x = records[0]
    found = model.predict(x, batch_size=8, verbose=0)
    np.testing.assert_allclose(found, reference.predict(x, verbose=0), atol=1e-5)


@scenario("horovod", "multi_worker")
def decay_clipping_and_microbatches(strategy, folder):
    two = divided(strategy, accumulate_steps=2, offload="activations")
    model, reference = equals_one_device(two, lambda: stack(decaying()), data())
    assert_is_divided(model, reference, OF_STACK)
    for clip in ({"clipnorm": 0.05}, {"clipvalue": 0.01}):
        adam = {"learning_rate": 0.02, "epsilon": 1e-3, **clip}
        equals_one_device(
            divided(strategy), lambda adam=adam: stack(optimizers.Adam(**adam), 1), data(17)
        )


def normalized(dropout: float = 0.0) -> keras.Model:
    x = inputs = keras.Input((5,))
    for number in range(2):
        inner = [layers.Dense(7), layers.BatchNormalization(momentum=0.8), layers.Dropout(dropout)]
        x = keras.Sequential([keras.Input(x.shape[1:]), *inner], name=f"block{number}")(x)
    model = keras.Model(inputs, layers.Dense(3, "softmax")(x))
    model.compile(optimizers.SGD(0.2, momentum=0.9), "sparse_categorical_crossentropy")
    return model


@scenario("horovod", "multi_worker", long=True)
def statistics_of_batches(strategy, folder):
    model, reference = equals_one_device(divided(strategy), normalized, data())
    assert_is_divided(model, reference, ("block0", "block1"))


@scenario("horovod", long=True)
def what_recompute_gives_without_parts(strategy, folder):
    """Dropout and 16 bits differ from one device: the same strategy with whole weights is as it."""
    x, y, _ = data(24)
    named = {"recompute": ["block0", "block1"]}
    for options in ({}, {"precision": "mixed_bfloat16"}, {"precision": "mixed_float16"}):
        found = []
        for shard in ("none", "weights"):
            keras.utils.set_random_seed(3)
            own = given(strategy, shard=shard, **named, **options)
            model = own.build(lambda: normalized(dropout=0.4))
            model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
            found.append([*model.get_weights(), np.float32(model.predict(x, verbose=0))])
        assert_near(*found, tolerance=1e-5 if not options else 2e-3)


def flat(optimizer: Any = None, **compile_options: Any) -> keras.Model:
    """Without blocks; it adds losses of its own, and a part of it may be frozen."""
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int64"),
            layers.Embedding(6, 5, name="table"),
            layers.Flatten(),
            layers.Dense(7, "tanh", activity_regularizer=keras.regularizers.L2(0.1), name="one"),
            layers.Dense(5, "tanh", name="two"),
            layers.Dense(3, "softmax", name="three"),
        ]
    )
    model.compile(
        optimizer or optimizers.RMSprop(0.02), "sparse_categorical_crossentropy", **compile_options
    )
    return model


def of_words(rows: int = 24) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 6, (rows, 4)), rng.integers(0, 3, rows)


@scenario("horovod", "multi_worker", long=True)
def tables_losses_of_layers_and_chosen_layers(strategy, folder):
    names = ("table", "one", "two", "three")
    model, reference = equals_one_device(divided(strategy), flat, of_words(25))
    assert_is_divided(model, reference, names)
    some = divided(strategy, recompute="one,two")
    model, reference = equals_one_device(some, flat, of_words(25))
    assert_is_divided(model, reference, ("one", "two"))
    assert held(model.get_layer("three").kernel)


@scenario(long=True)
def weights_that_are_read_and_set_between_fits(strategy, folder):
    """What the chief is given holds for all, as with whole weights."""
    x, y, _ = data(24)
    fit = {"batch_size": 8, "shuffle": False, "verbose": 0}
    model, reference = pair(divided(strategy), stack)
    before = reference.get_weights()
    for one in (model, reference):
        one.evaluate(x, y, verbose=0)  # Of whole weights yet.
        one.fit(x, y, **fit)
    assert_near(model.get_weights(), reference.get_weights())
    np.testing.assert_allclose(model(x), reference(x), atol=1e-5)
    reference.save_weights(str(folder / f"{strategy.topology.rank}.h5"))
    mixed = [0.5 * weight + 0.01 for weight in before]
    reference.set_weights(mixed)
    model.set_weights(mixed if strategy.topology.is_chief else before)
    assert_near(model.get_weights(), mixed)
    np.testing.assert_allclose(
        model.predict(x, verbose=0), reference.predict(x, verbose=0), atol=1e-5
    )
    model.load_weights(str(folder / f"{strategy.topology.rank}.h5"))
    reference.load_weights(str(folder / f"{strategy.topology.rank}.h5"))
    for one in (model, reference):
        # The loss falls, so the first weights are the "best".
        stop = keras.callbacks.EarlyStopping("loss", mode="max", restore_best_weights=True)
        one.compile(optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        one.fit(x, y, epochs=4, callbacks=[stop], **fit)
        one.train_on_batch(x[:8], y[:8])
    assert_near(model.get_weights(), reference.get_weights())


@scenario(long=True)
def optimizers_that_nobody_has_any_more(strategy, folder):
    x, y, _ = data(16)
    model, reference = pair(divided(strategy), stack)
    gone = []
    for rate in (0.02, 0.01, 0.005):
        for one in (model, reference):
            optimizer = optimizers.Adam(rate, epsilon=1e-3)
            one.compile(optimizer, "sparse_categorical_crossentropy")
            one.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        gone += [weakref.ref(each) for each in (model.optimizer, sharded(model).parts)]
    first = optimizer = model.optimizer
    model.compile(optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    assert_near(model.get_weights(), reference.get_weights())  # Before it has slots in parts.
    model.compile(optimizer, "sparse_categorical_crossentropy")  # One that comes back.
    for one in (model, reference):
        one.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert model.optimizer is first
    del optimizer, first
    gc.collect()
    assert [each() is None for each in gone] == [True] * 4 + [False] * 2
    assert_near(model.get_weights(), reference.get_weights())


@scenario(long=True)
def weights_that_another_rank_alone_was_given(strategy, folder):
    x, y, _ = data(24)
    model = divided(strategy).build(stack)
    model.fit(x, y, batch_size=8, verbose=0)
    if strategy.topology.rank == 1:
        model.set_weights([0.0 * weight for weight in stack().get_weights()])
    with pytest.raises(ModelError, match=r"load_weights on rank 1, and not on rank 0"):
        model.fit(x, y, batch_size=8, verbose=0)


@scenario("horovod", "multi_worker", long=True)
def a_resumed_fit_of_divided_weights(strategy, folder):
    """On as many replicas, on one device, and from one device on."""
    divides = divided(strategy)
    expected, other = broken_fit_goes_on_on_one_device(divides, stack, folder)
    if strategy.topology.is_chief:
        single = tfdist.strategy("single")
        model = single.build(stack)
        model.set_weights(other.get_weights())
        keep = tfdist.Checkpoints(folder / "three")
        model.fit(in_order(single), callbacks=[keep], verbose=0)
    strategy.from_chief(None)
    for name in ("one", "three"):
        resumed = divides.build(stack)
        resume = tfdist.Checkpoints(folder / name, every_steps=2, resume=True)
        resumed.fit(in_order(divides), epochs=2, callbacks=[resume], verbose=0)
        assert_near(resumed.get_weights(), expected)


@scenario("horovod", "multi_worker", long=True)
def files_of_divided_weights(strategy, folder):
    divides = divided(strategy)
    model, reference = pair(divides, stack)
    feed = divides.dataset(data(), global_batch_size=8, seed=2)
    best = keras.callbacks.ModelCheckpoint(str(folder / "best.keras"), monitor="loss")
    model.fit(feed, epochs=2, callbacks=[best], verbose=0)
    divides.save(model, folder / "model.keras")
    model.save(folder / "own.h5")
    model.save(folder / "saved")
    strategy.from_chief(None)
    names = ("model.keras", "own.h5", "best.keras", "saved")
    assert_files_go_on(divides, (model, reference), feed, folder, names)


@scenario(long=True)
def weights_in_a_file_of_tensorflows_format(strategy, folder):
    """It holds the slots, too."""
    model, reference = pair(divided(strategy), stack)
    x, y, _ = data(16)
    fit = {"batch_size": 8, "shuffle": False, "verbose": 0}
    for one in (model, reference):
        one.fit(x, y, **fit)
    model.save_weights(folder / "weights")
    strategy.from_chief(None)  # The chief has written it.
    for one in (model, reference):
        one.fit(x, y, **fit)
        one.load_weights(folder / "weights")
    assert_near(model.get_weights(), reference.get_weights())
    for one in (model, reference):
        one.fit(x, y, **fit)
    assert_near(model.get_weights(), reference.get_weights())
    own = tf.train.Checkpoint(optimizer=model.optimizer)
    with pytest.raises(ModelError, match=r"\(shard='weights'\) must be kept by tfdist\.Check"):
        own.read(str(folder / "weights"))


class Unused(layers.Layer):
    def build(self, shape: Any) -> None:
        self.used, self.other = self.add_weight("used", (4,)), self.add_weight("other", (4,))

    def call(self, x: Any) -> Any:
        return x * self.used


def refused(*inner: Any, optimizer: Any = "sgd") -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), *inner])
    model.compile(optimizer, "mse")
    return model


@scenario(long=True)
def weights_that_cannot_be_divided(strategy, folder):
    divides, dense = divided(strategy), layers.Dense
    l2, norm = keras.regularizers.L2(0.1), keras.constraints.MaxNorm(1.0)
    builds = [
        (lambda: refused(dense(4, kernel_regularizer=l2)), r"a regularizer of layer"),
        (lambda: refused(dense(4, bias_constraint=norm)), r"a constraint of '.*bias"),
        (lambda: refused(layers.Flatten()), r"must have blocks .*none in model"),
        (
            lambda: refused(dense(4), optimizer=optimizers.Adam(use_ema=True)),
            r"must have no averages.*use_ema=True",
        ),
        (lambda: flat(run_eagerly=True), "must take its steps as graphs"),
        (lambda: refused(dense(4), optimizer="nadam"), r"shard='weights'.*must update each"),
    ]
    for build, match in builds:
        with pytest.raises(ModelError, match=match):
            divides.build(build)
    with pytest.raises(OptionError, match=r"layer in recompute must be a known one"):
        divided(strategy, recompute="other").build(lambda: refused(dense(4)))
    with pytest.raises(OptionError, match=r"on strategy 'horovod' or 'multi_worker'.*mirrored"):
        tfdist.strategy("mirrored", shard="weights")
    x = np.ones((8, 4), np.float32)
    with pytest.raises(ModelError, match=r"must be used in it.*other"):
        divides.build(lambda: refused(Unused())).fit(x, x, verbose=0)
    clips = divides.build(lambda: flat(optimizers.SGD(0.1, clipnorm=1.0)))
    with pytest.raises(ModelError, match=r"a table that replicas divide"):
        clips.fit(*of_words(), verbose=0)
    model = divides.build(lambda: refused(dense(4)))
    model.fit(x, x, verbose=0)
    kernel = model.trainable_weights[0]
    for use in (lambda: kernel.numpy(), lambda: kernel + 1.0, lambda: kernel.assign_add(x)):
        with pytest.raises(ModelError, match=r"a weight that replicas divide"):
            use()
    with pytest.raises(tf.errors.OpError):  # TensorFlow reads the handle itself.
        tf.raw_ops.Identity(input=kernel)
    with pytest.raises(ModelError, match=r"must be kept by tfdist\.Checkpoints"):
        tf.train.Checkpoint(model=model).write(str(folder / "own"))
