"""tfdist's strategy 'single' and plain Keras, in turn: ``pair_single.py STEPS PAIRS``."""

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
images, labels = arrays(steps * ROWS_PER_REPLICA)
with tfdist.strategy("single") as strategy:
    model = strategy.build(model_fn)
    train = strategy.dataset((images, labels), global_batch_size=ROWS_PER_REPLICA)

    by_hand = model_fn()
    dataset = tuned_dataset(images, labels, ROWS_PER_REPLICA)

    report_pairs(
        steps,
        pairs,
        lambda callbacks, epochs: by_hand.fit(
            dataset, epochs=epochs, steps_per_epoch=steps, callbacks=callbacks, verbose=0
        ),
        lambda callbacks, epochs: model.fit(train, epochs=epochs, callbacks=callbacks, verbose=0),
    )
