"""A MultiWorkerMirroredStrategy script as TensorFlow's tutorial shows it.

``naive_multi_worker.py STEPS EPOCHS``
"""

from __future__ import annotations

import sys

import tensorflow as tf

from benchmarks.programs.workload import (
    ROWS_PER_REPLICA,
    Stopwatch,
    arrays,
    model_fn,
    report,
)

steps, epochs = map(int, sys.argv[1:])
strategy = tf.distribute.MultiWorkerMirroredStrategy()
global_batch_size = ROWS_PER_REPLICA * strategy.num_replicas_in_sync
dataset = tf.data.Dataset.from_tensor_slices(arrays(steps * global_batch_size))
dataset = dataset.batch(global_batch_size).prefetch(tf.data.AUTOTUNE)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
dataset = dataset.with_options(options)

with strategy.scope():
    model = model_fn()
stopwatch = Stopwatch()
model.fit(dataset, epochs=epochs, callbacks=[stopwatch], verbose=0)
if strategy.cluster_resolver.task_id == 0:
    report(steps, stopwatch)
