"""What every program of the training benchmark shares: model, data, stopwatch, and the result."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks import machine
from tfdist.launch.events import emit

ROWS_PER_REPLICA = 64
# A fit of a pair: the first epoch, which also opens the data, is not timed.
_EPOCHS_OF_A_PAIR = 3

Fit = Callable[[list[Any], int], Any]


def model_fn() -> tf.keras.Model:
    """Returns a small convnet, compiled: images float32 [28, 28, 1] -> 10 classes."""
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            tf.keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )
    compile_model(model, tf.keras.optimizers.SGD(0.01, momentum=0.9))
    return model


def compile_model(model: tf.keras.Model, optimizer: Any) -> None:
    model.compile(
        optimizer,
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def arrays(num_records: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the same random images float32 [n, 28, 28, 1] and labels int64 [n] everywhere."""
    rng = np.random.default_rng(0)
    images = rng.random((num_records, 28, 28, 1), dtype=np.float32)
    return images, rng.integers(0, 10, num_records)


def tuned_dataset(images: np.ndarray, labels: np.ndarray, batch_size: int) -> tf.data.Dataset:
    """Returns shuffled batches without end, as one who knows tf.data writes them by hand."""
    # Indices are shuffled and rows gathered a batch at a time: no image is copied alone.
    order = tf.data.Dataset.range(len(images)).shuffle(len(images), seed=0).repeat()
    batches = order.batch(batch_size, drop_remainder=True)
    images, labels = tf.constant(images), tf.constant(labels)
    return batches.map(lambda rows: (tf.gather(images, rows), tf.gather(labels, rows))).prefetch(2)


class Stopwatch(tf.keras.callbacks.Callback):
    """Seconds of each epoch but the first of a fit."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._begun_at = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if epoch > 0:
            self.seconds.append(time.perf_counter() - self._begun_at)


def report(steps: int, stopwatch: Stopwatch) -> None:
    """Tells the benchmark the speed of a fit of one engine."""
    emit({"event": "speed", "steps_per_s": steps / statistics.median(stopwatch.seconds)})


def report_pairs(steps: int, pairs: int, by_hand: Fit, ours: Fit) -> None:
    """Fits by hand and with tfdist in turn, and tells the benchmark the speeds of each pair.

    Both run in one process: the machine, its threads and its memory are the same for both.
    """
    fits = {"baseline": by_hand, "ours": ours}
    for fit in fits.values():  # Traces the steps.
        fit([], 1)
    for pair in range(pairs):
        speeds = {}
        with machine.OthersWatch(machine.of_session) as others:
            # Who goes first changes: a drift of the machine then favours neither.
            for name in sorted(fits, reverse=pair % 2 == 0):
                stopwatch = Stopwatch()
                fits[name]([stopwatch], _EPOCHS_OF_A_PAIR)
                speeds[name] = steps / statistics.median(stopwatch.seconds)
        emit({"event": "pair", **speeds, "others": others.share})
