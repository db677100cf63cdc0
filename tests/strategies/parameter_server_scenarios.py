"""Two workers and two parameter servers, small variables divided among them."""

from __future__ import annotations

import csv
import itertools
import os

import numpy as np
import pytest
import tensorflow as tf
from one_device import assert_near
from scenarios import scenario
from tensorflow import keras

import tfdist
from tfdist.errors import DataError, ModelError, OptionError

layers = keras.layers
RNG = np.random.default_rng(0)
NUM = 45
Y = RNG.integers(0, 3, NUM)
X = (RNG.normal(size=(NUM, 5)) + Y[:, None]).astype(np.float32)


def model_fn(optimizer=None, **compiled):
    model = keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(8, "tanh", kernel_regularizer="l2"),
            layers.BatchNormalization(),
            layers.Dense(3, "softmax"),
        ]
    )
    model.compile(
        optimizer or keras.optimizers.Adam(0.02),
        "sparse_categorical_crossentropy",
        **({"metrics": ["accuracy", keras.metrics.SparseCategoricalCrossentropy()]} | compiled),
    )
    return model


def data_of(strategy, **options):
    return strategy.dataset((X, Y), **({"global_batch_size": 8} | options))


def twin_of(strategy):
    return strategy._steps[-1]._twin.twin


class Seen(keras.metrics.Metric):
    """How often each record was trained on: the label is the record's number."""

    def __init__(self):
        super().__init__(name="seen")
        self.counts = self.add_weight(shape=(NUM,), initializer="zeros", name="counts")

    def update_state(self, y_true, y_pred, sample_weight=None):
        numbers = tf.reshape(tf.cast(y_true, tf.int32), [-1])
        self.counts.assign_add(tf.reduce_sum(tf.one_hot(numbers, NUM), 0))

    def reset_state(self):
        self.counts.assign(tf.zeros([NUM]))

    def result(self):
        return {"seen_least": tf.reduce_min(self.counts), "seen_most": tf.reduce_max(self.counts)}


@scenario
def variables_lie_on_the_servers_and_large_ones_are_divided(strategy, folder):
    model = strategy.build(model_fn)
    twin = twin_of(strategy)
    assert isinstance(twin.distribute_strategy, tf.distribute.ParameterServerStrategy)
    places = {tf.DeviceSpec.from_string(v.device).task for v in twin.weights}
    assert {tf.DeviceSpec.from_string(v.device).job for v in twin.weights} == {"ps"}
    assert places == {0, 1}
    assert len(twin.weights) > len(model.weights)
    assert len(model.get_weights()) == 8
    assert model.get_weights()[0].shape == (5, 8)


@scenario
def a_program_enters_it_once(strategy, folder):
    with pytest.raises(OptionError, match="must enter strategy 'parameter_server' once"):
        tfdist.strategy("parameter_server").start()


