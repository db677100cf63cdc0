"""Measures the bytes of one step. Run as ``python -m tfdist.runs.check_rank CONFIG``."""

from __future__ import annotations

import os
from typing import Any

import tfdist
from tfdist.compat import import_tensorflow
from tfdist.launch.events import emit
from tfdist.runs import ranks
from tfdist.training.engine import model_path


def measure_step(config: dict[str, Any]) -> None:
    # Logical CPUs play the devices, as they do where the step is traced.
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    import_tensorflow()
    from tfdist.runs import device_bytes
    from tfdist.runs.traced_step import made_up_rows

    emit({"event": "ready", "long": True})
    (name, options), rows = config["asked"], config["rows"]
    with tfdist.strategy(name, **options) as strategy:
        model = strategy.build(model_path.load(config["model"]))
        model.jit_compile = False
        data = strategy.dataset(made_up_rows(model, rows), global_batch_size=rows)

        def fit() -> None:
            model.fit(data, verbose=0)

        fit()  # Slots lie where they are to after the first step.
        found = device_bytes.of_a_step(model, fit)
    emit({"event": "measured", "most": max(found.values())})


if __name__ == "__main__":
    ranks.main(measure_step)
