"""One rank of ``tfdist verify``. Run as ``python -m tfdist.runs.verify_rank CONFIG``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import tfdist
from tfdist.compat import import_tensorflow
from tfdist.launch.events import emit
from tfdist.runs import ranks
from tfdist.runs.files import write_json
from tfdist.training.engine import model_path


def verify(config: dict[str, Any]) -> None:
    import_tensorflow()
    from tfdist import equivalence
    from tfdist.runs.epoch_rows import Alive

    with tfdist.strategy(config["strategy"], **config["options"]) as strategy:
        emit({"event": "ready", "long": True})
        report = equivalence.verify(
            model_path.load(config["model"]),
            config["data"],
            strategy,
            **config["comparing"],
            callbacks=[Alive(lambda step: {"event": "step", "step": step})],
        )
        if report is not None:
            write_json(Path(config["report"]), dataclasses.asdict(report))


if __name__ == "__main__":
    ranks.main(verify)
