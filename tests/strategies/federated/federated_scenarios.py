"""Federated fits on TFF's engine; run by test_federated.py in a process of their own."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import signal
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf
from scenarios import scenario
from tensorflow import keras

import tfdist
from tfdist.errors import DataError, ModelError, OptionError
from tfdist.strategies.federated.aggregation import trimmed_mean
from tfdist.strategies.federated.options import Options
from tfdist.training.feed.training_data import TrainingData

layers = keras.layers
RNG = np.random.default_rng(0)


def records(number, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, number)
    return (rng.normal(size=(number, 4)) + y[:, None]).astype(np.float32), y


def model_fn(optimizer=None, *more, metrics=("accuracy",)):
    hidden = layers.Dense(6, "tanh", kernel_regularizer="l2")
    model = keras.Sequential([keras.Input((4,)), hidden, *more, layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.SGD(0.2), loss, metrics=list(metrics))
    return model


@contextlib.contextmanager
def federated(**options):
    """Yields the strategy and a model from fixed weights."""
    with tfdist.strategy("federated", **options) as strategy:
        yield strategy


def built(strategy, make=model_fn):
    keras.utils.set_random_seed(3)
    return strategy.build(make)


def unequal(*sizes):
    return {f"client-{i}": records(size, seed=i) for i, size in enumerate(sizes)}


def difference(model, other):
    pairs = zip(model.get_weights(), other.get_weights(), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def trained(data, rounds=1, make=model_fn, fit=None, **options):
    """Returns the model and the history of a fit on clients."""
    with federated(**options) as strategy:
        model = built(strategy, make)
        history = model.fit(strategy.dataset(data), epochs=rounds, verbose=0, **fit or {})
        return model, history


def one_device(data, rounds, make=model_fn, **options):
    strategy = tfdist.strategy("federated", **options)
    keras.utils.set_random_seed(3)
    model = make()
    model.run_eagerly = True  # Nothing is traced, which takes longer than its steps.
    feed = strategy.dataset(data)
    assert isinstance(feed, TrainingData)
    history = model.fit(
        feed.on_one_device().epochs(0, rounds),
        epochs=rounds,
        steps_per_epoch=feed.steps_per_epoch,
        verbose=0,
    )
    return model, history


def assert_exact(data, rounds, make=model_fn, **options):
    model, found = trained(data, rounds, make, **options)
    reference, expected = one_device(data, rounds, make, **options)
    assert difference(model, reference) <= 1e-5
    for name, values in expected.history.items():
        np.testing.assert_allclose(found.history[name], values, atol=1e-5, err_msg=name)


# Exactness --------------------------------------------------------------------------------------


@scenario("federated", "keras_3", long=True)
def one_client_is_plain_sgd(strategy, folder):
    x, y = records(29)
    weight = np.linspace(0.1, 3, 29).astype(np.float32)
    for local_epochs in (1, 2):
        options = {"clients_per_round": 1, "local_epochs": local_epochs, "local_batch_size": 8}
        assert_exact({"all": (x, y, weight)}, 3, **options)


@scenario(long=True)
def equal_clients_and_one_local_step_are_a_step_of_all(strategy, folder):
    assert_exact(unequal(12, 12, 12), 3, local_batch_size=12)


@scenario(long=True)
def fedsgd_is_a_step_on_all_records(strategy, folder):
    def with_clipped_adam():
        # No optimizer of TFF clips; the compiled one is applied as it is.
        return model_fn(keras.optimizers.Adam(0.01, epsilon=1e-3, clipnorm=0.3))

    assert_exact(unequal(5, 20, 11), 4, with_clipped_adam, algorithm="fedsgd")


@scenario("federated", "keras_3", long=True)
def the_mapped_optimizers_update_as_those_of_keras(strategy, folder):
    optimizers = keras.optimizers
    for make in (
        lambda: optimizers.SGD(0.1, momentum=0.9),
        lambda: optimizers.Adam(0.01, epsilon=1e-3),
        lambda: optimizers.AdamW(0.01, epsilon=1e-3, weight_decay=0.1),
        lambda: optimizers.Adagrad(0.1),
    ):
        # Within one round: a client's optimizer starts anew in the next.
        data = {"all": records(24)}
        options = {"clients_per_round": 1, "local_batch_size": 8}
        model, _ = trained(data, 1, lambda make=make: model_fn(make()), **options)
        reference, _ = one_device(data, 1, lambda make=make: model_fn(make()), **options)
        assert difference(model, reference) <= 1e-5, make().name


@scenario("federated", "keras_3", long=True)
def verify_knows_what_is_exact(strategy, folder):
    with federated(clients_per_round=1) as exact:
        report = tfdist.verify(model_fn, records(60), exact, steps=4, global_batch_size=12)
        assert report.exact, str(report)
        assert (report.steps, report.tail) == (4, 4)
    with federated(clients_per_round=3) as several:
        report = tfdist.verify(model_fn, records(60), several, steps=4, global_batch_size=12)
        assert not report.exact
        assert "clients take steps apart before they are averaged" in str(report)
    with federated(algorithm="fedsgd", clients_per_round=1, batch_norm="group_norm") as replaces:
        report = tfdist.verify(
            with_batch_norm, records(60), replaces, steps=4, global_batch_size=12
        )
        assert report.exact, str(report)
        assert "both trained the model with the layers that the strategy has replaced" in str(
            report
        )


# Algorithms and aggregation ---------------------------------------------------------------------


@scenario
def every_algorithm_updates_as_it_is_defined(strategy, folder):
    class Kept(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.rounds = []

        def on_epoch_end(self, epoch, logs=None):
            self.rounds.append(self.model.get_weights())

    def weights_of(algorithm, rounds=1, batch=10):
        """Returns the weights after each round."""
        options = {"algorithm": algorithm, "local_batch_size": batch}
        trained(unequal(40, 30, 50), rounds, fit={"callbacks": [kept := Kept()]}, **options)
        return kept.rounds

    def assert_are(found, changed, algorithm):
        for ours, right in zip(found, changed, strict=True):
            np.testing.assert_allclose(ours, right, atol=1e-5, err_msg=algorithm)

    with federated() as untrained:
        start = built(untrained).get_weights()
    once, twice = weights_of("fedavg", 2)
    changes = [new - old for old, new in zip(start, once, strict=True)]
    # A first step of Reddi et al. 2021, Algorithm 2, its moments without their bias.
    first_steps = {
        "fedadagrad": lambda d: 0.03 * d / np.sqrt(d**2 + 1e-6),
        "fedadam": lambda d: 0.03 * 0.1 * d / (0.1 * np.abs(d) + 1e-3),
        "fedyogi": lambda d: (
            0.03 * 0.1 * d / (np.sqrt(1e-6 + 0.01 * np.sign(d**2 - 1e-6) * d**2) + 1e-3)
        ),
    }
    for algorithm, step in first_steps.items():
        expected = [old + step(d) for old, d in zip(start, changes, strict=True)]
        assert_are(weights_of(algorithm)[0], expected, algorithm)
    # The second round of fedavgm adds nine tenths of the first.
    expected = [new + 0.9 * d for new, d in zip(twice, changes, strict=True)]
    assert_are(weights_of("fedavgm", 2)[1], expected, "fedavgm")
    # Nothing holds a client of fedprox back in its first step, from where all begin.
    (one_step,), (free,) = (weights_of(name, batch=50) for name in ("fedprox", "fedavg"))
    assert_are(one_step, free, "fedprox")
    assert np.abs(weights_of("fedprox")[0][0] - once[0]).max() > 1e-5


@scenario(long=True)
def fedprox_keeps_clients_near_the_model(strategy, folder):
    start = model_of_start()
    free, _ = trained(unequal(40), 1, local_batch_size=4, algorithm="fedavg")
    held, _ = trained(
        unequal(40), 1, local_batch_size=4, algorithm="fedprox", proximal_strength=2.0
    )
    assert difference(held, start) < 0.8 * difference(free, start)


def model_of_start():
    keras.utils.set_random_seed(3)
    return model_fn()


@scenario(long=True)
def the_server_has_a_learning_rate(strategy, folder):
    start = model_of_start()
    whole, _ = trained(unequal(8, 8))
    half, _ = trained(unequal(8, 8), server_learning_rate=0.5)
    for a, b, c in zip(start.get_weights(), whole.get_weights(), half.get_weights(), strict=True):
        np.testing.assert_allclose(c - a, (b - a) / 2, atol=1e-6)


@scenario(long=True)
def the_median_ignores_one_client(strategy, folder):
    data = unequal(10, 10, 10)
    # One batch each: the order of the records would depend on the client's place.
    median, _ = trained(data, aggregation="median", local_batch_size=10)
    alone = [
        trained({client: data[client]}, local_batch_size=10)[0].get_weights() for client in data
    ]
    for found, *values in zip(median.get_weights(), *alone, strict=True):
        np.testing.assert_allclose(found, np.median(values, axis=0), atol=1e-6)
    rows = RNG.normal(size=(10, 3)).astype(np.float32)
    trimmed = np.sort(rows, axis=0)[2:8].mean(axis=0)
    np.testing.assert_allclose(trimmed_mean(tf.constant(rows), 0.2), trimmed, atol=1e-6)
    np.testing.assert_allclose(
        trimmed_mean(tf.constant(rows), 0.5), np.median(rows, axis=0), atol=1e-6
    )
    # A client that is left out is no update of zeros.
    x, y = records(10, seed=9)
    loud = x, y, np.full(10, 3e38, np.float32)
    weighed = {client: (*rows, np.ones(10, np.float32)) for client, rows in data.items()}
    without, history = trained(weighed | {"loud": loud}, aggregation="median", local_batch_size=10)
    assert history.rounds[0].clients == tuple(data)
    assert difference(without, median) <= 1e-6


@scenario(long=True)
def clipping_bounds_a_client_that_shouts(strategy, folder):
    data = {
        client: (x, y, np.full(20, 50 if client == "client-3" else 1, np.float32))
        for client, (x, y) in unequal(20, 20, 20, 20).items()
    }
    plain, _ = trained(data, 3)
    clipped, _ = trained(data, 3, aggregation="clipped_mean")
    trimmed, _ = trained(data, 3, aggregation="trimmed_mean", trim_fraction=0.25)
    start = model_of_start()
    assert difference(clipped, start) < difference(plain, start)
    assert difference(trimmed, start) < difference(plain, start)


@scenario(long=True)
def quantized_updates_are_smaller_and_near(strategy, folder):
    def wide():
        return model_fn(None, layers.Dense(200, "tanh"))

    whole, expected = trained(unequal(20, 20), 2, wide)
    eight, history = trained(unequal(20, 20), 2, wide, quantize_bits=8)
    assert difference(whole, eight) < 0.02
    assert difference(whole, eight) > 0
    sent, before = history.history["bytes_up"][0], expected.history["bytes_up"][0]
    assert before == 2 * whole.count_params() * 4
    assert before / 4 < sent < 0.4 * before
    assert history.history["bytes_down"] == expected.history["bytes_down"]


@scenario(long=True)
def the_secure_sum_is_the_sum(strategy, folder):
    whole, _ = trained(unequal(20, 30), 2)
    secure, _ = trained(unequal(20, 30), 2, secure_aggregation=True)
    assert difference(whole, secure) < 1e-3


# Groups of clients ------------------------------------------------------------------------------


@contextlib.contextmanager
def each_one_of_tffs(cause="a test"):
    """Has each client be one of TFF's, as aggregations that see each do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Options, "sees_each_client", property(lambda self: cause))
        yield


