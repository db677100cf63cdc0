"""tfdist's Horovod strategy and the best script by hand, in turn: ``pair_horovod.py STEPS PAIRS``.

Both run on the ranks that tfdist's launcher starts, with the threads that tfdist chooses.
"""

from __future__ import annotations

import sys

import tfdist
from benchmarks.programs.workload import (
    ROWS_PER_REPLICA,
    arrays,
    compile_model,
    model_fn,
    report_pairs,
    tuned_dataset,
)

steps, pairs = map(int, sys.argv[1:])
with tfdist.strategy("horovod") as strategy:
    from benchmarks.programs.horovod_keras import hvd

    global_batch_size = ROWS_PER_REPLICA * hvd.size()
    images, labels = arrays(steps * global_batch_size)

    model = strategy.build(model_fn)
    train = strategy.dataset((images, labels), global_batch_size=global_batch_size)

    by_hand = model_fn()
    compile_model(by_hand, hvd.DistributedOptimizer(by_hand.optimizer))
    mine = slice(hvd.rank(), None, hvd.size())
    dataset = tuned_dataset(images[mine], labels[mine], ROWS_PER_REPLICA)

    def fit_by_hand(callbacks: list, epochs: int) -> None:
        usual = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
        ]
        by_hand.fit(
            dataset,
            epochs=epochs,
            steps_per_epoch=steps,
            callbacks=[*usual, *callbacks],
            verbose=0,
        )

    report_pairs(
        steps,
        pairs,
        fit_by_hand,
        lambda callbacks, epochs: model.fit(train, epochs=epochs, callbacks=callbacks, verbose=0),
    )
