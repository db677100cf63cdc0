"""What Keras 3 does otherwise than Keras 2 where several replicas share a batch."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from one_device import each_replica_drops_its_own, equals_one_device, pair
from scenarios import scenario
from tensorflow import keras

sys.path += [str(Path(__file__).parent), str(Path(__file__).parent / "steps")]
import fit_scenarios
import own_steps_scenarios
import test_row_probe_steps
from options_scenarios import given

import tfdist
from tfdist.errors import DataError, OptionError, TfdistError
from tfdist.training.steps.learning_rate import with_learning_rate

ROWS, GLOBAL_BATCH_SIZE = 53, 12
layers = keras.layers
_rng = np.random.default_rng(0)
X = _rng.normal(size=(ROWS, 6)).astype(np.float32)
Y = _rng.integers(0, 3, ROWS)


def mlp(
    *more: Callable[[], Any],
    kind: type[keras.Model] = keras.Model,
    optimizer: Callable[[], Any] = lambda: keras.optimizers.Adam(0.01, epsilon=1e-3),
    loss: Callable[[], Any] = keras.losses.SparseCategoricalCrossentropy,
    **options: Any,
) -> keras.Model:
    inputs = keras.Input((6,))
    x = layers.Dense(16, "tanh", activity_regularizer="l2")(inputs)
    for layer in more:
        x = layer()(x)
    x = layers.Dense(16, "gelu", activity_regularizer="l2")(x)
    model = kind(inputs, layers.Dense(3, "softmax")(x))
    model.compile(optimizer(), loss(), metrics=["accuracy"], **options)
    return model


def check_exact(strategy: Any, model_fn: Callable[[], keras.Model]) -> None:
    report = tfdist.verify(
        model_fn, (X, Y), strategy, steps=10, global_batch_size=GLOBAL_BATCH_SIZE
    )
    assert report is None or report.exact, report
    assert report is None or report.num_replicas == 2


def check_refused(strategy: Any, model_fn: Callable[[], keras.Model], words: str) -> None:
    feed = strategy.dataset((X, Y), global_batch_size=GLOBAL_BATCH_SIZE)
    with pytest.raises(TfdistError, match=words) as refusal:
        strategy.build(model_fn).fit(feed, verbose=0)
    assert "\n" not in str(refusal.value)


PyDataset = getattr(keras.utils, "PyDataset", keras.utils.Sequence)


class Moving(PyDataset):
    """Batches of 8 rows, which the beginning and the end of an epoch move; ``more`` in the next."""

    def __init__(self, more: int = 0):
        super().__init__()
        self.x, self.count, self.more = X.copy(), 4, more

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        rows = slice(8 * number, 8 * number + 8)
        return self.x[rows], Y[rows]

    def on_epoch_begin(self) -> None:
        self.x *= 1.1

    def on_epoch_end(self) -> None:
        self.x += 0.1
        self.count += self.more


@scenario(long=True)
def a_py_dataset_is_told_of_epochs(strategy, folder):
    model, reference = pair(strategy, mlp)
    options = {"epochs": 2, "shuffle": False, "verbose": 0}
    found, expected = (each.fit(Moving(), **options).history for each in (model, reference))
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5, err_msg=name)
    for more in (1, -1):
        with pytest.raises(DataError, match="must give as many batches in each pass"):
            model.fit(Moving(more), **options)


class Endless(PyDataset):
    """Batches by their number, and how many epochs it has been told of."""

    num_batches = None
    begun = 0

    def on_epoch_begin(self):
        self.begun += 1

    def __getitem__(self, number):
        rng = np.random.default_rng(number)
        return rng.normal(size=(7, 6)).astype(np.float32), rng.integers(0, 3, 7)


@scenario("mirrored", long=True)
def a_py_dataset_without_end_goes_on_from_epoch_to_epoch(strategy, folder):
    model, reference = pair(strategy, mlp)
    options = {"epochs": 2, "steps_per_epoch": 3, "verbose": 0}
    given = Endless()
    found = model.fit(given, **options).history
    expected = reference.fit(Endless(), **options).history
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5, err_msg=name)
    assert given.begun == 2
    with pytest.raises(DataError, match="a Sequence must have a number of batches"):
        model.fit(Endless(), verbose=0)


@scenario(long=True)
def ctc_leaves_replicas_without_rows_out(strategy, folder):
    """TensorFlow's fails on them; an epoch's last batch has one row."""

    def model_fn() -> keras.Model:
        model = keras.Sequential([keras.Input((6, 3)), layers.Dense(4)])
        model.compile(keras.optimizers.SGD(0.1), keras.losses.CTC())
        return model

    rng = np.random.default_rng(1)
    data = rng.normal(size=(13, 6, 3)).astype(np.float32), rng.integers(1, 4, (13, 2))
    report = tfdist.verify(model_fn, data, strategy, steps=4, global_batch_size=12)
    assert report is None or report.exact, report


@scenario(long=True)
def losses_of_layers_stay_with_their_replica(strategy, folder):
    """Replicas wait for each other in BatchNormalization, when half of the losses are added."""
    check_exact(strategy, lambda: mlp(layers.BatchNormalization))


class OwnLoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        own = keras.losses.SparseCategoricalCrossentropy()(y, y_pred)
        return own + 0.1 * tf.reduce_mean(tf.square(y_pred))


@scenario(long=True)
def a_loss_object_that_compute_loss_calls(strategy, folder):
    check_exact(strategy, lambda: mlp(kind=OwnLoss))


@scenario(long=True)
def a_loss_that_is_a_sum(strategy, folder):
    check_exact(
        strategy,
        lambda: mlp(loss=lambda: keras.losses.SparseCategoricalCrossentropy(reduction="sum")),
    )


@scenario(long=True)
def a_model_of_its_own_class(strategy, folder):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = [layers.Dense(8, "tanh"), layers.Dense(3, "softmax")]

        def call(self, x, training=False):
            self.add_loss(1e-2 * tf.reduce_mean(tf.square(x)))
            for part in self.parts:
                x = part(x)
            return x

    def model_fn(*, is_called: bool = True) -> keras.Model:
        model = Own()
        if is_called:
            model(keras.Input((6,)))
        else:
            model.built = True
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        return model

    check_exact(strategy, model_fn)
    check_refused(strategy, lambda: model_fn(is_called=False), "must know its input shape")


@scenario
def a_call_that_takes_no_training(strategy, folder):
    """Keras 3 tells its layers nothing of training then: nothing drops out, statistics stay."""

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.last = layers.Dense(8, "tanh"), layers.Dense(3, "softmax")
            self.between = [layers.BatchNormalization(), layers.Dropout(0.5)]

        def call(self, x):
            x = self.first(x)
            for layer in self.between:
                x = layer(x)
            return self.last(x)

    def model_fn() -> keras.Model:
        model = Own()
        model(keras.Input((6,)))
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        return model

    model, _ = equals_one_device(strategy, model_fn, (X, Y))
    np.testing.assert_array_equal(model.between[0].moving_mean, np.zeros(8))


@scenario("single", "mirrored")
def submodels_alone_have_no_call_to_build(strategy, folder):
    class Parts(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = keras.Sequential([keras.Input((6,)), layers.Dense(3, "softmax")])

        def train_step(self, data):
            x, y = data[:2]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(
                    keras.losses.sparse_categorical_crossentropy(y, self.inner(x))
                )
            weights = self.trainable_weights
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"own": loss}

    def model_fn() -> keras.Model:
        model = Parts()
        model.compile("sgd")
        return model

    feed = strategy.dataset((X, Y), global_batch_size=GLOBAL_BATCH_SIZE)
    model = strategy.build(model_fn)
    before = model.get_weights()
    history = model.fit(feed, verbose=0).history
    assert np.isfinite(history["own"]).all()
    assert np.abs(before[0] - model.get_weights()[0]).max() > 0


@scenario("single")
def averages_that_lie_elsewhere_are_exchanged_by_no_callback(strategy, folder):
    def model_fn() -> keras.Model:
        return mlp(optimizer=lambda: keras.optimizers.SGD(0.1, use_ema=True))

    with tfdist.strategy("single", offload="optimizer") as offloaded:
        feed = offloaded.dataset((X, Y), global_batch_size=GLOBAL_BATCH_SIZE)
        model = offloaded.build(model_fn)
        with pytest.raises(TfdistError, match="averages of weights must be whole"):
            model.fit(feed, callbacks=[keras.callbacks.SwapEMAWeights()], verbose=0)


@scenario
def what_several_optimizers_do_not_decay(strategy, folder):
    spares = keras.optimizers.AdamW(0.01, weight_decay=0.5)
    spares.exclude_from_weight_decay(var_names=["bias"])
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    several = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(spares))
    model.compile(several, "mse")
    built = strategy.build(model)
    (part,) = built.optimizer.optimizers
    decays = [part._use_weight_decay(v.value) for v in built.trainable_variables]
    assert decays == [True, False]


@scenario
def float8_is_refused_and_nothing_may_be_trainable(strategy, folder):
    def of_float8() -> keras.Model:
        layer = layers.Dense(16, dtype="float8_from_mixed_bfloat16")
        model = keras.Sequential([keras.Input((6,)), layer, layers.Dense(3, "softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    check_refused(strategy, of_float8, "must not compute in float8")

    def frozen() -> keras.Model:
        model = mlp()
        model.trainable = False
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    feed = strategy.dataset((X, Y), global_batch_size=GLOBAL_BATCH_SIZE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns that nothing is.
        strategy.build(frozen).fit(feed, verbose=0)


@scenario(long=True)
def constraints_and_clipping(strategy, folder):
    check_exact(
        strategy,
        lambda: mlp(
            lambda: layers.Dense(16, kernel_constraint="max_norm"),
            optimizer=lambda: keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.05),
        ),
    )


@scenario("single")
def a_resumed_model_looks_up_what_its_checkpoint_has(strategy, folder):
    """Keras 3 keeps words and buckets in no variable."""
    numbers = np.arange(8, dtype=np.float32)[:, None]
    y = np.ones((8, 1), np.float32)

    def adapted(words: Sequence[str], scale: float) -> keras.Model:
        names, weighed = layers.StringLookup(), layers.StringLookup(output_mode="tf_idf")
        names.adapt(list(words))
        weighed.adapt([[word] for word in words])
        buckets = layers.Discretization(num_bins=3, epsilon=0.01)
        buckets.adapt(scale * numbers)
        text, number = keras.Input((1,), dtype="string"), keras.Input((1,))
        looked_up = [layers.Flatten()(layers.Embedding(9, 2)(names(text))), weighed(text)]
        bucket = layers.Flatten()(layers.Embedding(9, 2)(buckets(number)))
        x = layers.Concatenate()([*looked_up, bucket])
        model = keras.Model([text, number], layers.Dense(1)(x))
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    x = [tf.constant([["a"], ["b"], ["b"], ["c"]] * 2), tf.constant(numbers)]

    def trained(words: Sequence[str], scale: float, epochs: int, **options: Any) -> Any:
        model = strategy.build(lambda: adapted(words, scale))
        keep = tfdist.Checkpoints(folder, **options)
        records = tf.data.Dataset.from_tensor_slices((tuple(x), y))
        feed = strategy.dataset(records, global_batch_size=4)
        model.fit(feed, epochs=epochs, callbacks=[keep], verbose=0)
        return model.predict(x, verbose=0)

    first = trained("abbc", 1.0, 1)
    np.testing.assert_array_equal(trained("aabc", 9.0, 1, resume=True), first)


@scenario("mirrored", "horovod", long=True)
def tables_that_rows_look_up(strategy, folder):
    """Some ids in several rows and twice in one, positions in all; each clipping."""
    ids = _rng.integers(0, 9, (ROWS, 5))

    class Positions(keras.layers.Layer):
        def build(self, shape):
            self.table = layers.Embedding(shape[1], 4)

        def call(self, x):
            return x + self.table(tf.range(5))

    def model_fn(optimizer: keras.optimizers.Optimizer) -> keras.Model:
        inputs = keras.Input((5,), dtype="int32")
        x = Positions()(layers.Embedding(9, 4)(inputs))
        model = keras.Model(inputs, layers.Dense(3, "softmax")(layers.Flatten()(x)))
        model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    optimizers = (
        keras.optimizers.Adam,
        partial(keras.optimizers.Adam, global_clipnorm=0.05),
        partial(keras.optimizers.SGD, clipnorm=0.05),
        partial(keras.optimizers.SGD, clipvalue=1e-3),
    )
    two = given(strategy, accumulate_steps=2)
    for on, optimizer in (*((strategy, each) for each in optimizers), (two, optimizers[0])):
        report = tfdist.verify(
            lambda optimizer=optimizer: model_fn(optimizer(0.01)),
            (ids, Y),
            on,
            steps=10,
            global_batch_size=GLOBAL_BATCH_SIZE,
        )
        assert report is None or report.exact, (on, optimizer, report)
    divided = given(strategy, shard="optimizer")
    momentum = partial(keras.optimizers.SGD, 0.1, momentum=0.9)
    equals_one_device(divided, lambda: model_fn(momentum()), (ids, Y))
    feed = divided.dataset((ids, Y), global_batch_size=GLOBAL_BATCH_SIZE)
    squaring = divided.build(lambda: model_fn(keras.optimizers.Adam()))
    with pytest.raises(TfdistError, match=r"adds up the gradients of equal look-ups.*and Adam"):
        squaring.fit(feed, verbose=0)


@scenario("single", "mirrored", "horovod")
def options_of_the_step(strategy, folder):
    """Dropout on one device alone, where it draws what plain Keras does."""
    is_alone = strategy.num_replicas == 1
    drops = [partial(layers.Dropout, 0.5, seed=3)] if is_alone else []
    recomputed = given(strategy, recompute="blocks")
    equals_one_device(recomputed, partial(mlp, layers.BatchNormalization, *drops), (X, Y))
    equals_one_device(given(strategy, accumulate_steps=2), mlp, (X, Y))
    if strategy.name in ("single", "horovod"):
        offloaded = given(strategy, offload=["optimizer", "activations"])
        equals_one_device(offloaded, partial(mlp, layers.BatchNormalization, *drops), (X, Y))
    if is_alone:
        return
    divided = given(strategy, shard="optimizer", recompute="blocks")
    model_fn = partial(
        mlp, layers.BatchNormalization, optimizer=partial(keras.optimizers.AdamW, 0.01)
    )
    equals_one_device(divided, model_fn, (X, Y), tolerance=1e-4)


@scenario(long=True)
def averages_whose_weights_replicas_divide(strategy, folder):
    """Those of Keras 3 begin with the first step, for a weight that nothing reads too."""

    class Unread(layers.Dense):
        def build(self, shape):
            super().build(shape)
            self.add_weight(shape=(3,), initializer="ones", name="unread")

    average = {"use_ema": True, "ema_momentum": 0.8}
    optimizer = partial(keras.optimizers.Adam, 0.01, epsilon=1e-3, **average)
    divided = given(strategy, shard="optimizer")
    with warnings.catch_warnings(action="ignore"):  # Of a weight without a gradient.
        equals_one_device(divided, partial(mlp, partial(Unread, 4), optimizer=optimizer), (X, Y))


@scenario("mirrored", "horovod", long=True)
def several_optimizers(strategy, folder):
    """Their slots are made outside of branches, which a warning would tell of, and resumed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        own_steps_scenarios.two_optimizers(strategy, folder)
        own_steps_scenarios.all_optimizers_are_resumed(strategy, folder)
    assert "some steps alone" not in out.getvalue()


