"""What a step on two workers takes in plain TensorFlow: ``floor_multi_worker.py MODE STEPS``.

Each worker has a core, as the launcher binds it. MODE:

alone: the workers know nothing of each other: gradients of a batch, and an update by them.
beside: they are connected, as MultiWorkerMirroredStrategy does it, and do the same.
sum: they are connected, and add up gradients that cost nothing.
whole: they are connected, and add up the gradients of a batch before the update.
"""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np
import tensorflow as tf

from benchmarks.programs.workload import ROWS_PER_REPLICA, model_fn
from tfdist.launch.events import emit
from tfdist.topology import current

mode, steps = sys.argv[1], int(sys.argv[2])

tf.config.threading.set_intra_op_parallelism_threads(1)
workers = None if mode == "alone" else tf.distribute.MultiWorkerMirroredStrategy()
model = model_fn()  # Its variables are this worker's own, which all update alike.
weights = model.trainable_variables
rng = np.random.default_rng(0)
images = tf.constant(rng.random((ROWS_PER_REPLICA, 28, 28, 1), np.float32))
labels = tf.constant(rng.integers(0, 10, ROWS_PER_REPLICA))
loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")


def gradients() -> list[tf.Tensor]:
    if mode == "sum":
        return [tf.identity(weight) for weight in weights]
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    return tape.gradient(loss, weights)


def summed() -> list[tf.Tensor]:
    """Returns gradients, added up in a replica's context, whose device they need."""
    context = tf.distribute.get_replica_context()
    return context.all_reduce(tf.distribute.ReduceOp.SUM, gradients())


@tf.function
def step() -> tf.Tensor:
    found = workers.run(summed) if mode in ("sum", "whole") else gradients()
    for weight, gradient in zip(weights, found, strict=True):
        weight.assign_sub(1e-4 * gradient)
    return tf.reduce_sum(found[-1])


seconds = []
for _ in range(steps):
    begun = time.perf_counter()
    step().numpy()
    seconds.append(time.perf_counter() - begun)
if current().rank == 0:
    emit({"event": "floor", "ms": 1000 * statistics.median(seconds[steps // 4 :])})
