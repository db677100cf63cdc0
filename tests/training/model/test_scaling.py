"""The learning rate of a larger global batch."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import numpy as np
import pytest

from tfdist.errors import OptionError

tf = pytest.importorskip("tensorflow")
keras = tf.keras

from tfdist.keras.rates import given_learning_rate  # noqa: E402
from tfdist.strategies import strategy  # noqa: E402
from tfdist.training.model.scaling import ScaleLearningRate, Scaling  # noqa: E402

X, Y = np.ones((8, 2), np.float32), np.ones((8, 1), np.float32)


def model_with(optimizer, **options):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", **options)
    return model


def rates(model, scaling, steps_per_epoch=4, epochs=3):
    """Returns the rate of every step."""
    seen = []
    scale = ScaleLearningRate(scaling, model.optimizer)
    scale.prepare(model.optimizer, steps_per_epoch)
    note = keras.callbacks.LambdaCallback(
        on_batch_end=lambda batch, logs: seen.append(float(model.optimizer.learning_rate.numpy()))
    )
    model.fit(X, Y, 8 // steps_per_epoch, epochs, verbose=0, callbacks=[scale, note])
    return seen


def test_rules():
    assert Scaling("linear", 0, 4).factor == 4
    assert Scaling("sqrt", 0, 4).factor == 2
    assert Scaling(None, 0, 4).factor == 1
    assert Scaling(None, 0, 4).is_off
    assert not Scaling(None, 1, 4).is_off
    with pytest.raises(OptionError, match="Choose one of linear, sqrt"):
        Scaling("cubic", 0, 4)
    for epochs in (-1, float("inf"), float("nan")):
        with pytest.raises(OptionError, match=f"0 or more, and finite, but found {epochs}"):
            Scaling("linear", epochs, 4)


def test_warm_up_climbs_to_the_scaled_rate_and_stays():
    seen = rates(model_with(keras.optimizers.SGD(0.1)), Scaling("linear", 2, 4))
    np.testing.assert_allclose(seen, [*np.linspace(0.1, 0.4, 9), 0.4, 0.4, 0.4], rtol=1e-6)
    seen = rates(model_with(keras.optimizers.SGD(0.1)), Scaling(None, 1, 4))
    np.testing.assert_allclose(seen, [0.025, 0.04375, 0.0625, 0.08125, *[0.1] * 8], rtol=1e-6)
    seen = rates(model_with(keras.optimizers.SGD(0.1)), Scaling("linear", 0.625, 4))
    np.testing.assert_allclose(seen, [0.1, 0.22, 0.34, *[0.4] * 9], rtol=1e-6)  # 2.5 steps


def test_a_schedule_is_multiplied_not_replaced():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    seen = rates(model_with(keras.optimizers.SGD(schedule)), Scaling("sqrt", 1, 4), epochs=2)
    multiplier = np.array([1, 1.25, 1.5, 1.75, 2, 2, 2, 2])
    np.testing.assert_allclose(seen, 0.1 * 0.5 ** np.arange(8) * multiplier, rtol=1e-5)


def test_callbacks_that_set_the_rate_still_work_after_the_warm_up():
    alone = strategy("single", warmup_epochs=1)
    model = alone.build(lambda: model_with(keras.optimizers.SGD(0.1)))
    feed = alone.dataset((X, Y), global_batch_size=2)
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.1, patience=1, min_delta=10.0)
    history = model.fit(feed, epochs=4, callbacks=[plateau], verbose=0).history
    np.testing.assert_allclose(history["learning_rate"], [0.1, 0.1, 0.01, 0.001], rtol=1e-5)


def test_a_rate_that_is_set_within_the_warm_up_is_told_to_have_no_effect(capsys):
    alone = strategy("single", warmup_epochs=3)
    feed = alone.dataset((X, Y), global_batch_size=2)
    falling = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 * 0.5**epoch)
    for callbacks, told in (([falling], 1), ([], 0)):
        model = alone.build(lambda: model_with(keras.optimizers.SGD(0.1)))
        model.fit(feed, epochs=2, callbacks=callbacks, verbose=0)
        assert capsys.readouterr().out.count("the learning rate was set to 0.05 within") == told


def test_a_rate_that_is_set_between_fits_within_the_warm_up_is_told_too(capsys):
    alone = strategy("single", warmup_epochs=2)
    feed = alone.dataset((X, Y), global_batch_size=2)
    model = alone.build(lambda: model_with(keras.optimizers.SGD(0.1)))
    for rate, told in ((None, 0), (0.05, 1), (0.04, 0)):  # After it the third one holds.
        if rate is not None:
            model.optimizer.learning_rate = rate
        model.fit(feed, epochs=2 if told else 1, verbose=0)
        line = "the learning rate was set to"
        assert capsys.readouterr().out.count(line) == told
    np.testing.assert_allclose(model.optimizer.learning_rate.numpy(), 0.04, rtol=1e-5)


def test_a_fixed_rate_cannot_climb_within_an_execution():
    falling = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    for rate, replicas, step, is_refused in (
        (0.1, 2, 0, True),
        (0.1, 2, 7, True),
        (0.1, 2, 8, False),  # The whole rate, from here on.
        (falling, 2, 0, False),
        (0.1, 1, 0, False),
    ):
        model = model_with(keras.optimizers.SGD(rate), steps_per_execution=2)
        model.optimizer.iterations.assign(step)
        scaling = Scaling("linear", 2, replicas)
        scale = ScaleLearningRate(scaling, model.optimizer)
        scale.prepare(model.optimizer, 4)
        found = contextlib.nullcontext()
        if is_refused:
            found = pytest.raises(OptionError, match="warmup_epochs=2 and steps_per_execution=2")
        with found:
            scaling.check_executions(model) if scale.go_on(model.optimizer) else None


def test_a_rate_that_is_set_before_the_first_step_is_scaled_and_a_scheduler_is_not():
    def fit(model, *callbacks):
        scale = ScaleLearningRate(Scaling("linear", 0, 4), model.optimizer)
        model.optimizer.learning_rate = 0.02
        for _ in range(2):
            scale.meet(model.optimizer)
            scale.prepare(model.optimizer, 4)
            model.fit(X, Y, 2, verbose=0, callbacks=[*callbacks, scale])
        return float(model.optimizer.learning_rate.numpy())

    always = keras.callbacks.LearningRateScheduler(lambda epoch: 0.01)
    assert fit(model_with(keras.optimizers.SGD(0.1))) == pytest.approx(0.08)
    assert fit(model_with(keras.optimizers.SGD(0.1)), always) == pytest.approx(0.01)


def test_a_loaded_model_keeps_its_rate_and_says_so(capsys):
    model = model_with(keras.optimizers.SGD(0.4))
    model.fit(X, Y, 2, verbose=0)
    scale = ScaleLearningRate(Scaling("linear", 0, 4), model.optimizer)
    for told in (1, 0):
        scale.meet(model.optimizer)
        scale.prepare(model.optimizer, 4, tells=True)
        assert capsys.readouterr().out.count("stays 0.4") == told
        assert float(model.optimizer.learning_rate.numpy()) == pytest.approx(0.4)


def test_a_rate_that_a_checkpoint_restores_within_the_warm_up_is_not_the_one_to_scale():
    scaling, model = Scaling("linear", 2, 4), model_with(keras.optimizers.SGD(0.1))
    scale = ScaleLearningRate(scaling, keras.optimizers.SGD(0.5))  # Compiled anew since the build.
    scale.set_model(model)
    scale.meet(model.optimizer)
    model.optimizer.iterations.assign(4)
    model.optimizer.learning_rate = 0.1 * float(scaling.multiplier(4, 4))
    scale.prepare(model.optimizer, 4)
    scale.on_train_batch_begin(0)
    np.testing.assert_allclose(model.optimizer.learning_rate.numpy(), 0.25, rtol=1e-6)


def test_a_new_compile_brings_its_own_rate():
    alone = strategy("single", warmup_epochs=1)
    model = alone.build(lambda: model_with(keras.optimizers.SGD(0.1)))
    feed = alone.dataset((X, Y), global_batch_size=2)
    model.fit(feed, epochs=2, verbose=0)
    model.compile(keras.optimizers.SGD(0.003), "mse")
    history = model.fit(feed, epochs=2, verbose=0).history
    np.testing.assert_allclose(history["learning_rate"], [0.003, 0.003], rtol=1e-5)


def test_another_schedule_is_scaled_and_one_that_comes_back_once():
    def schedule(rate):
        return keras.optimizers.schedules.ExponentialDecay(rate, 1, 1.0)

    first, second = (keras.optimizers.SGD(schedule(rate)) for rate in (0.1, 0.2))
    scale = ScaleLearningRate(Scaling("linear", 0, 4), first)
    for optimizer, expected in ((first, 0.4), (second, 0.8), (first, 0.4)):
        scale.prepare(optimizer, 4)
        np.testing.assert_allclose(given_learning_rate(optimizer)(0), expected, rtol=1e-6)
    first.learning_rate = schedule(0.5)
    scale.prepare(first, 4)
    np.testing.assert_allclose(given_learning_rate(first)(0), 2.0, rtol=1e-6)


def test_the_saved_model_has_the_users_schedule_and_needs_no_tfdist(tmp_path):
    alone = strategy("single", warmup_epochs=1)

    def model_fn():
        decay = keras.optimizers.schedules.CosineDecay(0.1, 100)
        model = keras.Sequential(
            [keras.Input((2,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.Adam(decay), "mse")
        return model

    model = alone.build(model_fn)
    model.fit(alone.dataset((X, Y), global_batch_size=2), verbose=0)
    alone.save(model, tmp_path / "model.keras")
    program = (
        "import sys; sys.modules['tfdist'] = None\n"
        "import tensorflow as tf\n"
        f"model = tf.keras.models.load_model({str(tmp_path / 'model.keras')!r})\n"
        "assert type(model) is tf.keras.Sequential, type(model)\n"
        "assert type(model.layers[0]) is tf.keras.layers.BatchNormalization\n"
        "schedule = model.optimizer.get_config()['learning_rate']\n"
        "assert schedule['class_name'] == 'CosineDecay', schedule\n"
        "assert schedule['config']['initial_learning_rate'] == 0.1\n"
        "assert int(model.optimizer.iterations) == 4\n"
        "model.fit(tf.ones((8, 2)), tf.ones((8, 1)), verbose=0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