def assert_same(found, expected):
    (model, ours), (other, theirs) = found, expected
    assert difference(model, other) <= 1e-6
    for name in set(ours.history) - {"round_seconds"}:
        given = theirs.history[name][-len(ours.history[name]) :]
        np.testing.assert_allclose(ours.history[name], given, atol=1e-6, err_msg=name)


@scenario
def groups_train_as_clients_apart_and_resume_what_these_began(strategy, folder):
    options = {"algorithm": "fedadam", "local_epochs": 2, "local_batch_size": 8}
    options |= {"straggler_rate": 0.4, "sampling_seed": 1}
    data = {
        client: (x, y, np.full(len(y), 3e38 if client == "client-1" else 1, np.float32))
        for client, (x, y) in unequal(30, 7, 19, 12, 25).items()
    }
    whole = trained(data, 3, **options)
    assert {client for record in whole[1].rounds for client in record.slow}
    assert whole[1].history["clients_failed"] == [1, 1, 1]
    printed = io.StringIO()
    with each_one_of_tffs(), contextlib.redirect_stdout(printed):
        keep = tfdist.Checkpoints(folder / "kept")
        trained(data, 2, fit={"callbacks": [keep]}, **options)
    assert printed.getvalue().count("tfdist: a test must see the update of each client") == 1
    go_on = tfdist.Checkpoints(folder / "kept", resume=True)
    assert_same(trained(data, 3, fit={"callbacks": [go_on]}, **options), whole)


