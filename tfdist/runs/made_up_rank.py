"""Makes steps on made-up rows: whether a batch fits, and what a step takes.

Run as ``python -m tfdist.runs.made_up_rank CONFIG``.
"""

from __future__ import annotations

import os
import resource
from typing import Any

import psutil

import tfdist
from tfdist.compat import import_tensorflow
from tfdist.launch.events import emit
from tfdist.runs import ranks
from tfdist.training.engine import model_path

_OUT_OF_MEMORY = 3


def try_batch(config: dict[str, Any]) -> None:
    """Tells whether two steps of a batch fit."""
    tf = import_tensorflow()
    from tfdist.runs.traced_step import made_up_rows

    rows = config["rows"]
    with tfdist.strategy(config["strategy"], **config["options"]) as strategy:
        emit({"event": "ready", "long": True})
        if not tf.config.list_physical_devices("GPU"):
            _hold_to(config["room"], strategy.topology)
        try:
            model = strategy.build(model_path.load(config["model"]))
            data = strategy.dataset(made_up_rows(model, 2 * rows), global_batch_size=rows)
            emit({"event": "built", "long": True})
            model.fit(data, verbose=0)
        except (tf.errors.ResourceExhaustedError, MemoryError):
            emit({"event": "full"})
            # Other ranks may never come to a common end, and a single one has told all.
            os._exit(_OUT_OF_MEMORY if strategy.topology.world_size > 1 else 0)
    emit({"event": "fits"})


def _hold_to(room: int | None, place: Any) -> None:
    """Lets this process take so many bytes more, for each device that it computes on."""
    import tensorflow as tf

    if room is None:
        most = psutil.virtual_memory().available // place.local_size
    else:
        most = room * len(tf.config.list_logical_devices("CPU"))
    held = psutil.Process().memory_info().data
    resource.setrlimit(resource.RLIMIT_DATA, (held + most, held + most))


def measure_step(config: dict[str, Any]) -> None:
    """Tells the most bytes on a device in a step."""
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
    ranks.main(lambda config: (try_batch if "room" in config else measure_step)(config))
