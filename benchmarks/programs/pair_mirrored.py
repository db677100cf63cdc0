"""tfdist's strategy 'mirrored' and MirroredStrategy by hand: ``pair_mirrored.py STEPS PAIRS``.

Both on two logical CPUs.
"""

from __future__ import annotations

import sys

import tensorflow as tf

import tfdist
from benchmarks.programs.workload import (
    ROWS_PER_REPLICA,
    arrays,
    model_fn,
    report_pairs,
    tuned_dataset,
)

steps, pairs = map(int, sys.argv[1:])
with tfdist.strategy("mirrored", devices=2) as strategy:
    global_batch_size = ROWS_PER_REPLICA * strategy.num_replicas
    images, labels = arrays(steps * global_batch_size)
    model = strategy.build(model_fn)
    train = strategy.dataset((images, labels), global_batch_size=global_batch_size)

    # The reduction that tfdist takes on CPUs too: any other aborts beside a second strategy.
    mirrored = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    with mirrored.scope():
        by_hand = model_fn()
    dataset = tuned_dataset(images, labels, global_batch_size)

    report_pairs(
        steps,
        pairs,
        lambda callbacks, epochs: by_hand.fit(
            dataset, epochs=epochs, steps_per_epoch=steps, callbacks=callbacks, verbose=0
        ),
        lambda callbacks, epochs: model.fit(train, epochs=epochs, callbacks=callbacks, verbose=0),
    )
