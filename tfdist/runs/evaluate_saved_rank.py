"""One rank of ``tfdist evaluate``. Run as ``python -m tfdist.runs.evaluate_saved_rank CONFIG``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tfdist
from tfdist.launch.events import emit
from tfdist.records.format.split_place import find_split
from tfdist.runs import ranks
from tfdist.runs.predict_rank import Progress, built, load


def evaluate(config: dict[str, Any]) -> None:
    _, split, manifest = find_split(Path(config["data"]))
    with tfdist.strategy(config["strategy"], **config["options"]) as strategy:
        model, data = built(strategy, config)
        load(model, config["weights"])
        emit({"event": "begun", "long": True})  # The first step traces.
        progress = Progress(data.steps_per_epoch)
        found = model.evaluate(data, verbose=0, return_dict=True, callbacks=[progress])
        if strategy.topology.is_chief:
            metrics = {name: float(value) for name, value in found.items()}
            records = manifest.splits[split].records
            emit({"event": "found", "metrics": metrics, "records": records})
        strategy.from_chief(None)  # None ends, and is taken for lost, before the chief has told.


if __name__ == "__main__":
    ranks.main(evaluate)