@scenario(long=True)
def groups_train_as_clients_apart_under_every_rule(strategy, folder):
    data = unequal(30, 7, 19, 12, 25)
    for options in (
        {"algorithm": "fedsgd", "dropout_rate": 0.3},
        {"algorithm": "fedprox", "proximal_strength": 1.0},
        {"batch_norm": "average"},
        # Of a norm that half of the updates are longer than.
        {"dp_noise_multiplier": 0.0, "dp_clip_norm": 0.3, "clients_per_round": 3},
    ):
        make = with_batch_norm if "batch_norm" in options else model_fn
        options = {"local_batch_size": 8, **options}
        packed = trained(data, 3, make, **options)
        with each_one_of_tffs():
            assert_same(trained(data, 3, make, **options), packed)


# Privacy ----------------------------------------------------------------------------------------


@scenario
def privacy_adds_the_noise_it_says(strategy, folder):
    def wide():
        return model_fn(None, layers.Dense(400, "tanh"))

    keras.utils.set_random_seed(3)
    start = wide()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        model, history = trained(
            unequal(6, 6, 6, 6),
            2,
            wide,
            client_learning_rate=1e-9,
            dp_noise_multiplier=2.0,
            dp_clip_norm=1.0,
        )
    moved = model.get_weights()[2] - start.get_weights()[2]
    # Two rounds of noise of standard deviation 2.0 * 1.0 over four clients.
    assert np.std(moved) == pytest.approx(0.5 * np.sqrt(2), rel=0.08)
    first, second = history.history["epsilon"]
    assert 0 < first < second
    assert f"after 2 rounds epsilon is {second:.2f} for delta" in printed.getvalue()


@scenario(long=True)
def privacy_clips_a_clients_update(strategy, folder):
    start = model_of_start()
    model, history = trained(unequal(30), dp_noise_multiplier=0.0, dp_clip_norm=0.01)
    squares = [
        np.sum((a - b) ** 2) for a, b in zip(model.get_weights(), start.get_weights(), strict=True)
    ]
    assert np.sqrt(sum(squares)) == pytest.approx(0.01, rel=1e-3)
    assert history.history["epsilon"] == [np.inf]
    _, adaptive = trained(unequal(30, 30), 2, dp_noise_multiplier=1.0)
    assert len(adaptive.history["epsilon"]) == 2


# Clients that fail ------------------------------------------------------------------------------


@scenario(long=True)
def bad_clients_are_left_out_and_named_once(strategy, folder):
    good = {c: (x, y, np.ones(len(y), np.float32)) for c, (x, y) in unequal(12, 9, 12).items()}
    x, y = records(12, seed=8)
    ones = np.ones(12, np.float32)
    bad = {
        "nan": (np.where(np.arange(12)[:, None] == 3, np.nan, x).astype(np.float32), y, ones),
        "empty": (x[:0], y[:0], ones[:0]),
        "labels": (x, np.full(12, 7), ones),
        "huge": (x, y, ones * np.float32(3e38)),
    }
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        model, history = trained({**good, **bad}, 2, local_batch_size=12)
    expected, _ = trained(good, 2, local_batch_size=12)
    assert difference(model, expected) <= 1e-6
    for record in history.rounds:
        assert record.clients == tuple(good)
        assert set(record.failed) == set(bad)
        assert 0 < record.reading_seconds < record.seconds
    assert history.history["clients_failed"] == [4, 4]
    named = Counter(
        name for line in printed.getvalue().splitlines() for name in bad if f"'{name}'" in line
    )
    assert named == dict.fromkeys(bad, 1), printed.getvalue()
    assert "label 7" in history.rounds[1].failed["labels"]
    assert "not finite" in history.rounds[0].failed["huge"]


