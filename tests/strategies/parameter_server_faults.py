"""A training that tells its processes' numbers and its steps, so that a test can strike at them.

Usage: python parameter_server_faults.py FOLDER EPOCHS SECONDS; SECONDS is how long a step waits.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

import tfdist
from tfdist.compat import import_tensorflow
from tfdist.topology import current

keras = import_tensorflow().keras
STEPS = 10


def model_fn():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


class Tell(keras.callbacks.Callback):
    def __init__(self, seconds: float):
        super().__init__()
        self._seconds = seconds

    def on_train_batch_end(self, batch, logs=None):
        print(f"step {int(self.model.optimizer.iterations)}", flush=True)
        time.sleep(self._seconds)


def main(folder: str, epochs: str, seconds: str) -> None:
    print(f"pid {current().rank} {os.getpid()}", flush=True)
    x = np.random.default_rng(0).normal(size=(4 * STEPS, 4)).astype(np.float32)
    options = {"start_timeout_s": 300, "stall_timeout_s": 3}
    with tfdist.strategy("parameter_server", **options) as strategy:
        model = strategy.build(model_fn)
        model.fit(
            strategy.dataset((x, x[:, :1]), global_batch_size=4),
            epochs=int(epochs),
            callbacks=[
                tfdist.Checkpoints(Path(folder), every_steps=4, resume=True),
                Tell(float(seconds)),
            ],
            verbose=0,
        )
        print(f"trained {int(model.optimizer.iterations)} steps", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