@scenario("parameter_server", "keras_3")
def each_record_is_counted_once_an_epoch(strategy, folder):
    def numbering():
        model = keras.Sequential([keras.Input((5,)), layers.Dense(NUM, "softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=[Seen()])
        return model

    model = strategy.build(numbering)
    feed = strategy.dataset((X, np.arange(NUM)), global_batch_size=4)
    history = model.fit(feed, epochs=3, verbose=0).history
    assert history["seen_least"] == history["seen_most"] == [1.0, 1.0, 1.0]
    assert int(model.optimizer.iterations) == 36


@scenario("parameter_server", "keras_3")
def a_fit_learns_and_validates(strategy, folder):
    model = strategy.build(model_fn)
    history = model.fit(data_of(strategy), epochs=12, validation_data=(X, Y), verbose=0).history
    assert set(history) == {
        *("loss", "accuracy", "sparse_categorical_crossentropy", "learning_rate"),
        *("val_loss", "val_accuracy", "val_sparse_categorical_crossentropy"),
    }
    assert history["loss"][-1] < 0.8 * history["loss"][0]
    assert history["val_accuracy"][-1] > 0.6
    plain = model_fn()
    plain.set_weights(model.get_weights())
    expected = plain.evaluate(X, Y, batch_size=8, verbose=0, return_dict=True)
    assert history["val_loss"][-1] == pytest.approx(expected["loss"], abs=1e-5)


@scenario
def evaluation_and_prediction_are_those_of_one_device(strategy, folder):
    model = strategy.build(model_fn)
    model.fit(data_of(strategy), epochs=2, verbose=0)
    plain = model_fn()
    plain.set_weights(model.get_weights())
    found = model.evaluate(data_of(strategy, training=False), verbose=0, return_dict=True)
    expected = plain.evaluate(X, Y, batch_size=8, verbose=0, return_dict=True)
    for name, value in zip(expected, found.values(), strict=True):
        assert value == pytest.approx(expected[name], abs=1e-5)
    np.testing.assert_allclose(
        model.predict(data_of(strategy, training=False), verbose=0),
        plain.predict(X, verbose=0),
        atol=1e-6,
    )


@scenario("parameter_server", "keras_3", long=True)
def files_are_keras_own_with_whole_weights_and_slots(strategy, folder):
    model = strategy.build(model_fn)
    model.fit(data_of(strategy), verbose=0)
    strategy.save(model, folder / "model.keras")
    loaded = keras.models.load_model(folder / "model.keras")
    assert type(loaded.distribute_strategy) is not type(twin_of(strategy).distribute_strategy)
    for ours, theirs in (
        (model.weights, loaded.weights),
        (model.optimizer.variables, loaded.optimizer.variables),
    ):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert int(loaded.optimizer.iterations) == 6
    assert np.abs(loaded.optimizer.variables[2].numpy()).max() > 0, "slots have been brought over"
    before = model.get_weights()
    model.save_weights(folder / "kept.weights.h5")
    model.fit(data_of(strategy), verbose=0)
    assert np.abs(model.get_weights()[0] - before[0]).max() > 0
    model.load_weights(folder / "kept.weights.h5")
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)


@scenario("parameter_server", "keras_3")
def weights_read_within_an_epoch_are_the_servers(strategy, folder):
    seen = []

    class Reader(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            assert set(logs) == {"loss", "accuracy", "sparse_categorical_crossentropy"}
            seen.append(self.model.get_weights()[0])

    model = strategy.build(model_fn)
    model.fit(data_of(strategy), callbacks=[Reader()], verbose=0)
    assert len(seen) == 6
    for before, after in itertools.pairwise(seen):
        assert np.abs(before - after).max() > 0


@scenario
def what_callbacks_read_and_set_on_a_layer_within_an_epoch_is_the_servers(strategy, folder):
    seen, was = [], []

    class Reader(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            kernel = self.model.layers[0].kernel.numpy()
            outputs = self.model(X, training=False).numpy()
            np.testing.assert_array_equal(kernel, self.model.get_weights()[0])
            np.testing.assert_allclose(outputs, self.model.predict(X, verbose=0), atol=1e-6)
            seen.append(kernel)

    model = strategy.build(model_fn)
    model.fit(data_of(strategy), callbacks=[Reader()], verbose=0)
    for before, after in itertools.pairwise(seen):
        assert np.abs(before - after).max() > 0

    class Writer(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            layer = self.model.layers[0]
            if batch == 2:
                was.extend(layer.get_weights())
                layer.kernel.assign_add(tf.ones_like(layer.kernel))
                layer.set_weights([layer.kernel.numpy(), was[1] + 2])

    model = strategy.build(lambda: model_fn(keras.optimizers.SGD(0.0)))
    model.fit(data_of(strategy), callbacks=[Writer()], verbose=0)
    kernel, bias = model.layers[0].get_weights()
    np.testing.assert_array_equal(kernel, was[0] + 1)
    np.testing.assert_array_equal(bias, was[1] + 2)


@scenario("parameter_server", "keras_3", long=True)
def keras_callbacks_work(strategy, folder):
    rates = [0.5, 0.25, 1e-5]
    model = strategy.build(lambda: model_fn(keras.optimizers.SGD(1.0)))
    history = model.fit(
        data_of(strategy),
        epochs=3,
        validation_data=data_of(strategy, training=False),
        callbacks=[
            keras.callbacks.LearningRateScheduler(lambda epoch: rates[epoch]),
            keras.callbacks.ModelCheckpoint(str(folder / "{epoch}.keras")),
            keras.callbacks.CSVLogger(str(folder / "log.csv")),
            keras.callbacks.TerminateOnNaN(),
            keras.callbacks.EarlyStopping("val_loss", patience=5, restore_best_weights=True),
        ],
        verbose=0,
    ).history
    np.testing.assert_allclose(history["learning_rate"], rates)
    assert sorted(path.name for path in folder.glob("*.keras")) == ["1.keras", "2.keras", "3.keras"]
    assert len(list(csv.DictReader((folder / "log.csv").open()))) == 3
    second, third = (
        keras.models.load_model(folder / f"{epoch}.keras", compile=False) for epoch in (2, 3)
    )
    change = np.abs(second.get_weights()[0] - third.get_weights()[0]).max()
    assert 0 < change < 1e-3, "the rate of each epoch has reached the workers"


@scenario("parameter_server", "keras_3", long=True)
def a_fit_broken_within_an_epoch_is_gone_on_with(strategy, folder):
    class Break(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3:
                raise KeyboardInterrupt

    model = strategy.build(model_fn)
    keep = tfdist.Checkpoints(folder, every_steps=2)
    with pytest.raises(KeyboardInterrupt):
        model.fit(data_of(strategy), epochs=3, callbacks=[keep, Break()], verbose=0)
    resumed = strategy.build(model_fn)
    go_on = tfdist.Checkpoints(folder, resume=True)
    history = resumed.fit(data_of(strategy), epochs=3, callbacks=[go_on], verbose=0).history
    assert len(history["loss"]) == 3
    assert int(resumed.optimizer.iterations) == 18


@scenario(long=True)
def a_rule_for_the_learning_rate_counts_the_workers(strategy, folder):
    scaled = tfdist.strategy("parameter_server", lr_scaling="linear", warmup_epochs=1)
    scaled._cluster = strategy._cluster
    assert strategy.num_replicas == 2
    for rate in (0.1, keras.optimizers.schedules.ExponentialDecay(0.1, 1, 1.0)):
        model = scaled.build(lambda rate=rate: model_fn(keras.optimizers.SGD(rate)))
        history = model.fit(data_of(strategy), epochs=3, verbose=0).history
        np.testing.assert_allclose(history["learning_rate"][1:], [0.2, 0.2], rtol=1e-6)
        assert 0.1 < history["learning_rate"][0] < 0.2


@scenario
def layers_compute_in_the_precision_asked_for(strategy, folder):
    coarse = tfdist.strategy("parameter_server", precision="mixed_bfloat16")
    coarse._cluster = strategy._cluster

    def small():
        inputs = keras.Input((5,))
        model = keras.Model(inputs, layers.Dense(1, "sigmoid")(inputs))
        model.compile("sgd", "binary_crossentropy")
        return model

    model = coarse.build(small)
    assert coarse._steps[-1]._twin.twin.layers[-1].compute_dtype == "bfloat16"
    history = model.fit(
        strategy.dataset((X, (Y == 2).astype(np.float32)), global_batch_size=8), epochs=6, verbose=0
    )
    assert history.history["loss"][-1] < history.history["loss"][0]
    assert model.get_weights()[0].dtype == np.float32
    with pytest.raises(ModelError, match="mixed precision with large variables"):
        coarse.build(model_fn)


@scenario(long=True)
def arrays_go_the_way_of_keras(strategy, folder):
    model = strategy.build(model_fn)
    history = model.fit(X, Y, batch_size=8, epochs=2, validation_split=0.2, verbose=0).history
    assert len(history["val_loss"]) == 2
    assert int(model.optimizer.iterations) == 10
    assert model.predict(X, verbose=0).shape == (NUM, 3)


@scenario(long=True)
def a_model_compiled_anew_trains_as_it_is_compiled_then(strategy, folder):
    model = strategy.build(model_fn)
    model.fit(data_of(strategy), verbose=0)
    model.layers[0].trainable = False
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy")
    before = model.get_weights()
    assert set(model.fit(data_of(strategy), verbose=0).history) == {"loss", "learning_rate"}
    after = model.get_weights()
    np.testing.assert_array_equal(before[0], after[0])
    assert np.abs(before[-1] - after[-1]).max() > 0


@scenario("parameter_server", "keras_3")
def what_does_not_decay_in_a_model_object_does_not_on_the_servers(strategy, folder):
    def of_zeros():
        model = keras.Sequential([keras.Input((5,)), layers.Dense(4, kernel_initializer="ones")])
        model.compile(keras.optimizers.AdamW(0.1, weight_decay=1.0), "mse")
        model.optimizer.exclude_from_weight_decay(var_names=["kernel"])
        return model

    model = strategy.build(of_zeros())
    # Nothing but decay moves a kernel whose inputs are 0.
    zeros = np.zeros((16, 5), np.float32), np.ones((16, 4), np.float32)
    model.fit(strategy.dataset(zeros, global_batch_size=8), verbose=0)
    kernel, bias = model.get_weights()
    np.testing.assert_array_equal(kernel, np.ones_like(kernel))
    assert np.abs(bias).min() > 0


@scenario
def what_is_frozen_later_or_twice_is_paired(strategy, folder):
    model = strategy.build(model_fn)
    model.layers[0].trainable = False  # Keras 2 trains what was trainable when it was compiled.
    before = model.get_weights()
    model.fit(data_of(strategy), verbose=0)
    assert np.abs(model.layers[0].get_weights()[0] - before[0]).max() > 0

    def shared():
        inputs = keras.Input((5,))
        both = layers.Dense(5, "tanh", trainable=False)
        parts = [keras.Sequential([both, layers.Dense(3)]) for _ in range(2)]
        outputs = layers.Add()([part(inputs) for part in parts])
        model = keras.Model(inputs, layers.Softmax()(outputs))
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    model = strategy.build(shared)
    model.compile("adam", "sparse_categorical_crossentropy")
    frozen, *trained = model.non_trainable_weights[0], *model.trainable_weights
    before = [weight.numpy() for weight in (frozen, *trained)]
    model.fit(data_of(strategy), verbose=0)
    np.testing.assert_array_equal(before[0], frozen)
    for was, weight in zip(before[1:], trained, strict=True):
        assert np.abs(was - weight.numpy()).max() > 0


@scenario
def a_train_step_of_ones_own_runs_on_the_workers(strategy, folder):
    class Halved(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True)) / 2
            self.optimizer.minimize(loss, self.trainable_variables, tape)
            return {"halved": loss}

    def halved():
        inputs = keras.Input((5,))
        model = Halved(inputs, layers.Dense(3, "softmax")(inputs))
        model.compile(keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy")
        return model

    model = strategy.build(halved)
    before = model.evaluate(X, Y, verbose=0)
    history = model.fit(data_of(strategy), epochs=4, verbose=0).history
    assert set(history) == {"halved", "learning_rate"}
    assert model.evaluate(X, Y, verbose=0) < before


@scenario
def numbers_of_an_epoch_are_those_of_its_last_step(strategy, folder):
    """Of a step of one's own that shows no metrics, in a model without a call."""

    class Told(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = keras.Sequential([keras.Input((5,)), layers.Dense(3, "softmax")])
            self.loss_fn = keras.losses.SparseCategoricalCrossentropy()

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.loss_fn(y, self.inner(x, training=True))
            self.optimizer.minimize(loss, self.trainable_variables, tape)
            return {"mean": tf.reduce_mean(x)}

    def told():
        model = Told()
        model.compile(keras.optimizers.SGD(0.1))
        return model

    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    history = strategy.build(told).fit(data, epochs=2, verbose=0).history
    assert history["mean"] == pytest.approx([X[40:].mean()] * 2)


@scenario
def a_metric_that_a_layer_adds_counts_each_record_once(strategy, folder):
    class Watched(layers.Layer):
        def call(self, inputs):
            self.add_metric(tf.reduce_mean(inputs, axis=1), name="size")
            if tf.size(inputs) > 1000:
                return inputs * 0.0
            return inputs

    def watched():
        inputs = keras.Input((5,))
        model = keras.Model(inputs, layers.Dense(3, "softmax")(Watched()(inputs)))
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    history = strategy.build(watched).fit(data_of(strategy), epochs=2, verbose=0).history
    assert history["size"] == pytest.approx([X.mean()] * 2, abs=1e-5)


@scenario(long=True)
def a_model_made_outside_is_left_alone(strategy, folder):
    mine = model_fn()
    before = mine.get_weights()
    model = strategy.build(mine)
    model.fit(data_of(strategy), verbose=0)
    for a, b in zip(mine.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)


@scenario("parameter_server", "keras_3", long=True)
def only_the_loss_is_verified(strategy, folder):
    report = tfdist.verify(model_fn, (X, Y), strategy, steps=24, global_batch_size=8)
    assert report.passed, str(report)
    assert report.losses.final < report.losses.initial
    text = str(report)
    assert "on 2 workers is asynchronous, so only its loss is checked" in text
    assert "within the bound" in text
    assert "others have changed" in text
    assert not report.is_rounding_known


@scenario
def a_mistake_in_the_data_is_explained_and_training_goes_on(strategy, folder):
    model = strategy.build(model_fn)
    wrong = strategy.dataset((X, np.where(Y == 2, 7, Y)), global_batch_size=8)
    with pytest.raises(DataError, match="label 7"):
        model.fit(wrong, verbose=0)
    history = model.fit(data_of(strategy), epochs=2, verbose=0).history
    assert np.isfinite(history["loss"]).all()


@scenario
def python_functions_of_a_model_run_on_the_chief(strategy, folder):
    called = []

    def note(x):
        called.append(os.getpid())
        return x

    def with_python():
        inputs = keras.Input((5,))
        hidden = layers.Lambda(
            lambda x: tf.ensure_shape(tf.py_function(note, [x], tf.float32), [None, 5])
        )(inputs)
        model = keras.Model(inputs, layers.Dense(3, "softmax")(hidden))
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    strategy.build(with_python).fit(data_of(strategy), verbose=0)
    assert len(called) >= 6
    assert set(called) == {os.getpid()}


@scenario
def a_fit_begins_with_the_weights_of_the_chief(strategy, folder):
    """A layer's own set_weights, or an optimizer applied by hand, tells nobody."""
    model = strategy.build(lambda: model_fn(keras.optimizers.SGD(0.0)))
    model.fit(data_of(strategy), verbose=0)
    kernel, bias = model.layers[0].get_weights()
    model.layers[0].set_weights([kernel + 1, bias])
    model.fit(data_of(strategy), verbose=0)
    np.testing.assert_array_equal(model.layers[0].get_weights()[0], kernel + 1)


@scenario(long=True)
def one_batch_gives_its_own_results(strategy, folder):
    def plain():
        model = keras.Sequential([keras.Input((5,)), layers.Dense(3, "softmax")])
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", ["accuracy"])
        return model

    model, reference = strategy.build(plain), plain()
    reference.set_weights(model.get_weights())
    for reset in (True, True, False, False):
        ours, theirs = (
            m.train_on_batch(X, Y, reset_metrics=reset, return_dict=True)
            for m in (model, reference)
        )
        assert ours == pytest.approx(theirs, abs=1e-5)
        found, expected = (m.predict_on_batch(X) for m in (model, reference))
        np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(model.get_weights()[0], reference.get_weights()[0], atol=1e-6)
    assert model.test_on_batch(X, Y) == pytest.approx(reference.test_on_batch(X, Y), abs=1e-5)


@scenario
def rows_need_no_labels(strategy, folder):
    def autoencoder():
        inputs = keras.Input((5,))
        outputs = layers.Dense(5, kernel_initializer="ones")(inputs)
        model = keras.Model(inputs, outputs)
        model.add_loss(tf.reduce_mean(tf.square(outputs - inputs)))
        model.compile(keras.optimizers.SGD(0.01))
        return model

    model, reference = strategy.build(autoencoder), autoencoder()
    model.fit(strategy.dataset(X, global_batch_size=NUM), epochs=2, verbose=0)
    reference.fit(X, batch_size=NUM, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_allclose(model.get_weights()[0], reference.get_weights()[0], atol=1e-5)


@scenario(long=True)
def what_layers_have_learned_goes_to_the_workers(strategy, folder):
    words = np.array(["a b c", "d e", "a", "f g h a", "b b"] * (NUM // 5))[:, None]

    def reader(kind, of):
        inputs = keras.Input(of.shape[1:], dtype="float32" if of is X else "string")
        learned = kind()
        learned.adapt(of)
        hidden = tf.cast(learned(inputs), tf.float32)
        model = keras.Model(inputs, layers.Dense(3, "softmax")(hidden))
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    for kind, of in (
        (lambda: layers.TextVectorization(output_mode="tf_idf"), words),
        (lambda: layers.TextVectorization(output_mode="multi_hot"), words),
        (lambda: layers.Discretization(num_bins=4), X),
    ):
        model = strategy.build(lambda kind=kind, of=of: reader(kind, of))
        feed = strategy.dataset((of, Y), global_batch_size=8)
        assert len(model.fit(feed, verbose=0).history["loss"]) == 1


@scenario
def tables_of_the_chief_are_those_of_the_workers(strategy, folder):
    """Of a copied model, of one that is resumed when its data has grown, and where it is saved."""
    names = np.array(["a", "b", "c", "d"] * NUM)[:NUM, None]
    numbers = np.array([3, 5, 7] * NUM)[:NUM, None]

    def reader(of):
        name, number = keras.Input((1,), dtype="string"), keras.Input((1,), dtype="int64")
        value = keras.Input((5,))
        by_name, by_number = layers.StringLookup(), layers.IntegerLookup()
        scale = layers.Normalization()
        for layer, column in ((by_name, names), (by_number, numbers), (scale, X)):
            layer.adapt(column[of:])
        read = [layers.Flatten()(layers.Embedding(9, 3)(by_name(name)))]
        read += [layers.Flatten()(layers.Embedding(9, 3)(by_number(number))), scale(value)]
        outputs = layers.Dense(3, "softmax")(layers.concatenate(read))
        model = keras.Model([name, number, value], outputs)
        model.compile(keras.optimizers.SGD(0.05), "sparse_categorical_crossentropy")
        return model

    x = (names, numbers, X)
    feed = strategy.dataset((x, Y), global_batch_size=NUM)  # A step, whoever takes it.
    reference = reader(0)
    model = strategy.build(reference)
    model.fit(feed, verbose=0, callbacks=[tfdist.Checkpoints(folder / "kept")])
    resumed = strategy.build(lambda: reader(NUM - 2))
    keep = tfdist.Checkpoints(folder / "kept", resume=True)
    resumed.fit(feed, epochs=2, verbose=0, callbacks=[keep])
    for _ in range(2):
        reference.train_on_batch(x, Y)
    for ours, theirs in zip(resumed.weights, reference.weights, strict=True):
        if isinstance(ours, tf.Variable) and ours.dtype.is_floating:
            np.testing.assert_allclose(ours.numpy(), theirs.numpy(), atol=1e-5, err_msg=ours.name)
    expected = reference.predict_on_batch([tf.constant(column) for column in x])
    np.testing.assert_allclose(resumed.predict(x, verbose=0), expected, atol=1e-5)
    strategy.save(resumed, folder / "model.keras")
    loaded = keras.models.load_model(folder / "model.keras")
    found = loaded.predict_on_batch([tf.constant(column) for column in x])
    np.testing.assert_allclose(found, expected, atol=1e-5)


@scenario
def what_would_be_wrong_is_refused(strategy, folder):
    optimizers = keras.optimizers

    def refused(match, **compiled):
        with pytest.raises(ModelError, match=match):
            strategy.build(lambda: model_fn(**compiled)).fit(data_of(strategy), verbose=0)

    refused("jit_compile", jit_compile=True)
    refused("run_eagerly", run_eagerly=True)
    refused("tf.keras.optimizers.SGD", optimizer=optimizers.legacy.SGD())
    scaled = keras.mixed_precision.LossScaleOptimizer(optimizers.SGD())
    refused("LossScaleOptimizer", optimizer=scaled)
    refused("the optimizer Nadam", optimizer=optimizers.Nadam())
    refused("clipnorm=1.0", optimizer=optimizers.SGD(clipnorm=1.0))
    refused("Adafactor", optimizer=optimizers.Adafactor())

    def unit_norm():
        inputs = keras.Input((5,))
        outputs = layers.Dense(3, kernel_constraint="unit_norm")(inputs)
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "mse")
        return model

    def decays_in_part():
        model = model_fn(optimizers.AdamW())
        model.optimizer.exclude_from_weight_decay(var_list=[model.layers[0].kernel])
        return model

    with pytest.raises(ModelError, match="Give var_names instead"):
        strategy.build(decays_in_part).fit(data_of(strategy), verbose=0)
    with pytest.raises(ModelError, match="UnitNorm"):
        strategy.build(unit_norm).fit(data_of(strategy), verbose=0)

    def two_optimizers():
        model = model_fn()
        model.second = optimizers.SGD()
        return model

    with pytest.raises(ModelError, match="a second one, SGD"):
        strategy.build(two_optimizers)

    def stateful():
        inputs = keras.Input((4, 3), batch_size=8)
        model = keras.Model(inputs, layers.LSTM(3, stateful=True)(inputs))
        model.compile("sgd", "mse")
        return model

    with pytest.raises(ModelError, match=r"stateful recurrent layer.* steps of their own"):
        strategy.build(stateful)


@scenario("parameter_server", "keras_3", long=True)
def an_average_of_weights_is_kept_over_shards(strategy, folder):
    model = strategy.build(lambda: model_fn(keras.optimizers.SGD(0.1, use_ema=True)))
    history = model.fit(data_of(strategy), epochs=2, verbose=0).history
    assert np.isfinite(history["loss"]).all()
    averages = model.optimizer._model_variables_moving_average
    np.testing.assert_array_equal(averages[0].numpy(), model.get_weights()[0])


class Noted(layers.Layer):
    """Keeps the mean of the last batch in a variable of TensorFlow, which Keras 3 does not know."""

    def build(self, input_shape):
        self.mean = tf.Variable(0.0, trainable=False)

    def call(self, inputs, training=False):
        if training:
            self.mean.assign(tf.reduce_mean(inputs))
        return inputs + self.mean


@scenario("keras_3")
def all_that_keras_3_keeps_comes_over(strategy, folder):
    """Of a step that one worker takes: shards, seeds, slots, and a weight frozen by itself."""

    def kept():
        inputs = keras.Input((5,))
        hidden = layers.Dense(8, "tanh", kernel_regularizer="l2")(inputs)
        hidden = layers.Dropout(0.3, seed=1)(layers.BatchNormalization()(hidden))
        model = keras.Model(inputs, layers.Dense(3, "softmax")(Noted()(hidden)))
        model.layers[-1].kernel.trainable = False
        model.compile(keras.optimizers.AdamW(0.02), "sparse_categorical_crossentropy")
        model.optimizer.exclude_from_weight_decay(var_names=["bias"])
        model.optimizer.build(model.trainable_variables)
        return model

    keras.utils.set_random_seed(1)
    reference = kept()
    keras.utils.set_random_seed(1)
    model = strategy.build(kept)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(NUM)
    for _ in range(4):
        found, expected = (one.fit(data, verbose=0).history for one in (model, reference))
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert_near(model.get_weights(), reference.get_weights())
    assert_near(
        [one.numpy() for one in (*model.optimizer.variables, model.layers[-2].mean)],
        [one.numpy() for one in (*reference.optimizer.variables, reference.layers[-2].mean)],
    )
    assert_near([model.predict(X, verbose=0)], [reference.predict(X, verbose=0)])


@scenario("keras_3")
def tables_of_a_copied_model_of_keras_3_are_those_of_the_workers(strategy, folder):
    names = np.array(["a", "b", "c", "d"] * NUM)[:NUM, None]
    lookup = layers.StringLookup()
    lookup.adapt(names)
    inputs = keras.Input((1,), dtype="string")
    hidden = layers.Flatten()(layers.Embedding(9, 3)(lookup(inputs)))
    reference = keras.Model(inputs, layers.Dense(3, "softmax")(hidden))
    reference.compile(keras.optimizers.Adam(0.05), "sparse_categorical_crossentropy")
    model = strategy.build(reference)
    data = tf.data.Dataset.from_tensor_slices((names, Y)).batch(NUM)
    for one in (model, reference):
        one.fit(data.repeat(3), verbose=0, steps_per_epoch=1, epochs=3)
    assert_near(model.get_weights(), reference.get_weights())


@scenario("keras_3")
def metrics_count_in_branches_of_a_step_of_ones_own(strategy, folder):
    class Branching(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            if tf.reduce_sum(x) > -1e9:
                self.seen.update_state(y, None)
            return self.seen.result()

    def branching():
        inputs = keras.Input((5,))
        model = Branching(inputs, layers.Dense(NUM, "softmax")(inputs))
        model.seen = Seen()
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    feed = strategy.dataset((X, np.arange(NUM)), global_batch_size=NUM)
    history = strategy.build(branching).fit(feed, epochs=2, verbose=0).history
    assert history["seen_least"] == history["seen_most"] == [1.0, 1.0]


class Best(keras.metrics.Metric):
    """The largest label, which is no sum."""

    def __init__(self, **options):
        super().__init__(**options)
        self.best = self.add_weight(name="best", initializer=lambda *_, **__: -np.inf)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.best.assign(keras.ops.maximum(self.best, keras.ops.max(y_true)))

    def result(self):
        return self.best


@scenario("keras_3")
def metrics_that_are_no_sums_and_of_layers_within_layers(strategy, folder):
    class Inner(layers.Layer):
        def __init__(self):
            super().__init__(name="inner")
            self.ones = keras.metrics.Sum(name="ones")

        def call(self, x):
            self.ones.update_state(keras.ops.ones_like(x[:, 0]))
            return x

    class Outer(layers.Layer):
        def __init__(self):
            super().__init__(name="outer")
            self.inner = Inner()

        def call(self, x):
            return self.inner(x)

    def measured():
        inputs = keras.Input((5,))
        model = keras.Model(inputs, layers.Dense(3, "softmax", name="last")(Outer()(inputs)))
        best = Best(name="best")
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=[best])
        return model

    # In each batch, lest a worker writes what another has not seen.
    feed = strategy.dataset((X, np.full(NUM, 2)), global_batch_size=8)
    history = strategy.build(measured).fit(feed, verbose=0).history
    assert history["best"] == [2.0]
    assert history["ones"] == [float(NUM)]


@scenario("keras_3")
def what_would_be_wrong_with_keras_3_is_refused(strategy, folder):
    optimizers = keras.optimizers

    def refused(match, make=model_fn, **compiled):
        with pytest.raises(ModelError, match=match) as refusal:
            strategy.build(lambda: make(**compiled)).fit(data_of(strategy), verbose=0)
        assert "\n" not in str(refusal.value)

    refused(r"jit_compile", jit_compile=True)
    refused(r"LossScaleOptimizer", optimizer=optimizers.LossScaleOptimizer(optimizers.SGD()))
    refused(r"MultiOptimizer", optimizer=optimizers.MultiOptimizer([(".*", optimizers.SGD())]))
    waits = optimizers.SGD(gradient_accumulation_steps=2)
    refused(r"gradient_accumulation_steps=2", optimizer=waits)
    refused(r"clipnorm=1.0", optimizer=optimizers.SGD(clipnorm=1.0))
    refused(r"Lamb", optimizer=optimizers.Lamb())

    class Normed(layers.Layer):
        def build(self, input_shape):
            self.w = self.add_weight(shape=(5, 3), constraint="unit_norm", name="w")

        def call(self, inputs):
            return keras.ops.softmax(keras.ops.matmul(inputs, self.w))

    def normed():
        inputs = keras.Input((5,))
        model = keras.Model(inputs, Normed(name="normed")(inputs))
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    refused(r"UnitNorm of layer 'normed'", normed)

    class Unseeded(layers.Layer):
        def call(self, inputs, training=False):
            return inputs + keras.random.normal((1,)) if training else inputs

    def unseeded():
        inputs = keras.Input((5,))
        model = keras.Model(inputs, layers.Dense(3, "softmax")(Unseeded()(inputs)))
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    refused(r"SeedGenerator that the layer has made", unseeded)

    def unit_norm():
        inputs = keras.Input((5,))
        outputs = layers.Dense(3, "softmax", kernel_constraint="unit_norm")(inputs)
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    refused(r"UnitNorm", unit_norm)
