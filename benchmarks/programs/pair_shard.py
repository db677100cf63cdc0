"""A strategy without and with ``shard``, in turn: ``pair_shard.py STRATEGY SHARD STEPS PAIRS``.

Both are the same strategy, in one process of each rank.
"""

from __future__ import annotations

import sys
from typing import Any

import tfdist

_WIDTH, _DEPTH, _ROWS_PER_REPLICA = 512, 8, 256

name, shard, steps, pairs = *sys.argv[1:3], *map(int, sys.argv[3:])
with tfdist.strategy(name) as whole, tfdist.strategy(name, shard=shard) as divided:
    import numpy as np
    import tensorflow as tf

    from benchmarks.programs.workload import report_pairs
    from tfdist.launch.events import emit
    from tfdist.training.engine.binding import binding_of

    def model_fn() -> tf.keras.Model:
        layers = [tf.keras.layers.Dense(_WIDTH, "gelu") for _ in range(_DEPTH)]
        model = tf.keras.Sequential([tf.keras.Input((_WIDTH,)), *layers])
        model.compile(tf.keras.optimizers.Adam(1e-4), "mse")
        return model

    global_batch_size = _ROWS_PER_REPLICA * whole.num_replicas
    x = np.random.default_rng(0).normal(size=(steps * global_batch_size, _WIDTH))
    x = x.astype(np.float32)

    def fit_of(strategy: Any) -> Any:
        model = strategy.build(model_fn)
        train = strategy.dataset((x, x), global_batch_size=global_batch_size)

        def fit(callbacks: list, epochs: int) -> None:
            model.fit(train, epochs=epochs, callbacks=callbacks, verbose=0)

        return model, fit

    (plain, fit_plain), (model, fit) = map(fit_of, (whole, divided))
    report_pairs(steps, pairs, fit_plain, fit)
    held = sum(slot.numpy().nbytes for slot in plain.optimizer.variables[1:])
    parts = binding_of(model, needed_by="the benchmark").sharded.bytes_of_each()
    emit({"event": "slots", "whole": held, "parts": parts})
