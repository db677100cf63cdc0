"""What is shown of a training while it runs: a bar for the steps, a line for each epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdist.runs.data_wait import MUCH
from tfdist.runs.results_text import log, told

# Of an epoch's row: what its line tells in other words, and what only history.csv has.
_TOLD_APART = (
    *("epoch", "seconds", "samples_per_s", "data_wait"),
    *("round_seconds", "bytes_down", "bytes_up"),
)


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
    if row.get("data_wait", 0.0) > MUCH:
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
