"""Counts what a first step takes to be traced. A program that test_tracing.py runs, no test.

Usage: tracing_scenarios.py STRATEGY OPTIONS NUMBER_OF_LAYERS... Prints for each number
{"walked": operations that TensorFlow has looked at for variables, "operations": made}, as a list.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.ops import op_selector

import tfdist

keras = tf.keras


def deep_model(num_layers: int) -> Any:
    def model_fn() -> keras.Model:
        model = keras.Sequential([keras.Input((4,))])
        for _ in range(num_layers):
            model.add(keras.layers.Dense(4))
            model.add(keras.layers.BatchNormalization())
        model.compile("sgd", "mse")
        return model

    return model_fn


def count() -> dict[str, int]:
    """Returns the counts, which grow from now on."""
    counts = {"walked": 0, "operations": 0}
    walk = op_selector.get_backward_walk_ops
    from_node_def = ops.Operation.from_node_def.__func__

    def counted_walk(*args: Any, **more: Any) -> Any:
        found = walk(*args, **more)
        counts["walked"] += 1 + len(found)
        return found

    def counted_node(cls: Any, *args: Any, **more: Any) -> Any:
        counts["operations"] += 1
        return from_node_def(cls, *args, **more)

    op_selector.get_backward_walk_ops = counted_walk
    ops.Operation.from_node_def = classmethod(counted_node)
    return counts


def main(strategy_name: str, options: str, *numbers: str) -> None:
    counts = count()
    x = np.ones((8, 4), np.float32)
    found = []
    with tfdist.strategy(strategy_name, **json.loads(options)) as strategy:
        feed = strategy.dataset((x, x), global_batch_size=8)
        for num_layers in map(int, numbers):
            model = strategy.build(deep_model(num_layers))
            counts.update(walked=0, operations=0)
            model.fit(feed, verbose=0)
            found.append(dict(counts))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
