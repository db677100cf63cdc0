"""A federated fit that ends in the way it is told, or waits to be killed.

Usage: python fit_until_killed.py WAY PID_FILE, the way being return, raise, exit or wait.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

import tfdist
from tfdist.compat import import_tensorflow

keras = import_tensorflow().keras


def model_fn():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, "softmax")])
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    return model


class Tell(keras.callbacks.Callback):
    """Writes the worker's process id after the first round, and goes."""

    def __init__(self, strategy, way, file):
        super().__init__()
        self._strategy, self._way, self._file = strategy, way, file

    def on_epoch_end(self, epoch, logs=None):
        if epoch:
            return
        partial = self._file.with_suffix(".partial")
        partial.write_text(str(self._strategy._engine._process.pid))
        partial.rename(self._file)
        if self._way == "raise":
            raise RuntimeError("a fault of the user's own")
        if self._way == "exit":
            os._exit(3)


def main(way, file):
    strategy = tfdist.strategy("federated")
    strategy.start()  # Without a with block: nobody closes it.
    model = strategy.build(model_fn)
    data = strategy.dataset({"a": (np.zeros((4, 2), np.float32), np.zeros(4, int))})
    epochs = 10**6 if way == "wait" else 2
    model.fit(data, epochs=epochs, callbacks=[Tell(strategy, way, Path(file))], verbose=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
