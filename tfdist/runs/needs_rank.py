"""Traces one step of a strategy. Run as ``python -m tfdist.runs.needs_rank CONFIG``."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from tfdist.compat import import_tensorflow
from tfdist.launch.events import emit
from tfdist.runs import ranks
from tfdist.training.engine import model_path


def tell_needs(config: dict[str, Any]) -> None:
    # Each device that a strategy asks for is a logical CPU here: nothing is run on any.
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    import_tensorflow()
    from tfdist.runs.traced_step import needs_of

    emit({"event": "ready", "long": True})
    name, options, devices = config["asked"]
    found = needs_of(model_path.load(config["model"]), name, options, devices, config["rows"])
    emit({"event": "needs", "needs": dataclasses.asdict(found)})


if __name__ == "__main__":
    ranks.main(tell_needs)
