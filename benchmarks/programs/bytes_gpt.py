"""Most bytes on each device in a step of the GPT of the examples: ``bytes_gpt.py [grid]``.

On one device, or as ``tfdist.examples.gpt_grid`` divides it; there each rank tells its own.
"""

from __future__ import annotations

import sys

import tfdist
from tfdist.examples import gpt_grid

strategy = gpt_grid.strategy() if sys.argv[1:] == ["grid"] else tfdist.strategy("single")
with strategy:
    from tfdist.examples.gpt import data, model_fn
    from tfdist.launch.events import emit
    from tfdist.runs import device_bytes

    model = strategy.build(model_fn)
    train = strategy.dataset(data(), global_batch_size=gpt_grid.BATCH).limited(2)

    def fit() -> None:
        model.fit(train, verbose=0)

    fit()
    emit({"event": "bytes", "most": device_bytes.of_a_step(model, fit)})
