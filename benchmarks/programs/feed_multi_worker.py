"""What the next batch costs on each of the workers: ``feed_multi_worker.py STEPS ROUNDS``.

Three ways in turn, in milliseconds a step: plain tf.data, which knows nothing of other workers;
TensorFlow's distributed dataset, which a script by hand gives to ``fit``; what tfdist gives to it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import tfdist
from benchmarks import machine
from benchmarks.programs.workload import ROWS_PER_REPLICA, arrays, tuned_dataset
from tfdist.launch.events import emit

steps, rounds = map(int, sys.argv[1:])


def consumer() -> Callable[[Any], tf.Tensor]:
    """Returns a compiled step that takes the next batch and uses next to nothing of it."""

    @tf.function
    def take(iterator: Any) -> tf.Tensor:
        def first_row(batch: Any) -> tf.Tensor:
            return tf.nest.flatten(batch)[0][0, 0, 0, 0]

        return workers.run(first_row, args=(next(iterator),))

    return take


def milliseconds(take: Callable[[Any], tf.Tensor], dataset: Any) -> float:
    """Returns the median of the steps but the first, in which the data are opened."""
    iterator = iter(dataset)
    seconds = []
    for _ in range(steps):
        begun = time.perf_counter()
        take(iterator)
        seconds.append(time.perf_counter() - begun)
    return 1000 * statistics.median(seconds[1:])


with tfdist.strategy("multi_worker") as strategy:
    global_batch_size = ROWS_PER_REPLICA * strategy.num_replicas
    images, labels = arrays(steps * global_batch_size)
    train = strategy.dataset((images, labels), global_batch_size=global_batch_size)
    collective = strategy.connect()
    workers = collective.strategy
    place = strategy.topology
    mine = slice(place.rank, None, place.world_size)

    by_hand = tf.data.Dataset.from_tensor_slices((images, labels)).batch(global_batch_size)
    datasets = {
        "plain": lambda: tuned_dataset(images[mine], labels[mine], ROWS_PER_REPLICA),
        "by_hand": lambda: workers.experimental_distribute_dataset(by_hand.prefetch(2)),
        "ours": lambda: collective.distribute(lambda: train.epochs(0, 1)),
    }
    takers = {name: consumer() for name in datasets}
    for name, make in datasets.items():  # Traces the steps.
        takers[name](iter(make()))
    for _ in range(rounds):
        with machine.OthersWatch(machine.of_session) as others:
            spent = {name: milliseconds(takers[name], make()) for name, make in datasets.items()}
        emit({"event": "feed", **spent, "others": others.share})
