"""One rank of ``tfdist train``. Run as ``python -m tfdist.runs.train_rank CONFIG``."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import tfdist
from tfdist.compat import import_tensorflow
from tfdist.errors import OptionError
from tfdist.launch.events import emit, emit_numbers
from tfdist.runs import meters, ranks
from tfdist.runs.epoch_rows import EpochRows, numbers
from tfdist.runs.files import read_rows, write_history, write_json
from tfdist.runs.fitting import Fitting, writing
from tfdist.runs.folder import RunFolder
from tfdist.runs.resource_use import Processes, ResourceUse

tf = import_tensorflow()
_EVENT_INTERVAL_S = 0.2


class _Report(EpochRows):
    """Tells the command how far this rank is; the chief also keeps the history.

    Args:
        wait: measures how long steps wait for data.
        use: tells what this rank uses.
    """

    def __init__(
        self, folder: RunFolder, strategy: Any, wait: Any, use: ResourceUse, **of_rows: Any
    ):
        super().__init__(**of_rows)
        self._wait = wait
        self._use = use
        self._folder = folder
        self._strategy = strategy
        self._told_at = 0.0
        self._epoch = 0
        self._has_tested = False

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._epoch = epoch
        self._wait.take()
        self._use.take()
        super().on_epoch_begin(epoch, logs)

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        super().on_train_batch_end(batch, logs)
        speed = round(self.speed(), 1)
        self._tell(batch + 1, steps=self._steps, samples_per_s=speed, step_ms=self.step_ms())

    def on_test_begin(self, logs: dict | None = None) -> None:
        # The first one traces.
        emit({"event": "step", "epoch": self._epoch, "step": None, "long": not self._has_tested})
        self._has_tested = True

    def on_test_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self._tell(None)

    def more(self, batches: int, seconds: float) -> dict[str, float]:
        waited = self._wait.take()
        if waited is None:
            return {}
        return {"data_wait": round(min(1.0, waited * batches / seconds), 4)}

    def keep(self, row: dict[str, float]) -> None:
        if self._strategy.topology.is_chief:  # Perhaps after another one, whose rows are there.
            before = read_rows(self._folder.history)
            rows = [*(other for other in before if other["epoch"] < row["epoch"]), row]
            write_history(self._folder.history, rows)
        emit({"event": "resources", "epoch": row["epoch"], **self._use.take()})
        emit_numbers({"event": "epoch", "row": row, "step_ms": self.step_ms()}, "row")

    def _tell(self, step: int | None, **more: float) -> None:
        now = time.perf_counter()
        if now - self._told_at > _EVENT_INTERVAL_S:
            self._told_at = now
            emit({"event": "step", "epoch": self._epoch, "step": step, **more})


@contextlib.contextmanager
def _keeping(
    folder: RunFolder, checkpoints: tfdist.Checkpoints, report: _Report, strategy: Any
) -> Iterator[None]:
    """Encloses the writing of a checkpoint: after that of the first epoch the earlier run goes."""
    if strategy.topology.is_chief:
        folder.settle()  # A chief that was lost may have been about it.
    checkpoints.move(folder.checkpoints)
    before = checkpoints.newest
    with writing():
        yield
    if strategy.topology.is_chief and report.new_rows and checkpoints.newest is not None:
        folder.replace_earlier()
    is_new = checkpoints.newest != before
    checkpoints.move(folder.checkpoints)
    if is_new and strategy.topology.is_chief:
        emit({"event": "checkpoint", "path": str(checkpoints.newest)})


class _Faults(tf.keras.callbacks.Callback):
    """Sends this process a signal after a step: what ``tfdist rehearse`` is about.

    Args:
        faults: of this rank, each with a "step", counted from 1 over all epochs, and a "signal".
        checkpoints: knows where a resumed training has begun.
        steps_per_epoch: as callbacks are told of them.
    """

    def __init__(
        self, faults: list[dict[str, Any]], checkpoints: tfdist.Checkpoints, steps_per_epoch: int
    ):
        super().__init__()
        self._faults = faults
        self._checkpoints = checkpoints
        self._steps_per_epoch = steps_per_epoch

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        begun = self._checkpoints.start.position
        resumed = begun.step if epoch == begun.epoch else 0
        self._steps_before = epoch * self._steps_per_epoch + resumed

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        for fault in self._faults:
            if fault["step"] <= self._steps_before + batch + 1:
                emit({"event": "fault", "fault": fault})
                os.kill(os.getpid(), signal.Signals[fault["signal"]])


def _faults(
    config: dict[str, Any], strategy: Any, checkpoints: tfdist.Checkpoints, steps: int
) -> list[_Faults]:
    """Returns the callback that strikes this rank, where one is to be struck.

    Args:
        steps: of an epoch, as callbacks are told of them.
    """
    if "faults" not in config:
        return []
    total = steps * config["epochs"]
    for fault in config["faults"]:
        if fault["step"] > total:
            raise OptionError(
                f"a fault must strike after one of the {total} steps of the training",
                received=f"rank={fault['rank']},step={fault['step']}",
                mend=f"Choose a step of at most {total}, or more epochs",
            )
    own = [fault for fault in config["faults"] if fault["rank"] == strategy.topology.rank]
    return [_Faults(own, checkpoints, steps)] if config["strike"] else []


def train(config: dict[str, Any]) -> None:
    folder = RunFolder(config["output"])
    with tfdist.strategy(config["strategy"], **config["options"]) as strategy:
        emit({"event": "ready", "long": True})
        fitting = Fitting(strategy, config, config["splits"])
        # Above, they would import TensorFlow before import_tensorflow does.
        from tfdist.training.engine.binding import metric_names
        from tfdist.training.loops.data_wait import DataWait

        wait = DataWait()
        use = ResourceUse([Processes(), *meters.of_rank(strategy.topology.local_rank)])
        report = _Report(folder, strategy, wait, use, **fitting.for_rows)
        checkpoints = fitting.checkpoints(folder.checkpoints, resume=config["resume"])
        if "url" in config:
            checkpoints.call(f"{config['url']}/{folder.checkpoints.name}")
        checkpoints.enclose_writing(lambda: _keeping(folder, checkpoints, report, strategy))
        faults = _faults(config, strategy, checkpoints, fitting.feed.callback_steps)
        with use:
            fitted = fitting.fit(
                report,
                checkpoints,
                lambda: folder.best_model,
                traces=lambda: folder.traces,
                first=[wait],
                last=faults,
            )
        if report.diverged is not None:
            if strategy.topology.is_chief:
                kept, row = checkpoints.newest, report.diverged
                told = {"epoch": row["epoch"], "loss": str(row["loss"])}
                emit({"event": "diverged", **told, "checkpoint": kept and str(kept), "long": True})
            return
        test, data = None, fitting.held_out("test")
        if data is not None:
            test = fitting.model.evaluate(data, verbose=0, return_dict=True, callbacks=[report])
        with writing():
            strategy.save(fitting.model, folder.model)
        if strategy.topology.is_chief:
            summary = _summary(config, strategy, metric_names(fitting.model), report, test)
            summary["best"] = fitted.best
            if fitted.stopped_by is not None:
                summary["stopped_by"] = fitted.stopped_by
            if config.get("limit_steps") is not None:
                summary["limit_steps"] = config["limit_steps"]
            write_json(folder.metrics, summary)
            folder.replace_earlier()  # Where no epoch was worth a checkpoint.
    emit({"event": "done", "long": True})  # Engines take seconds to part.


def _summary(
    config: dict[str, Any],
    strategy: Any,
    metric_names: list[str],
    report: _Report,
    test: dict[str, float] | None,
) -> dict[str, Any]:
    rows = read_rows(RunFolder(config["output"]).history)
    last = rows[-1]
    # The first epoch also traces the step, so it tells nothing of the speed of the others.
    timed = report.new_rows[1:] or report.new_rows or rows
    speeds = sorted(timed, key=lambda row: row["samples_per_s"])
    median = speeds[len(speeds) // 2]
    of_time = ("epoch", "seconds", "samples_per_s", "data_wait")
    metrics = {k: v for k, v in last.items() if k not in of_time}
    waits = sorted(row["data_wait"] for row in timed if "data_wait" in row)
    rate = metrics.pop("learning_rate", None)  # A MultiOptimizer has no rate of its own.
    # A model that had nothing left to train, and nothing to be tested on, has made no metrics.
    metric_names = metric_names or [name for name in metrics if not name.startswith("val_")]
    # One with several values has a number for each, see ``numbers``.
    own = {k for k in metrics if k in metric_names or re.sub(r"_\d+$", "", k) in metric_names}
    # A train_step of a user's own may show none of them.
    own = own or {name for name in metrics if not name.startswith("val_")}
    return {
        "strategy": strategy.name,
        "workers": strategy.topology.num_workers,
        "replicas": strategy.num_replicas,
        "global_batch_size": config["global_batch_size"],
        "epochs": int(last["epoch"]),
        "learning_rate": rate,
        "samples_per_s": median["samples_per_s"],
        "epoch_seconds": median["seconds"],
        "data_wait": waits[len(waits) // 2] if waits else None,
        "train": {k: v for k, v in metrics.items() if k in own},
        "validation": {k[4:]: v for k, v in metrics.items() if k.startswith("val_")},
        "test": numbers(test),
        "last_epoch": {
            k: v for k, v in metrics.items() if k not in own and not k.startswith("val_")
        },
    }


if __name__ == "__main__":
    ranks.main(train)
