"""What is at the edges of a pipeline's work: few rows, mixed precision, files of a model."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from one_device import assert_same_weights, equals_one_device
from scenarios import scenario
from tensorflow import keras

import tfdist
from tfdist.errors import ModelError
from tfdist.keras.layers import variables_in
from tfdist.keras.tensors import all_raw
from tfdist.keras.version import IS_KERAS_3
from tfdist.training.layers.randomness import StepSeeds

layers = keras.layers
RNG = np.random.default_rng(0)
X = RNG.normal(size=(21, 6, 6, 2)).astype(np.float32)
Y = RNG.integers(0, 3, 21)


def model_fn() -> keras.Model:
    """With a nested model, in which the stages are cut."""
    backbone = keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.Conv2D(4, 3, activation="tanh"),
            layers.BatchNormalization(),
            layers.Flatten(),
        ],
        name="backbone",
    )
    inputs = keras.Input((6, 6, 2))
    x = layers.Dropout(0.0)(layers.Dense(8, "tanh")(backbone(inputs)))
    model = keras.Model(inputs, layers.Dense(3, dtype="float32")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=["accuracy"])
    return model


def largest(one: Any, other: Any) -> float:
    pairs = zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True)
    return max(float(np.max(np.abs(np.subtract(a, b)))) for a, b in pairs)


def both(strategy: Any, make: Any = model_fn) -> tuple[keras.Model, keras.Model]:
    """Returns the same model as a pipeline and in plain Keras."""
    model, plain = strategy.build(make), make()
    model.set_weights(plain.get_weights())
    return model, plain


def train(strategy: Any, model: Any, plain: Any, rows: int) -> float:
    """Trains both and returns the largest difference of the losses."""
    feed = strategy.dataset((X[:rows], Y[:rows]), global_batch_size=8)
    found = model.fit(feed, epochs=2, verbose=0).history
    expected = plain.fit(
        feed.on_one_device().epochs(0, 2), epochs=2, steps_per_epoch=len(feed), verbose=0
    ).history
    return largest(found["loss"], expected["loss"])


def check_equal(strategy: Any, make: Any, rows: int) -> None:
    model, plain = both(strategy, make)
    assert train(strategy, model, plain, rows) < 1e-6
    assert largest(model.get_weights(), plain.get_weights()) < 1e-6


@scenario("pipeline", "keras_3")
def few_rows(strategy: Any, folder: Path) -> None:
    """One record, so fewer than microbatches, and a tail of one: in fit, evaluate, predict."""
    for rows in (1, 9):
        model, plain = both(strategy)
        assert train(strategy, model, plain, rows) < 1e-6, rows
        assert largest(model.get_weights(), plain.get_weights()) < 1e-6, rows
        x, y = X[:rows], Y[:rows]
        held_out = strategy.dataset((x, y), global_batch_size=8, training=False)
        expected = plain.evaluate(x, y, verbose=0)
        assert largest(model.evaluate(held_out, verbose=0), expected) < 1e-6, rows
        assert largest(model.evaluate(x, y, batch_size=5, verbose=0), expected) < 1e-6, rows
        expected = plain.predict(x, verbose=0)
        assert largest(model.predict(held_out, verbose=0), expected) < 1e-6, rows
        assert largest(model.predict(x, batch_size=5, verbose=0), expected) < 1e-6, rows


@scenario("pipeline", "keras_3")
def a_regularizer_counts_once_wherever_its_layer_is_called(strategy: Any, folder: Path) -> None:
    def made() -> keras.Model:
        inputs = keras.Input((6, 6, 2))
        shared = layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.5))
        one = layers.TimeDistributed(shared)(layers.Reshape((12, 6))(inputs))
        other = shared(layers.Dense(6, "tanh")(layers.Flatten()(inputs)))
        model = keras.Model(inputs, layers.Dense(3)(layers.Flatten()(one)) + other)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.05), loss)
        return model

    check_equal(strategy, made, 21)


@scenario
def losses_may_come_from_layers_alone(strategy: Any, folder: Path) -> None:
    """A mean, and a number for each row, of which Keras trains on the sum."""

    class Adds(layers.Layer):
        def __init__(self, axes: Any):
            super().__init__()
            self.axes = axes

        def call(self, x: tf.Tensor) -> tf.Tensor:
            self.add_loss(tf.reduce_mean(tf.square(x), self.axes))
            return x

    for axes in (None, 1):

        def made(axes: Any = axes) -> keras.Model:
            inputs = keras.Input((6, 6, 2))
            x = Adds(axes)(layers.Dense(4, "tanh")(layers.Flatten()(inputs)))
            model = keras.Model(inputs, Adds(axes)(layers.Dense(3)(x)))
            model.compile(keras.optimizers.SGD(0.05))
            return model

        check_equal(strategy, made, 21)


@scenario
def names_are_those_of_a_model_made_once(strategy: Any, folder: Path) -> None:
    def made() -> keras.Model:
        inputs = keras.Input((4,))
        model = keras.Model(inputs, layers.Dense(3, "softmax")(layers.Dense(8)(inputs)) * 1.0)
        model.compile("sgd", "mse", metrics=[keras.metrics.Precision()])
        return model

    keras.backend.clear_session()
    model = strategy.build(made)
    x, y = RNG.normal(size=(8, 4)), np.eye(3)[Y[:8]]
    assert "precision" in model.fit(x, y, batch_size=4, verbose=0).history
    names = ["input_1", "dense_1", "dense", "tf.math.multiply"]
    assert [layer.name for layer in model.layers] == names


@scenario
def what_a_model_is_compiled_with_anew_is_asked_for(strategy: Any, folder: Path) -> None:
    model = strategy.build(model_fn)
    for given, told in (({"jit_compile": True}, "without XLA"), ({"optimizer": "nadam"}, "Nadam")):
        with pytest.raises(ModelError, match=told):
            model.compile(**{"optimizer": "sgd", "loss": "mse"} | given)


@scenario
def a_loss_of_ones_own_may_be_called_by_its_name(strategy: Any, folder: Path) -> None:
    def own(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(y_pred - tf.cast(y_true, y_pred.dtype)))

    def made() -> keras.Model:
        model = model_fn()
        model.compile("sgd", "tfdist>own")
        return model

    with keras.utils.custom_object_scope({"tfdist>own": own}):
        check_equal(strategy, made, 9)


@scenario("pipeline", "keras_3")
def slots_that_a_model_fn_makes_begin_as_its_weights(strategy: Any, folder: Path) -> None:
    def made() -> keras.Model:
        keras.utils.set_random_seed(next(seeds))
        model = model_fn()
        model.compile(keras.optimizers.SGD(0.05, use_ema=True), model.loss)
        model.optimizer.build(model.trainable_variables)
        return model

    seeds = iter([1, 1, 2])  # Of one device, and of the two that a pipeline makes.
    plain, model = made(), strategy.build(made)
    train(strategy, model, plain, 21)
    assert largest(model.get_weights(), plain.get_weights()) < 1e-6


@scenario
def files(strategy: Any, folder: Path) -> None:
    model = strategy.build(model_fn)
    model.fit(strategy.dataset((X, Y), global_batch_size=8), verbose=0)
    expected = model.predict(X, verbose=0)
    for name in ("model.keras", "model.h5", "saved_model"):
        strategy.save(model, folder / name)
        loaded = keras.models.load_model(folder / name)
        assert largest(loaded.predict(X, verbose=0), expected) < 1e-6, name
        loaded.fit(X, Y, verbose=0)
        assert np.isfinite(loaded.evaluate(X, Y, verbose=0)[0]), name
    model.export(folder / "exported")
    exported = tf.saved_model.load(str(folder / "exported"))
    assert largest(exported.serve(X), expected) < 1e-6


@scenario("pipeline", "keras_3", long=True)
def mixed_float16(strategy: Any, folder: Path) -> None:
    check_mixed(strategy, "mixed_float16")


@scenario("pipeline", "keras_3", long=True)
def mixed_bfloat16(strategy: Any, folder: Path) -> None:
    check_mixed(strategy, "mixed_bfloat16")


def check_mixed(strategy: Any, policy: str) -> None:
    """As near to one device as its own half precision is to float32, and with its loss scale."""
    keras.utils.set_random_seed(1)
    exact = model_fn()
    start = exact.get_weights()
    keras.mixed_precision.set_global_policy(policy)
    try:
        model, plain = both(strategy)
        for one in (model, plain):
            one.set_weights(start)
        train(strategy, model, plain, 21)
        assert {v.dtype for v in all_raw(model.trainable_variables)} == {tf.float32}
        assert sorted({w.device[-5:] for w in variables_in(model)}) == ["CPU:0", "CPU:1"]
        if policy == "mixed_float16":
            # What Keras 3 calls it, then Keras 2.
            name = "dynamic_scale" if IS_KERAS_3 else "loss_scale"
            found, expected = (float(getattr(m.optimizer, name)) for m in (model, plain))
            assert found == expected
            # 2**15 at first: with a scale that is not taken out again nothing would be alike.
            assert found > 1000
    finally:
        keras.mixed_precision.set_global_policy("float32")
    exact_feed = strategy.dataset((X, Y), global_batch_size=8)
    exact.fit(exact_feed.on_one_device().epochs(0, 2), epochs=2, steps_per_epoch=3, verbose=0)
    rounding = largest(plain.get_weights(), exact.get_weights())
    assert 0 < largest(model.get_weights(), plain.get_weights()) < 2 * rounding
    assert rounding < 0.05 < largest(exact.get_weights(), start)


@scenario
def overflow_lowers_the_loss_scale(strategy: Any, folder: Path) -> None:
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:

        def make() -> keras.Model:
            model = model_fn()
            optimizer = keras.mixed_precision.LossScaleOptimizer(
                keras.optimizers.SGD(0.05), initial_scale=2.0**40
            )
            model.compile(optimizer, model.loss)
            return model

        model, plain = both(strategy, make)
        start = [variable.numpy() for variable in model.trainable_variables]
        train(strategy, model, plain, 21)
        assert float(plain.optimizer.loss_scale) == 2.0**34  # Halved in each of six steps.
        assert float(model.optimizer.loss_scale) == 2.0**34
        assert largest(model.trainable_variables, start) == 0
    finally:
        keras.mixed_precision.set_global_policy("float32")


@scenario("pipeline", "keras_3", long=True)
def few_rows_in_other_schedules(strategy: Any, folder: Path) -> None:
    for options in ({"schedule": "1f1b"}, {"schedule": "interleaved", "recompute": "blocks"}):
        other = tfdist.strategy(
            "pipeline", stages=2, microbatches=4, batch_norm="per_microbatch", **options
        )
        other.start()

        def make() -> keras.Model:
            model = keras.Sequential(
                [keras.Input((6, 6, 2)), layers.Flatten()]
                + [layers.Dense(8, "tanh") for _ in range(3)]
                + [layers.Dense(3)]
            )
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), loss)
            return model

        model, plain = both(other, make)
        assert train(other, model, plain, 9) < 1e-6, options
        assert largest(model.get_weights(), plain.get_weights()) < 1e-6, options


@scenario("pipeline", "keras_3")
def one_microbatch_has_the_statistics_of_the_batch(strategy: Any, folder: Path) -> None:
    for recompute in ("none", "blocks"):
        other = tfdist.strategy(
            "pipeline", stages=2, microbatches=1, batch_norm="per_microbatch", recompute=recompute
        )
        other.start()

        def make() -> keras.Model:
            norm = layers.BatchNormalization(momentum=0.5)
            model = keras.Sequential(
                [
                    keras.Input((6, 6, 2)),
                    layers.Conv2D(4, 3),
                    norm,
                    layers.Flatten(),
                    layers.Dense(3),
                ]
            )
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), loss)
            return model

        model, plain = both(other, make)
        assert train(other, model, plain, 7) < 1e-5, recompute
        assert largest(model.get_weights(), plain.get_weights()) < 1e-5, recompute


@scenario("pipeline", "keras_3")
def layers_frozen_and_trained_again_after_the_build(strategy: Any, folder: Path) -> None:
    def frozen() -> keras.Model:
        model = model_fn()
        model.get_layer("backbone").layers[0].trainable = False
        model.compile(model.optimizer, model.loss)
        return model

    model, plain = both(strategy, frozen)
    for is_trained in (False, True, False):
        for each in (model, plain):
            each.get_layer("backbone").layers[0].trainable = is_trained
            each.compile(keras.optimizers.SGD(0.05), plain.loss)
        before = plain.get_weights()[0]
        assert train(strategy, model, plain, 16) < 1e-5
        assert (largest(before, plain.get_weights()[0]) > 1e-4) == is_trained

    def with_frozen_norm() -> keras.Model:
        model = model_fn()
        model.get_layer("backbone").layers[1].trainable = False
        return model

    model, _ = both(strategy, with_frozen_norm)
    model.get_layer("backbone").layers[1].trainable = True
    model.compile("sgd", plain.loss)
    with pytest.raises(ModelError, match=r"frozen BatchNormalization.*backbone/batch_norm"):
        model.fit(X[:8], Y[:8], batch_size=8, verbose=0)


@scenario(long=True)
def arrays_are_tried_as_datasets_are(strategy, folder):
    """Keras takes them itself: what couples rows is told all the same, and once."""

    def spread(y, y_pred):
        return tf.math.reduce_std(y_pred)

    def coupled():
        model = model_fn()
        model.compile("sgd", model.loss, metrics=[spread])
        return model

    told = []
    for make in (model_fn, coupled):
        model = strategy.build(make)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            model.fit(X, Y, batch_size=8, verbose=0)
            model.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8), verbose=0)
        told.append(out.getvalue().count("metric 'spread' is no mean over the rows"))
    assert told == [0, 1]


# Keras 3 -----------------------------------------------------------------------------------------


def tokens() -> keras.Model:
    """Look-ups, a mask over the cut, operations, a tied weight, and a model in inference, which a
    model of Keras 3 trains all the same."""

    class Tied(layers.Layer):
        def call(self, x: Any) -> Any:
            return keras.ops.matmul(x, self.kernel)

    inputs = keras.Input((7,), dtype="int32")
    x = layers.Embedding(20, 8, mask_zero=True, name="table")(inputs)
    x = layers.LSTM(8, return_sequences=True, name="memory")(x)
    first = layers.Dense(8, "tanh", kernel_regularizer="l2", name="first")
    x = first(layers.GlobalAveragePooling1D(name="pool")(keras.ops.tanh(x * 2.0)))
    tied = Tied(name="tied")
    tied.kernel = first.kernel
    settled = keras.Sequential(
        [keras.Input((8,)), layers.BatchNormalization(name="norm")], name="settled"
    )
    x = settled(tied(x), training=False)
    model = keras.Model(inputs, layers.Dense(3, "softmax", name="last")(x))
    optimizer = keras.optimizers.Adam(0.01, epsilon=1e-3, clipnorm=0.5)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@scenario("keras_3")
def layers_of_keras_3(strategy: Any, folder: Path) -> None:
    records = RNG.integers(0, 20, (21, 7)).astype(np.int32), Y
    model, reference = equals_one_device(strategy, tokens, records, global_batch_size=8)
    assert sorted({w.device[-5:] for w in variables_in(model)}) == ["CPU:0", "CPU:1"]
    x, y = records
    found = model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
    expected = reference.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
    assert found == pytest.approx(expected, abs=1e-5)
    np.testing.assert_allclose(
        model.predict(x, verbose=0), reference.predict(x, verbose=0), atol=1e-5
    )


def dropping(seed: int = 3) -> keras.Model:
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.RandomFlip(name="flip"),
            layers.Flatten(name="flat"),
            layers.Dense(8, "tanh", name="first"),
            layers.Dropout(0.5, name="drop"),
            layers.Dense(3, "softmax", name="last"),
        ]
    )
    optimizer = keras.optimizers.Adam(0.01, epsilon=1e-3)
    model.compile(optimizer, "sparse_categorical_crossentropy")
    return model


@scenario("keras_3")
def random_numbers_are_those_of_layers_and_steps(strategy: Any, folder: Path) -> None:
    """The same once more: in a second pass, and from a checkpoint, whatever the seed is then."""

    class Break(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                raise KeyboardInterrupt

    def fit(where: Any, make: Any, *callbacks: Any) -> keras.Model:
        model = where.build(make)
        feed = where.dataset((X, Y), global_batch_size=8)
        with contextlib.suppress(KeyboardInterrupt):
            model.fit(feed, epochs=2, callbacks=list(callbacks), verbose=0)
        return model

    unbroken = fit(strategy, dropping)
    again = tfdist.strategy("pipeline", stages=2, microbatches=4, recompute="blocks")
    again.start()
    assert_same_weights(fit(again, dropping), unbroken)
    fit(strategy, dropping, tfdist.Checkpoints(folder, every_steps=1), Break())
    resumed = fit(strategy, lambda: dropping(4), tfdist.Checkpoints(folder, resume=True))
    assert_same_weights(resumed, unbroken)
    without = tfdist.strategy("pipeline", stages=2, microbatches=2)
    without.start()
    others = fit(without, dropping)
    assert largest(others.get_weights(), unbroken.get_weights()) > 1e-3


@scenario("keras_3")
def what_comes_before_the_first_step(strategy: Any, folder: Path) -> None:
    """Losses are built where they are first asked for, and there may be none but of layers."""

    def two() -> keras.Model:
        inputs = keras.Input((4,))
        x = layers.Dense(8, name="first")(inputs)
        outputs = [layers.Dense(3, name=name)(x) for name in ("one", "other")]
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.05), ["mse", "mae"])
        return model

    x, y = RNG.normal(size=(8, 4)).astype(np.float32), RNG.normal(size=(8, 3)).astype(np.float32)
    model, plain = both(strategy, two)
    assert largest(model.test_on_batch(x, [y, y]), plain.test_on_batch(x, [y, y])) < 1e-6
    for each in (model, plain):
        each.compile(keras.optimizers.SGD(0.05), ["mae", "mse"])
    found = [each.evaluate(x, [y, y], verbose=0) for each in (model, plain)]
    assert largest(*found) < 1e-6

    class Adds(layers.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            self.add_loss(tf.reduce_mean(tf.square(x)))
            return x

    def without() -> keras.Model:
        inputs = keras.Input((6, 6, 2))
        x = Adds(name="adds")(layers.Dense(8, name="first")(layers.Flatten()(inputs)))
        model = keras.Model(inputs, layers.Dense(3, name="last")(x))
        model.compile(keras.optimizers.SGD(0.05))
        return model

    model, plain = both(strategy, without)
    for each in (model, plain):
        each.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    assert largest(model.get_weights(), plain.get_weights()) < 1e-6


@scenario("keras_3")
def outputs_of_frozen_operations_are_kept(strategy: Any, folder: Path) -> None:
    def made() -> keras.Model:
        inputs = keras.Input((6, 6, 2))
        x = layers.Dense(8, name="backbone")(layers.Flatten()(inputs / 2.0 - 1.0))
        x = layers.Dense(8, "tanh", name="neck")(x)
        model = keras.Model(inputs, layers.Dense(3, name="head")(x))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.05), loss)
        return model

    found = []
    for kept in ({}, {"frozen_cache": "memory"}):
        frozen = tfdist.strategy(
            "pipeline", stages=2, microbatches=2, freeze_until="backbone", **kept
        )
        frozen.start()
        keras.utils.set_random_seed(0)
        found.append(frozen.build(made))
        found[-1].fit(frozen.dataset((X, Y), global_batch_size=8), epochs=2, verbose=0)
    assert_same_weights(*found)


@scenario("keras_3")
def a_step_that_updates_nothing_draws_numbers_of_its_own(strategy: Any, folder: Path) -> None:
    drawn: list[np.ndarray] = []

    def made() -> keras.Model:
        model = dropping()
        model.compile(keras.optimizers.SGD(0.05, gradient_accumulation_steps=4), model.loss)
        return model

    model = strategy.build(made)
    seeds = StepSeeds(model)
    for _ in range(2):
        model.fit(strategy.dataset((X[:8], Y[:8]), global_batch_size=8), verbose=0)
        drawn.append(seeds.of_step().numpy())
    assert drawn[0].tolist() != drawn[1].tolist()


@scenario("keras_3")
def what_keras_3_would_do_otherwise_is_refused(strategy: Any, folder: Path) -> None:
    def compiled(*inner: Any, **inputs: Any) -> keras.Model:
        start = keras.Input(**({"shape": (4,)} | inputs))
        x = layers.Dense(8, name="first")(start)
        for layer in inner:
            x = layer(x)
        model = keras.Model(start, layers.Dense(3, name="last")(x))
        if inner and hasattr(inner[0], "quantize") and isinstance(inner[0], layers.Dense):
            inner[0].quantize("float8")
        model.compile("sgd", "mse")
        return model

    refused = {
        "layer 'norm' with renorm=True": lambda: compiled(
            layers.BatchNormalization(renorm=True, name="norm")
        ),
        "must not compute in float8": lambda: compiled(layers.Dense(8, name="small")),
        "must be dense.*input 'rare', sparse": lambda: compiled(sparse=True, name="rare"),
        "no state from batch to batch.*'kept'": lambda: compiled(
            layers.Reshape((2, 4), name="turned"),
            layers.LSTM(4, stateful=True, name="kept"),
            batch_shape=(8, 4),
            shape=None,
        ),
    }
    for words, make in refused.items():
        with pytest.raises(ModelError, match=words):
            strategy.build(make)


@scenario("keras_3")
def names_are_those_of_a_model_of_keras_3_made_once(strategy: Any, folder: Path) -> None:
    def made() -> keras.Model:
        inputs = keras.Input((4,))
        model = keras.Model(inputs, layers.Dense(3, "softmax")(layers.Dense(8)(inputs)) * 1.0)
        model.compile("sgd", "mse", metrics=[keras.metrics.Precision()])
        return model

    keras.backend.clear_session()
    plain = made()
    keras.backend.clear_session()
    model = strategy.build(made)
    assert [each.name for each in model.operations] == [each.name for each in plain.operations]
    assert model.metrics[-1].name == plain.metrics[-1].name


@scenario("keras_3", long=True)
def files_of_keras_3(strategy: Any, folder: Path) -> None:
    model = strategy.build(model_fn)
    feed = strategy.dataset((X, Y), global_batch_size=8)
    model.fit(feed, verbose=0)
    expected = model.predict(X, verbose=0)
    for name in ("model.keras", "model.h5"):
        strategy.save(model, folder / name)
        loaded = keras.models.load_model(folder / name)
        assert largest(loaded.predict(X, verbose=0), expected) < 1e-6, name
    model.export(folder / "exported", verbose=False)
    exported = tf.saved_model.load(str(folder / "exported"))
    assert largest(exported.serve(X), expected) < 1e-6
    report = tfdist.verify(model_fn, (X, Y), strategy, steps=3, global_batch_size=8)
    assert report.exact, str(report)