@scenario
def what_all_clients_have_in_their_records_is_told(strategy, folder):
    x, _ = records(8)
    data = {client: (x, np.full(8, 7)) for client in "ab"}
    with federated(max_attempts=1) as none_left:
        model = built(none_left)
        with pytest.raises(DataError, match=r"at least 1 clients.*label 7"):
            model.fit(none_left.dataset(data), verbose=0)


@scenario
def a_weight_for_each_label_goes_with_weights_of_classes(strategy, folder):
    x, y = records(12)
    weights = np.linspace(0.5, 2, 12, dtype=np.float32)
    fit = {"class_weight": {0: 1.0, 1: 3.0, 2: 0.5}}
    options = {"fit": fit, "local_batch_size": 12}
    model, _ = trained({"a": (x, y[:, None], weights[:, None])}, **options)
    expected, _ = trained({"a": (x, y, weights)}, **options)
    assert difference(model, expected) <= 1e-6


@scenario
def a_later_fit_asks_others_and_those_whose_records_were_mended(strategy, folder):
    x, y = records(6)
    data = {f"c{i}": (x, y) for i in range(6)}
    with federated(local_batch_size=6, clients_per_round=2, sampling_seed=1) as few:
        once, again = few.build(model_fn), few.build(model_fn)
        asked = [round_.clients for round_ in once.fit(few.dataset(data), epochs=4).rounds]
        apart = [again.fit(few.dataset(data), verbose=0).rounds[0] for _ in range(4)]
        assert [round_.clients for round_ in apart] == asked
        assert [round_.number for round_ in apart] == [1, 2, 3, 4]
        assert len(set(asked)) > 1
    with federated(local_batch_size=6) as every:
        model = every.build(model_fn)
        for labels in (np.full(6, 7), y):
            history = model.fit(every.dataset({"a": (x, y), "b": (x, labels)}), verbose=0)
        assert history.rounds[0].clients == ("a", "b")


@scenario
def what_one_device_leaves_out_clients_that_send_gradients_do_too(strategy, folder):
    def heads():
        inputs = keras.Input((4,))
        outputs = [layers.Dense(3, "softmax", name=name)(inputs) for name in ("told", "untold")]
        model = keras.Model(inputs, outputs)
        decaying = keras.optimizers.AdamW(0.1, weight_decay=0.5, epsilon=1e-3)
        model.compile(decaying, {"told": "sparse_categorical_crossentropy"})
        return model

    def summed():
        model = model_fn()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
        model.compile("sgd", loss)
        return model

    x, y = records(6)
    data = {"a": (x, {"told": y}), "b": (x, {"told": y})}
    with federated(algorithm="fedsgd") as one_step:
        model = built(one_step, heads)
        before = model.get_layer("untold").get_weights()
        model.fit(one_step.dataset(data), verbose=0)
        np.testing.assert_array_equal(model.get_layer("untold").get_weights()[0], before[0])
        with pytest.raises(ModelError, match="a mean over rows"):
            one_step.build(summed)


@scenario(long=True)
def a_client_that_is_said_to_be_left_out_is_not_averaged(strategy, folder):
    def odd(y, y_pred):
        return tf.where(tf.reduce_max(y) > 1, np.inf, 0.0)

    x, y = records(10)
    data = {"even": (x, y % 2), "odd": (x, np.full(10, 2))}

    def make():
        return model_fn(metrics=[odd])

    model, history = trained(data, 2, make, local_batch_size=10)
    assert [record.clients for record in history.rounds] == [("even",)] * 2
    expected, _ = trained({"even": data["even"]}, 2, make, local_batch_size=10)
    assert difference(model, expected) <= 1e-6


@scenario
def a_round_with_too_few_clients_is_an_error(strategy, folder):
    x, y = records(6)
    data = {"good": (x, y), "bad": (x * np.nan, y)}
    with federated(min_clients=2) as few:
        model = built(few)
        before = model.get_weights()
        with pytest.raises(DataError, match=r"at least 2 clients.*'bad'.*min_clients"):
            model.fit(few.dataset(data), epochs=1, verbose=0)
        for a, b in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)
    with federated() as none_left:
        model = built(none_left)
        with pytest.raises(DataError, match="round 1 must have at least 1 clients"):
            model.fit(none_left.dataset({"bad": data["bad"]}), epochs=1, verbose=0)


