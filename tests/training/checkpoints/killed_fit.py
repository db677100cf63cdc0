"""A fit that is killed within an epoch, and the fit that goes on from it.

Usage: python killed_fit.py STRATEGY OPTIONS_JSON FOLDER kill|resume
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np

import tfdist
from tfdist.compat import import_tensorflow

keras = import_tensorflow().keras
layers = keras.layers
EPOCHS = 3


def model_fn():
    model = keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            layers.Conv2D(4, 3, activation="tanh"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dense(3, "softmax"),
        ]
    )
    decay = keras.optimizers.schedules.ExponentialDecay(0.05, 5, 0.9)
    model.compile(keras.optimizers.Adam(decay), "sparse_categorical_crossentropy", ["accuracy"])
    return model


class Kill(keras.callbacks.Callback):
    """Kills the last rank after the fifth step of the second epoch."""

    def __init__(self, is_last_rank):
        super().__init__()
        self._is_last_rank = is_last_rank

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self._is_last_rank and self._epoch == 1 and batch == 4:
            os.kill(os.getpid(), signal.SIGKILL)


def main(name, options, folder, mode):
    rng = np.random.default_rng(0)
    data = rng.normal(size=(53, 6, 6, 1)).astype(np.float32), rng.integers(0, 3, 53)
    with tfdist.strategy(name, **json.loads(options)) as strategy:
        feed = strategy.dataset(data, global_batch_size=8, seed=3)
        place = strategy.topology

        def fit(callbacks):
            keras.utils.set_random_seed(11)
            model = strategy.build(model_fn)
            history = model.fit(feed, epochs=EPOCHS, callbacks=callbacks, verbose=0)
            return model, history

        keep = tfdist.Checkpoints(
            Path(folder) / "checkpoints", every_steps=2, resume=mode == "resume"
        )
        if mode == "kill":
            fit([keep, Kill(place.rank == place.world_size - 1)])
            raise AssertionError("the fit must have been killed")
        resumed, history = fit([keep])
        unbroken, expected = fit([])
        found = {
            "epochs": history.epoch,
            "weights": max(
                float(np.abs(a - b).max())
                for a, b in zip(resumed.get_weights(), unbroken.get_weights(), strict=True)
            ),
            "history": max(
                float(np.abs(np.subtract(values, expected.history[key][-len(values) :])).max())
                for key, values in history.history.items()
            ),
        }
        if place.is_chief:
            (Path(folder) / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
