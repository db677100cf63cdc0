"""MLflow and Weights & Biases: what a training is told of goes there too.

They run in the process that starts the ranks: once, whatever the number of ranks, and through all
restarts. What fails there is told once, and ends no training.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from tfdist.errors import OptionError, TfdistError, extra_module, first_line
from tfdist.runs.progress import Progress
from tfdist.training.engine.failure_notices import ToldOnce

_EXPERIMENT = "tfdist"


class _Mlflow:
    def __init__(self, uri: str, name: str, settings: dict[str, Any]):
        self._mlflow = mlflow = extra_module("mlflow", "mlflow", "--mlflow", "mlflow")
        if uri:
            mlflow.set_tracking_uri(uri)
        if not _is_set("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
            mlflow.set_experiment(_EXPERIMENT)
        mlflow.start_run(run_name=name)
        mlflow.log_params({key: str(value)[:500] for key, value in settings.items()})

    def log(self, numbers: dict[str, float], step: int) -> None:
        self._mlflow.log_metrics(numbers, step=step)

    def end(self, *, failed: bool) -> None:
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


class _Wandb:
    def __init__(self, project: str, name: str, settings: dict[str, Any]):
        wandb = extra_module("wandb", "wandb", "--wandb", "wandb")
        default = None if _is_set("WANDB_PROJECT") else _EXPERIMENT
        self._run = wandb.init(project=project or default, name=name, config=settings)

    def log(self, numbers: dict[str, float], step: int) -> None:
        self._run.log(numbers, step=step)

    def end(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


_TRACKERS = {"mlflow": _Mlflow, "wandb": _Wandb}


def _is_set(*names: str) -> bool:
    return any(name in os.environ for name in names)


@contextlib.contextmanager
def tracked(config: dict[str, Any], progress: Progress) -> Iterator[dict[str, float]]:
    """Encloses a training. Gives a dict for what is known at its end, such as "test_loss".

    Args:
        config: what was asked for; "mlflow" and "wandb" name where, "" is where each decides
            itself, None leaves it out.

    Raises:
        EngineMissingError: the tracker's package is not installed.
        OptionError: its run cannot begin.
    """
    settings = {key: value for key, value in config.items() if value is not None}
    name = PurePosixPath(config["output"]).name
    last: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        for kind, begin in _TRACKERS.items():
            place = config.get(kind)
            if place is None:
                continue
            try:
                tracker = begin(place, name, settings)
            except TfdistError:
                raise
            except Exception as error:  # Whatever a client of a service raises.
                raise OptionError(
                    f"--{kind} must name a place where a run can begin",
                    received=f"{place!r}, of which {kind} says: {error}",
                    mend=f"Check that {kind} is reached from here, or leave --{kind} out",
                ) from error
            run = _Run(kind, tracker)
            progress.listeners.append(run.take)
            stack.push(lambda error, *rest, run=run: run.end(error is not None, last))
        yield last


class _Run:
    def __init__(self, name: str, tracker: _Mlflow | _Wandb):
        self._name = name
        self._tracker = tracker
        self._epoch = 0
        self._failures = ToldOnce()

    def take(self, event: dict[str, Any]) -> None:
        if event["event"] == "epoch":
            self._epoch = event["epoch"]
            times = {
                key: event[key] for key in ("seconds", "samples_per_s", "data_wait") if key in event
            }
            self._log({**event["metrics"], **times})

    def end(self, failed: bool, last: dict[str, float]) -> None:
        if last:
            self._log(last)
        with self._told():
            self._tracker.end(failed=failed)

    def _log(self, numbers: dict[str, float]) -> None:
        with self._told():
            finite = {key: value for key, value in numbers.items() if math.isfinite(value)}
            self._tracker.log(finite, self._epoch)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            reason = first_line(error)
            self._failures.failed(f"{self._name} has failed, and the training goes on: {reason}")