@scenario(long=True)
def drop_outs_and_stragglers_are_survived(strategy, folder):
    _, history = trained(
        unequal(*[10] * 8),
        6,
        clients_per_round=5,
        min_clients=3,
        max_attempts=20,
        dropout_rate=0.4,
        straggler_rate=0.3,
        local_batch_size=2,
    )
    for record in history.rounds:
        assert len(record.clients) >= 3
        assert len(record.clients) + len(record.dropped) == 5
        assert not set(record.clients) & set(record.dropped)
        assert set(record.slow) <= set(record.clients)
        assert record.bytes_down >= 5 * (record.bytes_up // len(record.clients))
    assert any(record.attempts > 1 for record in history.rounds)
    assert any(record.slow for record in history.rounds)
    assert len({record.clients for record in history.rounds}) > 1


@scenario
def a_killed_worker_is_started_anew(strategy, folder):
    class Kill(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                os.kill(self.engine._process.pid, signal.SIGKILL)

    data = unequal(10, 10)
    with federated() as survivor:
        model = built(survivor)
        kill = Kill()
        kill.engine = survivor._engine
        model.fit(survivor.dataset(data), epochs=3, callbacks=[kill], verbose=0)
    expected, _ = trained(data, 3)
    assert difference(model, expected) <= 1e-6


# Layers -----------------------------------------------------------------------------------------


def with_batch_norm():
    return model_fn(None, layers.BatchNormalization(momentum=0.5, name="norm"))


@scenario("federated", "keras_3", long=True)
def batch_normalization_is_refused_averaged_or_replaced(strategy, folder):
    with federated() as refuses, pytest.raises(ModelError, match=r"layer 'norm'.*group_norm"):
        built(refuses, with_batch_norm)
    data = unequal(8, 24)
    model, history = trained(data, 1, with_batch_norm, batch_norm="average", local_batch_size=24)
    alone = [
        trained({c: data[c]}, 1, with_batch_norm, batch_norm="average", local_batch_size=24)[0]
        for c in data
    ]
    for name in ("moving_mean", "moving_variance"):
        small, large = (getattr(m.get_layer("norm"), name).numpy() for m in alone)
        found = getattr(model.get_layer("norm"), name).numpy()
        np.testing.assert_allclose(found, (8 * small + 24 * large) / 32, atol=1e-6)
        assert np.abs(small - large).max() > 1e-3
    model, history = trained(data, 3, with_batch_norm, batch_norm="group_norm")
    replaced = model.get_layer("norm")
    assert isinstance(replaced, layers.GroupNormalization)

    def with_group_norm():
        return model_fn(None, layers.GroupNormalization.from_config(replaced.get_config()))

    other, expected = trained(data, 3, with_group_norm)
    assert difference(model, other) <= 1e-6
    np.testing.assert_allclose(history.history["loss"], expected.history["loss"], atol=1e-6)


@scenario
def what_clients_cannot_train_is_one_line(strategy, folder):
    words = np.array(["a b", "c", "a c d", "b"] * 6)[:, None]
    labels = np.arange(24) % 3

    def reader(learned, of):
        learned.adapt(of)
        inputs = keras.Input((1,), dtype="string" if of is words else "float32")
        model = keras.Model(inputs, layers.Dense(3)(tf.cast(learned(inputs), tf.float32)))
        model.compile("sgd", "mse")
        return model

    def text():
        return reader(layers.TextVectorization(output_mode="tf_idf"), words)

    def bins():
        return reader(layers.Discretization(num_bins=4), numbers)

    def stateful():
        inputs = keras.Input((4, 3), batch_size=8)
        model = keras.Model(inputs, layers.LSTM(3, stateful=True)(inputs))
        model.compile("sgd", "mse")
        return model

    numbers = np.arange(24.0)[:, None]
    with federated(clients_per_round=2) as fed:
        for make, x, message in (
            (text, words, "lookup table"),
            (bins, numbers, "known shapes"),
        ):
            with pytest.raises(ModelError, match=message):
                fed.build(make).fit(fed.dataset((x, labels), global_batch_size=8), verbose=0)
        with pytest.raises(ModelError, match="stateful recurrent layer"):
            fed.build(stateful)
        with pytest.raises(ModelError, match=r"in rounds, by clients.* train_on_batch"):
            fed.build(model_fn).train_on_batch(numbers, labels)


@scenario(long=True)
def dropout_is_active_on_clients_only(strategy, folder):
    def dropping():
        return model_fn(None, layers.Dropout(0.5))

    model, _ = trained(unequal(20, 20), 2, dropping)
    x, _ = records(5)
    np.testing.assert_array_equal(model.predict(x, verbose=0), model.predict(x, verbose=0))
    same, _ = trained(unequal(20, 20), 2)
    assert difference(model, same) > 1e-4


# Callbacks, files, checkpoints ------------------------------------------------------------------


@scenario(long=True)
def callbacks_of_keras_work(strategy, folder):
    with federated(local_batch_size=8) as own:
        model = built(own)
        rates = [0.2, 0.2, 1e-12, 1e-12, 0.2, 0.2]
        seen = []
        callbacks = [
            keras.callbacks.CSVLogger(folder / "log.csv"),
            keras.callbacks.TensorBoard(folder / "board"),
            keras.callbacks.ModelCheckpoint(str(folder / "last.keras")),
            keras.callbacks.LearningRateScheduler(lambda epoch: rates[epoch]),
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: seen.append(model.get_weights())
            ),
            keras.callbacks.EarlyStopping(patience=0, min_delta=1e-6),
        ]
        held_out = own.dataset(records(30, seed=9), global_batch_size=16, training=False)
        history = model.fit(
            own.dataset(unequal(16, 20)),
            epochs=6,
            validation_data=held_out,
            callbacks=callbacks,
            verbose=0,
        )
        found = model.evaluate(held_out, verbose=0, return_dict=True)
        own.save(model, folder / "model.keras")
    assert history.epoch == [0, 1, 2]  # A rate of almost nothing improves nothing.
    for a, b in zip(seen[1], seen[2], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert history.history["val_loss"][-1] == pytest.approx(found["loss"], abs=1e-6)
    rows = list(csv.DictReader((folder / "log.csv").open()))
    assert [float(row["bytes_up"]) for row in rows] == history.history["bytes_up"]
    assert list((folder / "board").rglob("*tfevents*"))
    loaded = keras.models.load_model(folder / "model.keras")
    assert type(loaded) is keras.Sequential
    assert difference(loaded, model) == 0
    assert keras.models.load_model(folder / "last.keras").count_params() == model.count_params()


@scenario("federated", "keras_3", long=True)
def a_broken_fit_is_resumed_exactly(strategy, folder):
    options = {
        "algorithm": "fedadam",
        "clients_per_round": 3,
        "dropout_rate": 0.3,
        "aggregation": "clipped_mean",
        "local_batch_size": 4,
    }
    data = unequal(10, 12, 14, 9, 11)

    class Break(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.epoch == 2:
                raise KeyboardInterrupt

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

    unbroken, expected = trained(data, 5, **options)
    keep = tfdist.Checkpoints(folder / "kept")
    with pytest.raises(KeyboardInterrupt):
        trained(data, 5, fit={"callbacks": [keep, Break()]}, **options)
    go_on = tfdist.Checkpoints(folder / "kept", resume=True)
    resumed, found = trained(data, 5, fit={"callbacks": [go_on]}, **options)
    assert found.epoch == [2, 3, 4]
    assert difference(resumed, unbroken) <= 1e-7
    np.testing.assert_allclose(found.history["loss"], expected.history["loss"][2:], atol=1e-7)
    assert [r.clients for r in found.rounds] == [r.clients for r in expected.rounds[2:]]


@scenario(long=True)
def epsilon_goes_on_after_a_resume(strategy, folder):
    options = {"dp_noise_multiplier": 1.0, "dp_clip_norm": 1.0}
    _, whole = trained(unequal(9, 9, 9), 3, **options)
    keep = tfdist.Checkpoints(folder / "kept")
    trained(unequal(9, 9, 9), 2, fit={"callbacks": [keep]}, **options)
    go_on = tfdist.Checkpoints(folder / "kept", resume=True)
    _, rest = trained(unequal(9, 9, 9), 3, fit={"callbacks": [go_on]}, **options)
    assert rest.history["epsilon"] == whole.history["epsilon"][2:]
    # Its epsilon is of all rounds: other terms are refused, and nothing is taken for damaged.
    for others, fit, told in (
        ({}, {"clients_per_round": 2}, "2 clients a round.*3 clients a round"),
        ({"dp_noise_multiplier": 2.0, "dp_clip_norm": 0.5}, {}, "2 noise, 0.5 clipping norm"),
    ):
        anew = tfdist.Checkpoints(folder / "kept", resume=True)
        with pytest.raises(OptionError, match=f"a private training must go on.*{told}"):
            trained(unequal(9, 9, 9), 4, fit={"callbacks": [anew]}, **options | others | fit)
    keep = tfdist.Checkpoints(folder / "few")
    few = options | {"clients_per_round": 2}
    trained(unequal(9, 9, 9), 1, fit={"callbacks": [keep]}, **few)
    anew = tfdist.Checkpoints(folder / "few", resume=True)
    with pytest.raises(OptionError, match=r"6 clients and .*3 clients"):
        trained(unequal(*[9] * 6), 2, fit={"callbacks": [anew]}, **few)


@scenario
def a_resumed_server_has_the_rate_that_it_is_given(strategy, folder):
    data, options = unequal(10), {"local_batch_size": 10}
    keep = tfdist.Checkpoints(folder / "kept")
    begun, _ = trained(data, 1, fit={"callbacks": [keep]}, **options)
    anew = tfdist.Checkpoints(folder / "kept", resume=True)
    still, _ = trained(data, 2, fit={"callbacks": [anew]}, server_learning_rate=1e-9, **options)
    assert difference(begun, still) <= 1e-6


@scenario
def a_metric_may_have_a_result_for_each_class(strategy, folder):
    x, y = records(12)
    y = np.eye(3, dtype=np.float32)[y]
    model = built(strategy)
    model.compile("sgd", "mse", metrics=[keras.metrics.F1Score()])
    expected = model.evaluate(strategy.dataset((x, y), training=False), verbose=0)[1]
    table = keras.callbacks.CSVLogger(folder / "rounds.csv")
    clients = strategy.dataset({"all": (x, y)}, global_batch_size=12)
    found = model.fit(clients, callbacks=[table], verbose=0).history["f1_score"]
    np.testing.assert_allclose(found, [expected], atol=1e-6)
    with open(folder / "rounds.csv") as file:
        (row,) = csv.DictReader(file)
    assert row["f1_score"].count(",") == 2


# Compiled anew ----------------------------------------------------------------------------------


@scenario
def a_model_compiled_anew_trains_as_it_is_compiled(strategy, folder):
    def fit(model, epoch, **options):
        feed = strategy.dataset(unequal(12, 12), global_batch_size=8)
        return model.fit(feed, initial_epoch=epoch, epochs=epoch + 1, verbose=0, **options)

    model, other = built(strategy), built(strategy)
    loss = model.loss
    fit(model, 0)
    begun = model.get_weights()
    model.compile(keras.optimizers.RMSprop(0.1), loss)
    with pytest.raises(ModelError, match=r"RMSprop.*fedsgd"):
        fit(model, 1)
    for each in (model, other):
        each.compile(keras.optimizers.Adam(0.05), "mae", metrics=["mse"])
    other.set_weights(begun)
    expected = fit(other, 1)
    assert "mse" in expected.history
    assert_same((model, fit(model, 1)), (other, expected))
    frozen = model.layers[0]
    frozen.trainable = False
    before = frozen.get_weights()
    fit(model, 2)  # Keras goes on with what was trainable when it was compiled.
    assert np.abs(frozen.get_weights()[0] - before[0]).max() > 0
    model.compile(keras.optimizers.SGD(0.1), loss)
    before = model.get_weights()
    keep = tfdist.Checkpoints(folder / "kept")
    assert fit(model, 3, callbacks=[keep]).history["bytes_up"] == [2 * 4 * (6 * 3 + 3)]
    pairs = zip(before, model.get_weights(), strict=True)
    kernel, bias, *others = [np.abs(a - b).max() for a, b in pairs]
    assert kernel == bias == 0 < min(others)
    go_on = tfdist.Checkpoints(folder / "kept", resume=True)
    assert fit(model, 4, callbacks=[go_on]).epoch == [4]


@scenario
def a_server_goes_on_when_the_model_is_compiled_anew(strategy, folder):
    def in_two_fits(make=model_fn, freezes=False, **options):
        with federated(local_batch_size=8, **options) as ours:
            model = built(ours, make)
            feed = ours.dataset(unequal(12, 12))
            model.fit(feed, verbose=0)
            begun = model.get_weights()
            model.layers[0].trainable = not freezes
            model.compile(model.optimizer, model.loss, metrics=["accuracy"])
            history = model.fit(feed, initial_epoch=1, epochs=2, verbose=0)
            return model, history, begun

    model, history, _ = in_two_fits(algorithm="fedadam")  # Its moments are of both rounds.
    whole = trained(unequal(12, 12), 2, algorithm="fedadam", local_batch_size=8)
    assert_same((model, history), whole)
    model, _, begun = in_two_fits(with_batch_norm, freezes=True, batch_norm="average")
    pairs = zip(begun, model.get_weights(), strict=True)
    kernel, bias, *others = [np.abs(a - b).max() for a, b in pairs]
    assert kernel == bias == 0 < min(others)
    private = {"dp_noise_multiplier": 1.0, "dp_clip_norm": 1.0}
    epsilon = in_two_fits(freezes=True, **private)[1].history["epsilon"]
    _, whole = trained(unequal(12, 12), 2, local_batch_size=8, **private)
    assert epsilon == whole.history["epsilon"][1:]


# Keras 3 ----------------------------------------------------------------------------------------


@scenario("keras_3")
def clients_of_keras_3_are_averaged_as_plain_ones(strategy, folder):
    """Each draws random numbers of its own, other ones in each round; and statistics move."""

    def with_table():
        parts = [
            layers.Embedding(5, 4, name="table"),
            layers.Flatten(name="flat"),
            layers.BatchNormalization(name="norm"),
            layers.Dropout(0.5, seed=7, name="drop"),
            layers.Dense(3, name="last"),
        ]
        model = keras.Sequential([keras.Input((2,), dtype="int32"), *parts])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.2, momentum=0.5), loss, metrics=["accuracy"])
        return model

    data = {f"client-{n}": (RNG.integers(0, 5, (n, 2)), RNG.integers(0, 3, n)) for n in (9, 14)}
    rounds = 2
    with federated(batch_norm="average", local_batch_size=4) as average:
        model = built(average, with_table)
        before = model.get_weights()
        feed = average.dataset(data)
        model.fit(feed, epochs=rounds, verbose=0)
        found = model.get_weights()
        personal = average.personalize(model, feed, epochs=2, batch_size=4)
        assert set(personal.before) == {"loss", "accuracy"}
        assert personal.means("loss")[0] != personal.means("loss")[1]
        np.testing.assert_array_equal(model.get_weights()[0], found[0])
    weights = before
    for number in range(rounds):
        sums, total = [np.zeros_like(weight) for weight in weights], 0
        for slot, client in enumerate(feed.clients.ids):
            arrays = feed.load(client, number)
            plain = with_table()
            plain.set_weights(weights)
            plain.get_layer("drop").seed_generator.state.assign([7 + slot, number << 32])
            order = feed.order(len(arrays["y"]), slot, number)
            for rows in order:
                plain.train_on_batch(arrays["x"][rows[rows >= 0]], arrays["y"][rows[rows >= 0]])
            total += len(arrays["y"])
            pairs = zip(sums, plain.get_weights(), strict=True)
            sums = [kept + len(arrays["y"]) * weight for kept, weight in pairs]
        weights = [each / total for each in sums]
    for ours, plain, start in zip(found, weights, before, strict=True):
        np.testing.assert_allclose(ours, plain, atol=1e-5)
        assert np.abs(ours - start).max() > 1e-3


@scenario("federated", "keras_3")
def a_model_that_was_trained_before_is_trained_by_clients(strategy, folder):
    x, y = RNG.normal(size=(12, 4)).astype(np.float32), RNG.integers(0, 3, 12)

    def trained():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="last")])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.2), loss)
        model.fit(x, y, verbose=0)
        return model

    with federated(local_batch_size=4) as average:
        model = built(average, trained)
        before = model.get_weights()[0]
        history = model.fit(average.dataset({"one": (x, y), "other": (x, y)}), verbose=0).history
        assert len(history["loss"]) == 1
        assert np.abs(model.get_weights()[0] - before).max() > 1e-3


