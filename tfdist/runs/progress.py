"""What is shown of a training while it runs: a bar for the steps, a line for each epoch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfdist.errors import TfdistError
from tfdist.runs.results_text import log, told

# Of an epoch's row: what its line tells in other words, and what only history.csv has.
_TOLD_APART = (
    *("epoch", "seconds", "samples_per_s", "data_wait"),
    *("round_seconds", "bytes_down", "bytes_up"),
)

# A share of the steps' time: below it, other things are worth a look first.
_MUCH = 0.2
_SMALL_SHARD_BYTES = 1 << 20
_KEPT_BYTES = 512 << 20


class Progress:
    """Shows rank 0's events.

    Args:
        epochs: of the whole training.
        bar: a ``rich.progress.Progress`` for the steps; None shows the lines of epochs alone.
        on_event: is called with each event for programs, which logging is told of as well.

    Attributes:
        has_trained: whether an epoch has ended.
        listeners: are called with each event for programs.
        diverged: the event that told of a loss that is not finite; None when there was none.
    """

    def __init__(
        self,
        epochs: int,
        bar: Any = None,
        on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    ):
        self.has_trained = False
        self.diverged: dict[str, Any] | None = None
        self._epochs = epochs
        self.listeners = [on_event]
        self._steps: int | None = None
        self._bar = bar
        self._task = None if bar is None else bar.add_task("starting", total=None)

    def take(self, rank: int, event: dict[str, Any]) -> None:
        if event["event"] == "diverged":
            self.diverged = event
        if rank == 0:
            self._steps = event.get("steps", self._steps)  # A batch that grows makes them fewer.
        public = told(event, rank, self._epochs, self._steps)
        if public is not None:
            log(public)
            for listener in self.listeners:
                listener(public)
        if rank == 0:
            self.has_trained = self.has_trained or event["event"] == "epoch"
            self._show(event)

    def _show(self, event: dict[str, Any]) -> None:
        if event["event"] == "data":
            self._update(description="tracing the first step")
        elif event["event"] == "step":
            what = f"epoch {event['epoch'] + 1}/{self._epochs}"
            if event["step"] is None:
                self._update(description=f"{what} validation")
            else:
                if "samples_per_s" in event:
                    what += f"  {_speed(event, event['samples_per_s'])}"
                self._update(description=what, completed=event["step"], total=self._steps)
        elif event["event"] == "epoch":
            self._update(completed=0)
            print(_epoch_line(event, self._epochs), flush=True)
        elif event["event"] == "evaluated":
            print(_evaluation_line(event["row"]), flush=True)

    def _update(self, **what: Any) -> None:
        if self._bar is not None:
            self._bar.update(self._task, **what)


class Silent(Progress):
    """Notes the same, and shows nothing."""

    def _show(self, event: dict[str, Any]) -> None:
        """Nothing is to be seen."""


def _epoch_line(event: dict[str, Any], epochs: int) -> str:
    row = event["row"]
    values = listed({name: value for name, value in row.items() if name not in _TOLD_APART})
    speed = _speed(event, row["samples_per_s"])
    if row.get("data_wait", 0.0) > _MUCH:
        speed += f"  {row['data_wait']:.0%} of it waiting for data"
    return f"epoch {row['epoch']}/{epochs}  {row['seconds']:.1f} s  {speed}  {values}"


def _speed(event: dict[str, Any], samples_per_s: float) -> str:
    of_step = f"  {event['step_ms']:,.4g} ms/step" if "step_ms" in event else ""
    return f"{samples_per_s:,.0f} samples/s{of_step}"


def _evaluation_line(row: dict[str, float]) -> str:
    values = {name: value for name, value in row.items() if name not in ("epoch", "step")}
    step = f", step {row['step']}" if row["step"] else ""
    return f"evaluated after epoch {row['epoch']}{step}  {listed(values)}"


def listed(values: dict[str, float]) -> str:
    """Returns metrics as one line for people."""
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())


def told_of_waiting(summary: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """Returns lines for people: what share it was, and what to change where it was much.

    Args:
        summary: of the training, as in metrics.json.
        config: what it was asked for.
    """
    share = summary.get("data_wait")
    if share is None:
        return [
            "waiting was not measured: an execution of several steps (steps_per_execution) fetches "
            "its batches itself"
        ]
    lines = [f"steps waited {share:.0%} of their time for data"]
    if share > _MUCH:
        lines.append(f"to wait less: {', or '.join(_remedies(config))}")
    return lines


def _remedies(config: dict[str, Any]) -> list[str]:
    from tfdist.records.format.manifest import load_manifest

    found = ["give each process more cores"]
    if config.get("augment"):
        found.append("change less with --augment")
    try:
        manifest = load_manifest(Path(config["splits"]["train"]).parent)
    except TfdistError:
        return found
    shards = [shard for info in manifest.splits.values() for shard in info.shards]
    images = [feature for feature in manifest.schema.features if feature.is_image]
    if any(feature.reading.size is not None for feature in images):
        found.append("write images in the size they are read in: tfdist shard --write-resized")
    if sum(shard.bytes for shard in shards) < _KEPT_BYTES:
        return found  # After the first epoch nothing is read any more.
    if manifest.compression != "none" and not images:
        found.append("write shards that are not compressed: tfdist shard --compression none")
    if len(shards) > len(manifest.splits) and all(s.bytes < _SMALL_SHARD_BYTES for s in shards):
        found.append("write fewer, larger shards: tfdist shard --num-shards")
    return found
