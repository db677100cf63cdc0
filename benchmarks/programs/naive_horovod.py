"""A Horovod script as its documentation shows it: ``naive_horovod.py STEPS EPOCHS``."""

from __future__ import annotations

import sys

import tensorflow as tf

from benchmarks.programs.horovod_keras import hvd
from benchmarks.programs.workload import (
    ROWS_PER_REPLICA,
    Stopwatch,
    arrays,
    compile_model,
    model_fn,
    report,
)

steps, epochs = map(int, sys.argv[1:])
hvd.init()
images, labels = arrays(steps * ROWS_PER_REPLICA * hvd.size())
mine = slice(hvd.rank(), None, hvd.size())
dataset = tf.data.Dataset.from_tensor_slices((images[mine], labels[mine]))
dataset = dataset.batch(ROWS_PER_REPLICA).prefetch(tf.data.AUTOTUNE)

model = model_fn()
rate = 0.01 * hvd.size()
# The legacy optimizer: Horovod's warm-up cannot set the momentum of Keras' newer ones.
optimizer = tf.keras.optimizers.legacy.SGD(rate, momentum=0.9)
compile_model(model, hvd.DistributedOptimizer(optimizer))
stopwatch = Stopwatch()
model.fit(
    dataset,
    epochs=epochs,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=3),
        stopwatch,
    ],
    verbose=0,
)
if hvd.rank() == 0:
    report(steps, stopwatch)
