"""A loss that is no finite number: it is told, and takes the place of no checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist.strategies import strategy
from tfdist.training.checkpoints.checkpoint import Checkpoints
from tfdist.training.checkpoints.checkpoint_files import finished

keras = tf.keras
X = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
STEPS = 6  # of 4 rows


def fit(keep, rates, epochs=4, name="single", **options):
    """Fits with a learning rate for each epoch."""

    def model_fn():
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        bounds = [STEPS * (n + 1) - 1 for n in range(len(rates) - 1)]
        rate = keras.optimizers.schedules.PiecewiseConstantDecay(bounds, rates)
        model.compile(keras.optimizers.SGD(rate), "mse")
        return model

    with strategy(name, **options) as used:
        model = used.build(model_fn)
        feed = used.dataset((X, X[:, :1]), global_batch_size=4)
        return model, model.fit(feed, epochs=epochs, callbacks=[keep], verbose=0)


@pytest.mark.parametrize("rates", [[0.1, 1e30, 0.1, 0.1], [0.1, float("nan"), 0.1, 0.1]], ids=str)
@pytest.mark.parametrize("every_steps", [None, 2])
def test_it_is_told_in_its_first_epoch_and_no_checkpoint_has_it(
    tmp_path, capsys, rates, every_steps
):
    keep = Checkpoints(tmp_path, keep=2, every_steps=every_steps)
    _, history = fit(keep, rates)
    assert not np.isfinite(history.history["loss"][1:]).any()
    told = capsys.readouterr().out
    assert told.count("WARNING: loss is") == 1
    assert "in epoch 2." in told
    assert told.count("no checkpoint is kept") == 1
    reader = tf.train.load_checkpoint(str(keep.newest))
    names = [name for name in reader.get_variable_to_shape_map() if "kernel" in name]
    assert names
    assert all(np.isfinite(reader.get_tensor(name)).all() for name in names)
    assert finished(tmp_path)[-1] in ("ckpt-6", "ckpt-8")
    resumed, _ = fit(Checkpoints(tmp_path, resume=True), [0.1, 0.1], epochs=2)
    assert all(np.isfinite(weight).all() for weight in resumed.get_weights())


def test_what_is_infinite_by_design_is_kept(tmp_path):
    """A mask of minus infinity that nothing trains."""

    def model_fn():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.layers[0].add_weight(
            "mask", (2,), initializer=lambda *a, **k: tf.fill((2,), -np.inf), trainable=False
        )
        model.compile("sgd", "mse")
        return model

    alone = strategy("single")
    model = alone.build(model_fn)
    feed = alone.dataset((X, X[:, :1]), global_batch_size=4)
    model.fit(feed, epochs=1, callbacks=[Checkpoints(tmp_path)], verbose=0)
    assert finished(tmp_path) == ["ckpt-6"]
