"""One rank of ``tfdist train``. Run as ``python -m tfdist.cli.train_rank CONFIG``."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import tensorflow as tf

import tfdist
from tfdist.cli import model_path, ranks
from tfdist.cli.run_folder import RunFolder, read_history, write_history, write_json
from tfdist.launch.events import emit
from tfdist.topology import current

_EVENT_INTERVAL_S = 0.2


class _Report(tf.keras.callbacks.Callback):
    """Tells the command how far this rank is; the chief also keeps the history."""

    def __init__(self, folder: RunFolder, is_chief: bool, records: int, steps: int):
        super().__init__()
        self._folder = folder
        self._is_chief = is_chief
        self._records = records
        self._steps = steps
        self._told_at = 0.0
        self.rows = read_history(folder.history) if is_chief else []
        self.new_rows: list[dict[str, float]] = []

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._epoch = epoch
        self._begun_at = self._trained_at = time.perf_counter()
        self._batches = 0
        self.rows = [row for row in self.rows if row["epoch"] <= epoch]

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self._trained_at = time.perf_counter()
        self._batches = batch + 1
        self._tell(batch + 1)

    def on_test_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self._tell(None)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        seconds = self._trained_at - self._begun_at
        trained = self._records * self._batches / self._steps
        row = {
            "epoch": epoch + 1,
            **{name: float(value) for name, value in (logs or {}).items()},
            "seconds": round(seconds, 4),
            "samples_per_s": round(trained / seconds, 1),
        }
        if self._is_chief:
            self.rows.append(row)
            self.new_rows.append(row)
            write_history(self._folder.history, self.rows)
        emit({"event": "epoch", "row": row})

    def _tell(self, step: int | None) -> None:
        now = time.perf_counter()
        if now - self._told_at > _EVENT_INTERVAL_S:
            self._told_at = now
            emit({"event": "step", "epoch": self._epoch, "step": step})


class _Fault(tf.keras.callbacks.Callback):
    """Sends this process a signal after a step: what ``tfdist rehearse`` is about."""

    def __init__(self, step: int, signal_name: str):
        super().__init__()
        self._steps_left = step
        self._signal = signal.Signals[signal_name]

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self._steps_left -= 1
        if self._steps_left == 0:
            emit({"event": "fault", "at": time.time()})
            os.kill(os.getpid(), self._signal)


def _faults(config: dict[str, Any], rank: int) -> list[_Fault]:
    """Returns the faults of this rank; a training that was started again has none."""
    if config.get("attempt"):
        return []
    return [
        _Fault(fault["step"], fault["signal"])
        for fault in config.get("faults", ())
        if fault["rank"] == rank
    ]


def train(config: dict[str, Any]) -> None:
    folder = RunFolder(config["output"])
    with tfdist.strategy(config["strategy"], **config["options"]) as strategy:
        emit({"event": "ready"})
        tf.keras.utils.set_random_seed(config["seed"])
        model = strategy.build(model_path.load(config["model"]))

        def dataset(split: str, training: bool) -> Any:
            return strategy.dataset(
                config["splits"][split],
                global_batch_size=config["global_batch_size"],
                training=training,
                seed=config["seed"],
            )

        feed = dataset("train", True)
        validation = dataset("validation", False) if "validation" in config["splits"] else None
        is_chief = strategy.topology.is_chief
        report = _Report(folder, is_chief, feed.records_per_epoch, feed.callback_steps)
        checkpoints = tfdist.Checkpoints(
            folder.checkpoints,
            every_steps=config["checkpoint_every"],
            keep=config["keep"],
            resume=config["resume"],
        )
        emit({"event": "data", "steps": feed.callback_steps, "replicas": strategy.num_replicas})
        model.fit(
            feed,
            epochs=config["epochs"],
            validation_data=validation,
            callbacks=[report, checkpoints, *_faults(config, strategy.topology.rank)],
            verbose=0,
        )
        test = None
        if "test" in config["splits"]:
            test = model.evaluate(dataset("test", False), verbose=0, return_dict=True)
        strategy.save(model, folder.model)
        if is_chief:
            summary = _summary(config, strategy, model.metrics_names, report, test)
            write_json(folder.metrics, summary)


def _summary(
    config: dict[str, Any],
    strategy: Any,
    metric_names: list[str],
    report: _Report,
    test: dict[str, float] | None,
) -> dict[str, Any]:
    last = report.rows[-1]
    # The first epoch also traces the step, so it tells nothing of the speed of the others.
    timed = report.new_rows[1:] or report.new_rows or report.rows
    speeds = sorted(timed, key=lambda row: row["samples_per_s"])
    median = speeds[len(speeds) // 2]
    metrics = {k: v for k, v in last.items() if k not in ("epoch", "seconds", "samples_per_s")}
    rate = metrics.pop("learning_rate")
    return {
        "strategy": strategy.name,
        "workers": current().num_workers,
        "replicas": strategy.num_replicas,
        "global_batch_size": config["global_batch_size"],
        "epochs": int(last["epoch"]),
        "learning_rate": rate,
        "samples_per_s": median["samples_per_s"],
        "epoch_seconds": median["seconds"],
        "train": {k: v for k, v in metrics.items() if k in metric_names},
        "validation": {k[4:]: v for k, v in metrics.items() if k.startswith("val_")},
        "test": {k: float(v) for k, v in test.items()} if test else {},
        "last_epoch": {
            k: v for k, v in metrics.items() if k not in metric_names and not k.startswith("val_")
        },
    }


if __name__ == "__main__":
    ranks.main(train)
