"""The first step of a model of tf.keras.applications: ``first_step.py STRATEGY MODEL [OPTIONS]``.

STRATEGY is one of tfdist's, or "keras", "MirroredStrategy" or "MultiWorkerMirroredStrategy" as
written by hand; OPTIONS is JSON. Reports the processor time of this process and the time it took.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import tensorflow as tf

import tfdist
from tfdist.launch.events import emit
from tfdist.strategies.mirrored import make_logical_cpus

name, kind = sys.argv[1:3]
options = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
_SIDE, _ROWS, _CLASSES = 32, 8, 10


def model_fn() -> tf.keras.Model:
    model = getattr(tf.keras.applications, kind)(
        weights=None,
        input_shape=(_SIDE, _SIDE, 3),
        classes=_CLASSES,
        classifier_activation=None,
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.SGD(1e-3), loss, metrics=["accuracy"])
    return model


def arrays() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(_ROWS, _SIDE, _SIDE, 3)).astype(np.float32)
    return x, np.arange(_ROWS) % _CLASSES


def measure(model: tf.keras.Model, data: Any) -> None:
    begun, used = time.perf_counter(), time.process_time()
    model.fit(data, verbose=0)
    cpu_s = time.process_time() - used
    emit({"event": "first_step", "cpu_s": cpu_s, "seconds": time.perf_counter() - begun})


def by_hand() -> None:
    if name == "MirroredStrategy":
        make_logical_cpus(2)
        strategy = tf.distribute.MirroredStrategy(
            ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
        )
    elif name == "MultiWorkerMirroredStrategy":
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    else:
        strategy = tf.distribute.get_strategy()
    with strategy.scope():
        model = model_fn()
    measure(model, tf.data.Dataset.from_tensor_slices(arrays()).batch(_ROWS))


def with_tfdist() -> None:
    with tfdist.strategy(name, **options) as strategy:
        model = strategy.build(model_fn)
        measure(model, strategy.dataset(arrays(), global_batch_size=_ROWS))


if name == "keras" or name.endswith("Strategy"):
    by_hand()
else:
    with_tfdist()
