"""A fit with tfdist: ``tfdist_fit.py STRATEGY STEPS EPOCHS [CORE]``, bound to CORE if given."""

from __future__ import annotations

import os
import sys

name = sys.argv[1]
steps, epochs, *core = map(int, sys.argv[2:])
if core:
    os.sched_setaffinity(0, core)  # Before TensorFlow counts the cores.

import tfdist  # noqa: E402
from benchmarks.programs.workload import (  # noqa: E402
    ROWS_PER_REPLICA,
    Stopwatch,
    arrays,
    model_fn,
    report,
)

with tfdist.strategy(name) as strategy:
    model = strategy.build(model_fn)
    global_batch_size = ROWS_PER_REPLICA * strategy.num_replicas
    train = strategy.dataset(arrays(steps * global_batch_size), global_batch_size=global_batch_size)
    stopwatch = Stopwatch()
    model.fit(train, epochs=epochs, callbacks=[stopwatch], verbose=0)
    if strategy.topology.is_chief:
        report(steps, stopwatch)