@scenario("keras_3")
def what_keras_3_alone_has_is_refused(strategy, folder):
    optimizers = keras.optimizers

    def in_float8():
        model = model_fn()
        model.layers[0].quantize("float8")
        model.compile("sgd", "mse")
        return model

    for make, words in (
        (lambda: model_fn(optimizers.SGD(0.1, gradient_accumulation_steps=2)), "accumulation"),
        (lambda: model_fn(optimizers.SGD(0.1, loss_scale_factor=8.0)), "no scale"),
        (lambda: model_fn(optimizers.LossScaleOptimizer(optimizers.SGD())), "no scale"),
        (lambda: model_fn(optimizers.SGD(lambda: 0.1)), "LearningRateScheduler"),
        (in_float8, "float8"),
    ):
        with pytest.raises(ModelError, match=words):
            strategy.build(make)

    def with_table():
        table = layers.Embedding(4, 2, name="table")
        model = keras.Sequential([keras.Input((3,)), table, layers.Flatten(), layers.Dense(1)])
        model.compile(optimizers.Adam(0.1), "mse")
        return model

    data = {"a": (np.ones((4, 3), np.float32), np.ones(4))}
    for algorithm in ("fedavg", "fedsgd"):
        with (
            federated(algorithm=algorithm) as fed,
            pytest.raises(ModelError, match=r"adds up .* equal look-ups.*table.*Adam"),
        ):
            fed.build(with_table).fit(fed.dataset(data), verbose=0)


