"""Peak memory of a rank that trains a stack of equal blocks: ``memory_shard.py SHARD WIDTH``.

In units of one block's weights, over what the process has after a stack of narrow ones: until the
first steps are over, in the steps after, and in a fit that writes a checkpoint.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import tfdist

_DEPTH, _ROWS_PER_REPLICA = 16, 32

shard, width = sys.argv[1], int(sys.argv[2])
with tfdist.strategy("horovod", shard=shard) as strategy:
    import numpy as np
    import tensorflow as tf

    from tfdist.launch.events import emit

    def model_fn(width: int = width, depth: int = _DEPTH) -> tf.keras.Model:
        layers = [tf.keras.layers.Dense(width, "tanh") for _ in range(depth)]
        model = tf.keras.Sequential([tf.keras.Input((width,)), *layers])
        model.compile(tf.keras.optimizers.Adam(1e-4), "mse")
        return model

    def megabytes(field: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024

    def forget_peak() -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def fit(model: tf.keras.Model, width: int, *callbacks: Any) -> None:
        rows = _ROWS_PER_REPLICA * strategy.num_replicas
        x = np.random.default_rng(0).normal(size=(2 * rows, width)).astype(np.float32)
        model.fit(x, x, batch_size=rows, shuffle=False, callbacks=callbacks, verbose=0)

    # What TensorFlow and Horovod take for any such stack is there before.
    fit(strategy.build(lambda: model_fn(64)), 64)
    base = megabytes("VmRSS")
    model = strategy.build(model_fn)
    block = 4 * width * (width + 1) / 2**20

    def peak_of_fit(*callbacks: Any) -> float:
        fit(model, width, *callbacks)
        peak = (megabytes("VmHWM") - base) / block
        forget_peak()
        return peak

    peaks = {"first": peak_of_fit(), "later": peak_of_fit()}
    with tempfile.TemporaryDirectory(prefix="tfdist-") as own:
        folder = strategy.from_chief(own)
        peaks["kept"] = peak_of_fit(tfdist.Checkpoints(folder))
        strategy.from_chief(None)
    emit({"event": "peak", "block": block, **peaks})