@scenario("mirrored")
def a_model_object_goes_on_where_it_is(strategy, folder):
    fit_scenarios.a_model_object_goes_on_where_it_is(strategy, folder)


@scenario("single")
def a_train_step_is_tried_without_a_trace(strategy, folder):
    for sharpens in (False, True):
        test_row_probe_steps.test_a_step_is_tried_without_a_trace(sharpens)


class CountsSteps(layers.Layer):
    def build(self, shape):
        kind = tf.VariableAggregation.ONLY_FIRST_REPLICA
        self.steps = tf.Variable(0, trainable=False, aggregation=kind)  # Keras counts it nowhere.

    def call(self, x, training=None):
        if training:
            self.steps.assign_add(1)
        return x


class RunningMean(layers.Layer):
    """Keeps it in a variable of TensorFlow's, which can say how replicas share it."""

    def build(self, shape):
        self.mean = tf.Variable(
            tf.zeros(shape[1:]),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.MEAN,
        )

    def call(self, x, training=None):
        mean = tf.convert_to_tensor(self.mean)
        if training:
            self.mean.assign(0.9 * mean + 0.1 * tf.reduce_mean(x, 0))
        return x - mean


@scenario("mirrored", "horovod")
def a_running_mean_in_a_variable_of_a_layer_is_of_all_rows(strategy, folder):
    def model_fn():
        model = keras.Sequential([keras.Input((6,)), RunningMean(), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    model, reference = equals_one_device(strategy, model_fn, (X, Y[:, None]))
    expected = reference.layers[0].mean.numpy()
    np.testing.assert_allclose(model.layers[0].mean.numpy(), expected, atol=1e-5)


@scenario("mirrored")
def what_no_file_of_keras_holds_is_told_when_it_is_saved(strategy, folder):
    class Written(RunningMean):
        def save_own_variables(self, store):
            store["mean"] = self.mean.numpy()

    def told(layer):
        model = strategy.build(lambda: mlp(layer, lambda: layers.Dropout(0.1)))
        model.fit(X, Y, verbose=0)
        with contextlib.redirect_stderr(io.StringIO()) as heard:
            strategy.save(model, folder / "model.keras")
        return heard.getvalue()

    assert "model.keras does not hold what layers keep in a tf.Variable" in told(RunningMean)
    assert told(Written) == told(layers.BatchNormalization) == ""


@scenario("mirrored")
def trials_leave_no_trace_in_a_variable_of_a_layer(strategy, folder):
    def model_fn():
        model = keras.Sequential([keras.Input((6,)), CountsSteps(), layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    model = strategy.build(model_fn)
    model.fit(strategy.dataset((X, Y[:, None]), global_batch_size=GLOBAL_BATCH_SIZE), verbose=0)
    assert int(model.layers[0].steps.numpy()) == -(-ROWS // GLOBAL_BATCH_SIZE)


@scenario(long=True)
def executions_of_several_steps(strategy, folder):
    check_exact(strategy, lambda: mlp(steps_per_execution=5))
    check_refused(strategy, lambda: mlp(steps_per_execution=2), "must divide the steps of an epoch")
    one_device, model = (
        mlp(steps_per_execution=2),
        strategy.build(partial(mlp, steps_per_execution=2)),
    )
    model.set_weights(one_device.get_weights())
    for _ in range(2):  # A batch is all that an execution finds.
        expected = one_device.train_on_batch(X, Y)
        assert model.train_on_batch(X, Y) == pytest.approx(expected, abs=1e-5)


@scenario("mirrored", "horovod", long=True)
def passes_begin_as_keras_begins_them(strategy, folder):
    """It begins one more after each epoch of a dataset of known length."""

    def batches(is_known: bool) -> tf.data.Dataset:
        records = tf.data.Dataset.from_tensor_slices((X, Y))
        if not is_known:
            records = records.filter(lambda x, y: y < 2)
        batches = records.shuffle(ROWS, seed=3).batch(12)
        return batches.map(lambda x, y: (x + tf.random.normal(tf.shape(x), seed=1), y))

    model, reference = pair(strategy, mlp)
    for is_known in (True, False):
        losses = []
        for each in (model, reference):
            keras.utils.set_random_seed(7)
            losses.append(each.fit(batches(is_known), epochs=3, verbose=0).history["loss"])
        np.testing.assert_allclose(*losses, atol=1e-5)


@scenario(long=True)
def single_batches(strategy, folder):
    for model_fn in (mlp, lambda: mlp(kind=OwnLoss, loss=lambda: None)):
        one_device, model = model_fn(), strategy.build(model_fn)
        model.set_weights(one_device.get_weights())
        for _ in range(3):
            found = model.train_on_batch(X, Y, return_dict=True)
            expected = one_device.train_on_batch(X, Y, return_dict=True)
            assert found == pytest.approx(expected, abs=1e-5)
        expected = one_device.test_on_batch(X, Y)
        assert model.test_on_batch(X, Y) == pytest.approx(expected, abs=1e-5)
        expected = one_device.predict_on_batch(X)
        np.testing.assert_allclose(model.predict_on_batch(X), expected, atol=1e-5)


@scenario(long=True)
def dropout_draws_other_numbers_on_each_replica(strategy, folder):
    each_replica_drops_its_own(strategy)


@scenario
def a_resumed_fit_draws_what_the_unbroken_one_did(strategy, folder):
    class Break(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise KeyboardInterrupt

    def fit(name: str, *callbacks: Any, **options: Any) -> list[np.ndarray]:
        keras.utils.set_random_seed(1)
        model = strategy.build(lambda: mlp(lambda: layers.Dropout(0.3)))
        keep = tfdist.Checkpoints(folder / name, **options)
        stop = keras.callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True)
        feed = strategy.dataset((X, Y), global_batch_size=GLOBAL_BATCH_SIZE)
        with contextlib.suppress(KeyboardInterrupt):
            model.fit(feed, epochs=5, callbacks=[keep, stop, *callbacks], verbose=0)
        return model.get_weights()

    unbroken = fit("unbroken")
    broken = fit("broken", Break())
    resumed = fit("broken", resume=True)
    for expected, before, found in zip(unbroken, broken, resumed, strict=True):
        np.testing.assert_array_equal(found, expected)
        assert np.any(before != expected)


class Unseeded(layers.Layer):
    def call(self, x, training=False):
        import keras as keras_3  # tf.keras has no keras.random.

        return x + keras_3.random.normal((4,)) if training else x


@scenario("single", "mirrored", "horovod")
def what_draws_without_a_seed_is_told_or_refused(strategy, folder):
    def fit(epochs: int, **options: Any) -> str:
        said = io.StringIO()
        feed = strategy.dataset((X, Y), global_batch_size=GLOBAL_BATCH_SIZE)
        model = strategy.build(lambda: mlp(lambda: layers.Dense(4), lambda: Unseeded(name="noise")))
        keep = [tfdist.Checkpoints(folder / "kept", **options)]
        with contextlib.redirect_stdout(said):
            model.fit(feed, epochs=epochs, callbacks=keep, verbose=0, check_rows=False)
        return said.getvalue()

    if strategy.name == "mirrored":
        with pytest.raises(TfdistError, match="SeedGenerator that the layer has made"):
            fit(1)
        return
    is_chief = strategy.topology.is_chief
    is_divided = strategy.topology.world_size > 1
    told = "layer 'noise' draws random numbers"
    assert (f"{told} by itself" in fit(1)) == (is_chief and is_divided)
    assert (f"{told} that no checkpoint holds" in fit(2, resume=True)) == is_chief


@scenario(long=True)
def labels_of_a_class_that_the_loss_leaves_out(strategy, folder):
    loss = partial(keras.losses.SparseCategoricalCrossentropy, ignore_class=1)
    check_exact(strategy, partial(mlp, loss=loss))


@scenario(long=True)
def what_is_tried_on_real_rows(strategy, folder):
    class Routed(layers.Layer):
        """Adds to the loss in training alone."""

        def call(self, x, training=None):
            if training:
                self.add_loss(tf.square(tf.reduce_mean(x)) * 9)
            return x

    feed = strategy.dataset((X, Y), global_batch_size=GLOBAL_BATCH_SIZE)

    def told(*more: Any) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            strategy.build(lambda: mlp(*more)).fit(feed, verbose=0)
        return out.getvalue()

    quiet = (layers.BatchNormalization, partial(layers.Dropout, 0.5))
    assert "warning" not in told(*quiet)
    assert "what layers add to the loss" in told(*quiet, Routed)
    model = strategy.build(lambda: mlp(Routed))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        model.fit(feed, verbose=0, check_rows=False)
    assert "warning" not in out.getvalue()


@scenario("horovod", long=True)
def weights_that_replicas_divide(strategy, folder):
    """They train, evaluate, are read, and are in files as one device has them."""
    divided = given(strategy, shard="weights")

    def model_fn():
        inputs = x = keras.Input((6,))
        for _ in range(3):
            x = layers.BatchNormalization()(layers.Dense(16, "tanh")(x))
        model = keras.Model(inputs, layers.Dense(3, "softmax")(x))
        decaying = keras.optimizers.AdamW(0.01, epsilon=1e-3, global_clipnorm=0.5)
        model.compile(decaying, "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    model, reference = equals_one_device(divided, model_fn, (X, Y))
    found = model.evaluate(X, Y, verbose=0, return_dict=True)
    expected = reference.evaluate(X, Y, verbose=0, return_dict=True)
    assert found == pytest.approx(expected, abs=1e-5)
    divided.save(model, folder / "model.keras")
    strategy.from_chief(None)
    loaded = keras.models.load_model(strategy.from_chief(folder) / "model.keras")
    for one, other in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    slots = zip(loaded.optimizer.variables, reference.optimizer.variables, strict=True)
    for one, other in slots:
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-4, atol=1e-5)
    model.set_weights([2 * weight for weight in reference.get_weights()])
    np.testing.assert_allclose(model.get_weights()[0], 2 * reference.get_weights()[0])
    model.save_weights(folder / "kept.weights.h5")
    strategy.from_chief(None)  # The chief has written it.
    kept = strategy.from_chief(folder) / "kept.weights.h5"
    model.set_weights(reference.get_weights())
    for one in (model, reference):
        one.load_weights(kept)
        one.fit(X[:12], Y[:12], batch_size=12, verbose=0)
    for one, other in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    constrained = partial(layers.Dense, 16, kernel_constraint="max_norm")
    with pytest.raises(TfdistError, match="neither regularizers nor constraints"):
        divided.build(lambda: mlp(constrained))


@scenario
def what_is_not_exact_is_refused(strategy, folder):
    weighted = "mean_with_sample_weight"
    refused = {
        "renorm=True": lambda: mlp(lambda: layers.BatchNormalization(renorm=True)),
        "jit_compile=True": lambda: mlp(jit_compile=True),
        weighted: lambda: mlp(
            loss=lambda: keras.losses.SparseCategoricalCrossentropy(reduction=weighted)
        ),
        "gradient_accumulation_steps=2": lambda: mlp(
            optimizer=lambda: keras.optimizers.SGD(gradient_accumulation_steps=2)
        ),
        "labels of shape": lambda: mlp(loss=keras.losses.CategoricalCrossentropy),
    }
    for words, model_fn in refused.items():
        check_refused(strategy, model_fn, words)


@scenario(long=True)
def a_model_that_is_compiled_anew(strategy, folder):
    feed = strategy.dataset((X, Y), global_batch_size=GLOBAL_BATCH_SIZE)
    model = strategy.build(mlp)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    assert set(model.fit(feed, verbose=0).history) == {"loss", "accuracy", "learning_rate"}
    elsewhere = keras.optimizers.SGD(0.1)
    with pytest.raises(TfdistError, match="SGD made outside of it"):
        model.compile(elsewhere, "sparse_categorical_crossentropy")
    with pytest.raises(TfdistError, match="SGD made outside of it"):
        strategy.build(lambda: mlp(optimizer=lambda: elsewhere))


@scenario
def a_file_that_keras_3_does_not_write(strategy, folder):
    model = strategy.build(mlp)
    with pytest.raises(TfdistError, match=r"\.keras or \.h5"):
        strategy.save(model, folder / "saved")
    assert not list(folder.glob("saved*"))


@scenario("mixed_float16")
def a_gradient_that_overflows_on_one_replica(strategy, folder):
    """It skips the update on all. Only for mixed_float16."""

    def model_fn() -> keras.Model:
        inputs = keras.Input((6,))
        model = keras.Model(inputs, layers.Dense(1)(inputs))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    x, y = X[:GLOBAL_BATCH_SIZE].copy(), Y[:GLOBAL_BATCH_SIZE, None]
    x[-1] = np.inf  # Of the second replica, where records keep their order.
    for made in (strategy, given(strategy, shard="optimizer", precision="mixed_float16")):
        model = made.build(model_fn)
        before = model.get_weights()
        feed = made.dataset((x, y), global_batch_size=GLOBAL_BATCH_SIZE, training=False)
        model.fit(feed, verbose=0)
        for found, expected in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(found, expected)
        assert int(model.optimizer.iterations.numpy()) == 0
        assert float(model.optimizer.dynamic_scale.numpy()) == 2.0**14


@scenario("mixed_float16", long=True)
def a_loss_scale_whose_slots_replicas_divide(strategy, folder):
    def model_fn() -> keras.Model:
        keras.utils.set_random_seed(1)
        inputs = keras.Input((6,))
        model = keras.Model(inputs, layers.Dense(3)(layers.Dense(16, "tanh")(inputs)))
        model.compile(keras.optimizers.AdamW(0.01, epsilon=1e-3, clipnorm=0.3), "mse")
        return model

    weights = []
    for made in (strategy, given(strategy, shard="optimizer", precision="mixed_float16")):
        model = made.build(model_fn)
        model.optimizer.dynamic_growth_steps = 3
        feed = made.dataset((X, Y[:, None]), global_batch_size=GLOBAL_BATCH_SIZE, seed=2)
        model.fit(feed, epochs=2, verbose=0)
        scale = float(model.optimizer.dynamic_scale.numpy())
        weights.append([*model.get_weights(), scale, model.optimizer.iterations.numpy()])
    assert weights[0][-2] > 2.0**15
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@scenario
def weights_of_some_labels_alone(strategy, folder):
    def model_fn():
        inputs = keras.Input((6,))
        outputs = {name: layers.Dense(3, "softmax", name=name)(inputs) for name in "ab"}
        model = keras.Model(inputs, outputs)
        model.compile("sgd", dict.fromkeys("ab", "sparse_categorical_crossentropy"))
        return model

    labels, weights = {"a": Y, "b": Y}, {"a": np.ones(ROWS, np.float32)}
    model = strategy.build(model_fn)
    with pytest.raises(TfdistError, match="for each label by name, but found none for b"):
        model.fit(X, labels, sample_weight=weights, verbose=0)
    with pytest.raises(TfdistError, match="one label a record, but found 1 by name"):
        model.fit(X, {"a": Y}, class_weight=dict.fromkeys(range(3), 1.0), verbose=0)


@scenario(long=True)
def an_operation_between_layers_is_named_itself(strategy, folder):
    def model_fn():
        inputs = keras.Input((6,))
        x = layers.Dense(4)(inputs)
        x = keras.ops.subtract(x, keras.ops.mean(x, 0))
        model = keras.Model(inputs, layers.Dense(3, "softmax", name="behind")(x))
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    with contextlib.redirect_stdout(io.StringIO()) as said:
        strategy.build(model_fn).fit(X, Y, verbose=0)
    assert ("layer 'mean" in said.getvalue()) == strategy.topology.is_chief
    assert "behind" not in said.getvalue()


class Stop(keras.callbacks.Callback):
    """Ends a fit before a step of its second epoch."""

    def __init__(self, batch: int = 2):
        super().__init__()
        self.epoch, self.batch = 0, batch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if (self.epoch, batch) == (1, self.batch):
            raise KeyboardInterrupt


def assert_goes_on(
    strategy: Any,
    folder: Path,
    model_fn: Callable[[], keras.Model],
    *callbacks: Any,
    kept: Callable[[keras.Model], list[Any]] = keras.Model.get_weights,
    broken_at: int = 2,
    times: int = 2,
) -> None:
    """Compares a fit that was broken within an epoch, and resumed, with an unbroken one.

    Args:
        callbacks: what makes each.
        kept: what of the models is compared.
        broken_at: the step of the second epoch.
        times: how often it is resumed; the second time nothing is left to train.
    """

    def fit(*more: Any) -> list[Any]:
        keras.utils.set_random_seed(1)
        model = strategy.build(model_fn)
        feed = strategy.dataset((X, Y), global_batch_size=GLOBAL_BATCH_SIZE)
        own = [make() for make in callbacks]
        model.fit(feed, epochs=3, callbacks=[*own, *more], verbose=0, check_rows=False)
        return kept(model)

    expected = fit()
    with pytest.raises(KeyboardInterrupt):
        fit(Stop(broken_at), tfdist.Checkpoints(folder, every_steps=1))
    strategy.from_chief(None)
    for _ in range(times):
        found = fit(tfdist.Checkpoints(folder, resume=True))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)


@scenario
def averages_of_weights_end_the_last_epoch_alone(strategy, folder):
    """The rest of a broken epoch is a fit of Keras', whose end is not that of the training."""
    average = {"use_ema": True, "ema_momentum": 0.8}
    optimizer = partial(keras.optimizers.SGD, 0.1, momentum=0.9, **average)
    assert_goes_on(strategy, folder / "within", partial(mlp, optimizer=optimizer))
    # After an epoch its checkpoint has the averages in the weights' place.
    swaps = partial(keras.callbacks.SwapEMAWeights, swap_on_epoch=True)
    assert_goes_on(
        strategy, folder / "swapped", partial(mlp, optimizer=optimizer), swaps, broken_at=0
    )

    def fit(epochs: int, *more: Any) -> list[Any]:
        keras.utils.set_random_seed(1)
        model = strategy.build(partial(mlp, optimizer=optimizer))
        feed = strategy.dataset((X, Y), global_batch_size=GLOBAL_BATCH_SIZE)
        callbacks = [swaps(), *more]
        model.fit(feed, epochs=epochs, callbacks=callbacks, verbose=0, check_rows=False)
        return model.get_weights()

    def kept() -> tfdist.Checkpoints:
        return tfdist.Checkpoints(folder / "more", resume=True)

    # One that has ended goes on from its weights, not from their averages.
    for epochs in (2, 2, 4):
        for one, other in zip(fit(epochs, kept()), fit(epochs), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)


@scenario("single")
def rates_that_are_functions_and_steps_that_are_not_applied(strategy, folder):
    feed = strategy.dataset((X[:48], Y[:48]), global_batch_size=GLOBAL_BATCH_SIZE)
    model = strategy.build(partial(mlp, optimizer=lambda: keras.optimizers.SGD(lambda: 0.1)))
    assert model.fit(feed, verbose=0).history["learning_rate"] == [pytest.approx(0.1)]

    def of_two() -> keras.optimizers.Optimizer:
        falling = keras.optimizers.schedules.PolynomialDecay(0.1, 10, 0.0)
        return keras.optimizers.SGD(falling, gradient_accumulation_steps=2)

    model = strategy.build(partial(mlp, optimizer=of_two))
    assert model.fit(feed, verbose=0).history["learning_rate"] == [pytest.approx(0.07)]


@scenario("mirrored")
def what_a_given_model_has_beside_its_weights(strategy, folder):
    class Seen(layers.Layer):
        def __init__(self, **options: Any):
            super().__init__(**options)
            shared = {
                "synchronization": tf.VariableSynchronization.ON_READ,
                "aggregation": tf.VariableAggregation.MEAN,
            }
            self.seen = tf.Variable(0.0, trainable=False, **shared)

        def call(self, x: Any) -> Any:
            return x + self.seen

    inputs = keras.Input((6,))
    heads = [layers.Dense(1, name=name)(Seen(name=f"seen_{name}")(inputs)) for name in "ab"]
    model = keras.Model(inputs, heads)
    model.compile("sgd", ["mse", "mse"], metrics=[["mae"], ["mae"]])
    model.get_layer("seen_a").seen.assign(5.0)
    model.temperature = tf.Variable(1.0)  # A user's own, which no copy has.
    built = strategy.build(model)
    seen = [
        [float(layer.seen.numpy()) for layer in each.layers if hasattr(layer, "seen")]
        for each in (model, built)
    ]
    assert seen[0] == seen[1]
    assert sorted(seen[1]) == [0, 5]
    rows = X[:8], [X[:8, :1], X[:8, 1:2]]
    given, expected = built.test_on_batch(*rows), model.test_on_batch(*rows)
    np.testing.assert_allclose(given, expected, rtol=1e-5)  # In the order of Keras, too.


@scenario("mirrored")
def what_a_copy_of_a_given_model_must_not_forget(strategy, folder):
    model = mlp(lambda: layers.Dense(16, name="fixed"))
    fixed = model.get_layer("fixed")
    fixed.kernel.trainable = False  # A weight by itself.
    model.compile(keras.optimizers.SGD(0.1), model.loss)
    built = strategy.build(model)
    before = built.get_layer("fixed").get_weights()
    built.fit(X, Y, verbose=0)
    after = built.get_layer("fixed").get_weights()
    np.testing.assert_array_equal(before[0], after[0])
    assert np.abs(before[1] - after[1]).max() > 0

    class Own(keras.Model):
        def compile(self, *args: Any, **options: Any) -> None:
            super().compile(*args, **options)

    with pytest.raises(TfdistError, match="a compile of its own"):
        strategy.build(mlp(kind=Own))


@scenario("mirrored")
def a_copy_scales_no_loss_that_the_given_model_did_not(strategy, folder):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        for scales in (False, True):
            given_model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
            given_model.compile("sgd", "mse", auto_scale_loss=scales)
            built = strategy.build(given_model)
            assert type(built.optimizer) is type(given_model.optimizer)
    finally:
        keras.config.set_dtype_policy("float32")


@scenario("mirrored")
def parts_of_several_optimizers_are_looked_at(strategy, folder):
    def optimizer() -> keras.optimizers.Optimizer:
        waiting = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        return keras.optimizers.MultiOptimizer(lambda v: waiting)

    check_refused(strategy, partial(mlp, optimizer=optimizer), "must update in each step")
    with pytest.raises(OptionError, match=r"one optimizer and a fixed .* with a MultiOptimizer"):
        with_learning_rate(partial(mlp, optimizer=optimizer), 0.1)()
    for reduction in (None, "none"):
        loss = partial(keras.losses.SparseCategoricalCrossentropy, reduction=reduction)
        check_refused(strategy, partial(mlp, loss=loss), "must reduce over the rows")


@scenario("mirrored", "horovod")
def an_optimizer_of_several(strategy, folder):
    def optimizer() -> keras.optimizers.Optimizer:
        adam = keras.optimizers.Adam(0.01, epsilon=1e-3)
        sgd = keras.optimizers.SGD(0.05, momentum=0.9)
        return keras.optimizers.MultiOptimizer(lambda v: adam if "kernel" in v.path else sgd)

    check_exact(strategy, partial(mlp, optimizer=optimizer))
    assert_goes_on(strategy, folder, partial(mlp, optimizer=optimizer), times=1)


@scenario
def a_rate_that_follows_the_last_one_is_set_once_an_epoch(strategy, folder):
    halved = partial(keras.callbacks.LearningRateScheduler, lambda epoch, rate: 0.5 * rate)
    assert_goes_on(strategy, folder, mlp, halved)


@scenario("single", "mirrored", "horovod")
def variables_of_layers_go_on(strategy, folder):
    def model_fn():
        model = keras.Sequential([keras.Input((6,)), RunningMean(), CountsSteps(), layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
        return model

    def kept(model):
        return [*model.get_weights(), model.layers[0].mean.numpy(), model.layers[1].steps.numpy()]

    assert_goes_on(strategy, folder, model_fn, kept=kept)


class ByTheGuide(keras.Model):
    """Shows its metrics as Keras' guide does: those that are compiled are one, with a dict."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.metrics[0].update_state(loss, sample_weight=tf.shape(x)[0])
        self.metrics[1].update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


class TwoInOne(keras.metrics.Mean):
    def result(self) -> dict[str, Any]:
        return {"once": super().result(), "twice": 2 * super().result()}


class OwnMetrics(keras.Model):
    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.both = TwoInOne()

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self.both.update_state(tf.reduce_max(y_pred, -1))
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        return {"loss": results["loss"], "largest": self.both.result()}


def narrow(kind: type[keras.Model], metrics: Sequence[str] = ("accuracy",)) -> keras.Model:
    inputs = keras.Input((6,))
    model = kind(inputs, layers.Dense(3, "softmax")(inputs))
    loss = "sparse_categorical_crossentropy"
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=list(metrics) or None)
    return model


class OwnDict(keras.Model):
    """Shows a number of its own that is called as a metric is which it does not update."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, self(x)))
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"own": {"loss": loss}}


@scenario("single", "mirrored", "horovod")
def a_dict_of_ones_own_is_shown_as_it_is(strategy, folder):
    model, _ = equals_one_device(strategy, partial(narrow, OwnDict, metrics=()), (X, Y))
    assert min(model.history.history["loss"]) > 0


@scenario("mirrored", "horovod")
def results_of_metrics_in_a_dict_are_those_of_all_rows(strategy, folder):
    for kind in (ByTheGuide, OwnMetrics):
        equals_one_device(strategy, partial(narrow, kind), (X, Y))


@scenario("single", "mirrored")
def results_of_a_broken_epoch_are_of_all_its_steps(strategy, folder):
    def told(model: keras.Model) -> list[Any]:
        return [model.history.history[name][-2:] for name in ("loss", "accuracy")]

    assert_goes_on(strategy, folder, partial(narrow, ByTheGuide), kept=told, times=1)
