"""One rank of ``tfdist verify``. Run as ``python -m tfdist.runs.verify_rank CONFIG``."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import tfdist
from tfdist.compat import import_tensorflow
from tfdist.launch.events import emit
from tfdist.runs import ranks
from tfdist.runs.files import write_json
from tfdist.training.engine import model_path

_BETWEEN_S = 1.0


def verify(config: dict[str, Any]) -> None:
    tf = import_tensorflow()
    from tfdist import equivalence

    class Alive(tf.keras.callbacks.Callback):
        """Tells that a training goes on, of which there are several."""

        _supports_tf_logs = True  # Keras need not bring them to the host.
        told_at = 0.0

        def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
            if (now := time.monotonic()) - self.told_at >= _BETWEEN_S:
                self.told_at = now
                emit({"event": "step", "step": batch + 1})

    with tfdist.strategy(config["strategy"], **config["options"]) as strategy:
        emit({"event": "ready", "long": True})
        report = equivalence.verify(
            model_path.load(config["model"]),
            config["data"],
            strategy,
            **config["comparing"],
            callbacks=[Alive()],
        )
        if report is not None:
            write_json(Path(config["report"]), dataclasses.asdict(report))


if __name__ == "__main__":
    ranks.main(verify)
