"""A small DLRM by hand and with tfdist, in turn.

``pair_tables.py STRATEGY OPTIMIZER ROWS STEPS PAIRS``; by hand is plain Keras on one device, and
Horovod's DistributedOptimizer on two ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import tfdist
from benchmarks.programs.workload import report_pairs
from tfdist.launch.events import emit

_TABLES, _WIDTH, _NUMBERS = 4, 32, 13
_GLOBAL_BATCH_SIZE = 2048


def dlrm(optimizer: str, rows: int) -> tf.keras.Model:
    """Returns the model, compiled: tables of ``rows`` x 32, and towers of numbers beside them."""
    layers = tf.keras.layers
    numbers = tf.keras.Input((_NUMBERS,), name="numbers")
    ids = tf.keras.Input((_TABLES,), dtype="int32", name="ids")
    looked_up = [layers.Embedding(rows, _WIDTH)(ids[:, table]) for table in range(_TABLES)]
    bottom = layers.Dense(_WIDTH, "relu")(layers.Dense(64, "relu")(numbers))
    together = layers.Concatenate()([bottom, *looked_up])
    logits = layers.Dense(1)(layers.Dense(64, "relu")(together))
    model = tf.keras.Model([numbers, ids], logits)
    compiled(model, {"adam": tf.keras.optimizers.Adam, "sgd": tf.keras.optimizers.SGD}[optimizer]())
    return model


def compiled(model: tf.keras.Model, optimizer: Any) -> None:
    model.compile(optimizer, tf.keras.losses.BinaryCrossentropy(from_logits=True))


def sent_by_all() -> int:
    """Returns the bytes that went through the loopback device."""
    [line] = [one for one in Path("/proc/net/dev").read_text().splitlines() if " lo:" in one]
    return int(line.split(":")[1].split()[8])


class Sent(tf.keras.callbacks.Callback):
    """What went through it in the second epoch: the first sends the weights, too."""

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._before = sent_by_all()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self.bytes = sent_by_all() - self._before


name, optimizer, *sizes = sys.argv[1:]
rows, steps, pairs = map(int, sizes)
with tfdist.strategy(name) as strategy:
    rng = np.random.default_rng(0)
    count = steps * _GLOBAL_BATCH_SIZE
    x = {
        "numbers": rng.normal(size=(count, _NUMBERS)).astype(np.float32),
        "ids": rng.integers(0, rows, (count, _TABLES), np.int32),
    }
    y = rng.integers(0, 2, (count, 1)).astype(np.float32)
    model = strategy.build(lambda: dlrm(optimizer, rows))
    train = strategy.dataset((x, y), global_batch_size=_GLOBAL_BATCH_SIZE)

    by_hand, usual, size, rank = dlrm(optimizer, rows), [], 1, 0
    if name == "horovod":
        from benchmarks.programs.horovod_keras import hvd

        compiled(by_hand, hvd.DistributedOptimizer(by_hand.optimizer))
        usual, size, rank = (
            [hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
            hvd.size(),
            hvd.rank(),
        )
    mine = tf.data.Dataset.from_tensor_slices(
        tf.nest.map_structure(lambda array: array[rank::size], (x, y))
    )
    dataset = mine.batch(_GLOBAL_BATCH_SIZE // size).repeat().prefetch(2)

    report_pairs(
        steps,
        pairs,
        lambda callbacks, epochs: by_hand.fit(
            dataset,
            epochs=epochs,
            steps_per_epoch=steps,
            callbacks=[*usual, *callbacks],
            verbose=0,
        ),
        lambda callbacks, epochs: model.fit(train, epochs=epochs, callbacks=callbacks, verbose=0),
    )
    sent = Sent()
    model.fit(train, epochs=2, callbacks=[sent], verbose=0)
    emit({"event": "sent", "bytes": sent.bytes / steps / size})
