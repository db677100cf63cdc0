"""Makes two steps of a batch. Run as ``python -m tfdist.runs.try_batch_rank CONFIG``."""

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


if __name__ == "__main__":
    ranks.main(try_batch)
