"""tfdist's strategy 'multi_worker' and the best script by hand, in turn.

``pair_multi_worker.py STEPS PAIRS``. A process connects to a cluster once, so both use the
connection, the threads and the cores that tfdist has taken.
"""

from __future__ import annotations

import sys

import tfdist
from benchmarks.programs.workload import (
    ROWS_PER_REPLICA,
    arrays,
    model_fn,
    report_pairs,
    tuned_dataset,
)

steps, pairs = map(int, sys.argv[1:])
with tfdist.strategy("multi_worker") as strategy:
    global_batch_size = ROWS_PER_REPLICA * strategy.num_replicas
    images, labels = arrays(steps * global_batch_size)
    model = strategy.build(model_fn)
    train = strategy.dataset((images, labels), global_batch_size=global_batch_size)

    workers = model.distribute_strategy
    with workers.scope():
        by_hand = model_fn()
    place = strategy.topology
    mine = slice(place.rank, None, place.world_size)
    # Without end and made by each worker for itself: TensorFlow then asks nobody for the next one.
    dataset = workers.distribute_datasets_from_function(
        lambda _: tuned_dataset(images[mine], labels[mine], ROWS_PER_REPLICA)
    )

    report_pairs(
        steps,
        pairs,
        lambda callbacks, epochs: by_hand.fit(
            dataset, epochs=epochs, steps_per_epoch=steps, callbacks=callbacks, verbose=0
        ),
        lambda callbacks, epochs: model.fit(train, epochs=epochs, callbacks=callbacks, verbose=0),
    )