# Refusals ---------------------------------------------------------------------------------------


@scenario
def what_cannot_be_honoured_is_refused(strategy, folder):
    optimizers = keras.optimizers
    decay = optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)

    class OwnStep(keras.Model):
        def train_step(self, data):
            return {}

    class Adam(optimizers.Adam):
        pass

    def own_step():
        inputs = keras.Input((4,))
        model = OwnStep(inputs, layers.Dense(3)(inputs))
        model.compile("sgd", "mse")
        return model

    def eagerly():
        model = model_fn()
        model.compile("sgd", "mse", run_eagerly=True)
        return model

    for make, words in (
        (lambda: model_fn(optimizers.RMSprop()), "RMSprop.*fedsgd"),
        (lambda: model_fn(optimizers.SGD(0.1, momentum=0.9, nesterov=True)), "nesterov"),
        (lambda: model_fn(optimizers.SGD(0.1, clipnorm=1.0)), "clipnorm"),
        (lambda: model_fn(optimizers.Adam(0.1, amsgrad=True)), "amsgrad"),
        (lambda: model_fn(optimizers.SGD(0.1, weight_decay=0.1)), "weight_decay.*AdamW"),
        (lambda: model_fn(optimizers.SGD(decay)), "LearningRateScheduler"),
        (lambda: model_fn(optimizers.legacy.SGD(0.1, decay=0.1)), "without decay"),
        (lambda: model_fn(optimizers.legacy.Adagrad(0.1)), "legacy.Adagrad"),
        (lambda: model_fn(Adam(0.1)), r"federated_scenarios\.Adam|__main__\.Adam|Adam"),
        (
            lambda: model_fn(None, layers.Dense(3, kernel_constraint="non_neg", name="bound")),
            "constraint of bound/kernel",
        ),
        (own_step, "train_step"),
        (eagerly, "run_eagerly"),
    ):
        with pytest.raises(ModelError, match=f"(?s){words}"):
            strategy.build(make)

    def with_table():
        table = layers.Embedding(4, 2, name="table")
        model = keras.Sequential([keras.Input((3,)), table, layers.Flatten(), layers.Dense(1)])
        model.compile(optimizers.SGD(1.0, clipnorm=0.05), "mse")
        return model

    with federated(algorithm="fedsgd") as one_step:
        model = one_step.build(with_table)
        with pytest.raises(ModelError, match=r"each row that was looked up.*SGD.*table"):
            model.fit(one_step.dataset({"a": (np.ones((4, 3), np.float32), np.ones(4))}))
    model = strategy.build(model_fn)
    with pytest.raises(OptionError, match="validation_split"):
        model.fit(strategy.dataset(unequal(5)), validation_split=0.1)
    with pytest.raises(DataError, match="must train on clients"):
        model.fit(strategy.dataset(records(5), training=False))
    clients = strategy.dataset(unequal(5))
    with pytest.raises(DataError, match="one set of records for all"):
        model.fit(clients, validation_data=clients)
    with pytest.raises(OptionError, match="number of clients"):
        strategy.dataset(records(5))
    for clients in (2.5, "10", 0):
        with pytest.raises(OptionError, match="whole number of at least 1, but found"):
            strategy.dataset(records(5), clients=clients)
    with pytest.raises(OptionError, match="global_batch_size"):
        strategy.dataset(unequal(5), global_batch_size=0)
    with pytest.raises(DataError, match="shape"):
        model.fit(strategy.dataset({"a": (np.zeros((5, 3), np.float32), np.zeros(5, int))}))
    with (
        federated(batch_norm="average", dp_noise_multiplier=1.0) as private,
        pytest.raises(ModelError, match="moving statistics"),
    ):
        built(private, with_batch_norm)

    def spares_biases():
        model = with_batch_norm()
        model.compile(optimizers.AdamW(0.1), model.loss)
        model.optimizer.exclude_from_weight_decay(var_names=["bias"])
        return model

    with (
        federated(batch_norm="group_norm") as replaces,
        pytest.raises(ModelError, match="AdamW of the clients must decay all weights"),
    ):
        replaces.build(spares_biases)
