"""``tfdist.tune``: the loop of a search. It starts trials, and decides which of them go on."""

from __future__ import annotations

import contextlib
import math
import selectors
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tfdist import errors
from tfdist.errors import LaunchError, OptionError, TfdistError, unknown_choice
from tfdist.launch.failure import ending
from tfdist.runs.files import read_rows
from tfdist.runs.folder import RunFolder
from tfdist.tuning import on_ray, slots
from tfdist.tuning.folder import SearchFolder
from tfdist.tuning.request import Request
from tfdist.tuning.rows import STATES, TrialRow
from tfdist.tuning.slots import Running
from tfdist.tuning.space import TRAIN
from tfdist.tuning.study import DEFINED, REASON, Study


class Searching:
    """A search that runs in a folder which is taken.

    Args:
        data: the folder of shards of each training of a trial.
        on_change: is called with a trial that has changed.
    """

    def __init__(
        self,
        request: Request,
        folder: SearchFolder,
        study: Study,
        data: list[str],
        on_change: Callable[[TrialRow], None],
    ):
        self._request = request
        self._folder = folder
        self._study = study
        self._data = data
        self._on_change = on_change
        self._metric = request.monitor["monitor"]
        self._running: dict[int, Running] = {}
        # What trials have come to since the last rung: trial -> epoch -> value of each fold.
        self._seen: dict[int, dict[int, list[float]]] = {}
        self._targets: dict[int, int] = {}
        self._lost: set[int] = set()  # Trials that have lost a node once.
        self._has_failed = False

    @property
    def rows(self) -> list[TrialRow]:
        return [self._row(number) for number in range(len(self._study.trials))]

    def run(self) -> None:
        """Runs all trials to their ends, those first that were running in an earlier process.

        Raises:
            TfdistError: a trial failed before any had an epoch, so that others would, too; beside
                others that run, the second one.
        """
        trials = self._study.trials
        waiting = deque(each.number for each in trials if each.state.name == "RUNNING")
        place: Any = contextlib.nullcontext(slots)  # This machine, as that module has it.
        if self._request.search.on == "ray":
            place = on_ray.connected(self._request.where.start_timeout_s)
        with place as self._place:
            self._run_all(waiting)

    def _run_all(self, waiting: deque[int]) -> None:
        search, workers = self._request.search, self._request.where.workers or 1
        free = self._place.divided(search.parallel, workers)
        try:
            with selectors.DefaultSelector() as selector:
                while True:
                    while free and (number := self._next(waiting)) is not None:
                        self._begin(number, free.pop(0), selector, free)
                    if not self._running:
                        return
                    for key, _ in selector.select():
                        self._hear(key.data, selector, free)
        except BaseException as error:
            is_terminated = isinstance(error, SystemExit)
            number = signal.SIGTERM if is_terminated else signal.SIGINT
            slots.end(self._running.values(), number)
            if isinstance(error, OptionError) and not self._have_trained():
                self._folder.remove_trials()  # They can neither be gone on with nor compared.
            raise

    def _next(self, waiting: deque[int]) -> int | None:
        if waiting:
            return waiting.popleft()
        has_all = len(self._study.trials) >= self._request.search.trials
        return None if has_all else self._study.ask()

    def _begin(
        self, number: int, slot: Any, selector: selectors.BaseSelector, free: list[Any]
    ) -> None:
        """Starts what a trial has to do next, where it has."""
        trial = self._study.trials[number]
        request, last = self._request, trial.last_step or 0
        if last >= request.settings.epochs:  # The process that saw it come there was killed.
            self._complete(number, trial.intermediate_values[last])
            free.append(slot)
            return
        asked = {"in_shell": errors.in_shell}
        if request.space is None and DEFINED not in trial.user_attrs:
            asked |= {"journal": str(self._folder.journal), "model": request.model}
            asked |= {"study": self._study.settings, "number": number}
        else:
            target = next(rung for rung in request.rungs if rung > last)
            self._targets[number] = target
            asked |= {"configs": self._configs(number, target)}
            asked |= {"where": asdict(request.where), "max_restarts": request.max_restarts}
        self._on_change(self._row(number))
        running = self._place.start(number, asked, slot, self._folder.log(number))
        self._running[number] = running
        selector.register(running.process.stdout, selectors.EVENT_READ, running)

    def _configs(self, number: int, target: int) -> list[dict[str, Any]]:
        of_model, of_training = self.chosen(number)
        folders = self._folders(number)
        return [
            self._request.training(number, of_model, of_training, data, path, target)
            for data, path in zip(self._data, folders, strict=True)
        ]

    def chosen(self, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns what a trial was given: for the model, and for the training."""
        if self._request.space is None:
            return {"trial": dict(self._study.trials[number].params)}, {}
        trial = self._study.trials[number]
        if trial.state.name == "RUNNING":
            return self._request.space.suggested(self._study.trial(number))
        start, chosen = f"{TRAIN}.", trial.params.items()
        of_model = {name: value for name, value in chosen if not name.startswith(start)}
        of_training = {k.removeprefix(start): v for k, v in chosen if k.startswith(start)}
        return of_model, of_training

    def _folders(self, number: int) -> list[Path]:
        """Returns where a trial trains: one folder, or one for each fold."""
        place = self._folder.trial(number)
        if self._request.search.folds is None:
            return [place]
        return [place / f"fold-{fold}" for fold in range(len(self._data))]

    def _hear(self, running: Running, selector: selectors.BaseSelector, free: list[Any]) -> None:
        told = running.events()
        for event in told or ():
            running.last = event
            if event["event"] == "epoch":
                self._take_epoch(running.number, event)
        if told is None:
            selector.unregister(running.process.stdout)
            running.process.stdout.close()
            code = running.process.wait()
            del self._running[running.number]
            if self._goes_on(running, code):
                self._begin(running.number, running.slot, selector, free)
            else:
                free.append(running.slot)

    def _take_epoch(self, number: int, event: dict[str, Any]) -> None:
        metrics = event["metrics"]
        if self._metric not in metrics:
            raise unknown_choice("metric", self._metric, list(metrics))
        seen = self._seen.setdefault(number, {}).setdefault(event["epoch"], [])
        seen.append(float(metrics[self._metric]))
        self._on_change(self._row(number))

    def _goes_on(self, running: Running, code: int | None) -> bool:
        """Notes what a process has come to; whether its trial goes on."""
        number, last = running.number, running.last
        kind = last.get("event")
        self._seen.pop(number, None)
        target = self._targets.pop(number, None)
        if kind == "done" and target is None:
            return True  # All is chosen: it trains.
        if kind == "done":
            values = self._values(number)
            may_go_on = self._study.note(number, values)
            epoch = max(values)
            if epoch < target or target == self._request.settings.epochs:
                self._complete(number, values[epoch])
            elif not math.isfinite(values[epoch]) or not may_go_on:
                self._end(number, "PRUNED")
            else:
                return True
            return False
        if kind == "diverged":  # As bad as can be, which the next ones learn from.
            self._study.trial(number).set_user_attr(REASON, last["text"])
            self._end(number, "PRUNED")
            return False
        if code is None and kind != "failed" and number not in self._lost:
            self._lost.add(number)
            return True  # From its checkpoint, on another node.
        told = last["text"] if kind == "failed" else _how_ended(code)
        # The first to fail may be alone in that: others that run show it.
        may_be_alone = self._running and not self._has_failed
        if not (may_be_alone or self._have_trained()):
            raise self._all_would_fail(told, kind == "failed", number)
        self._has_failed = True
        self._study.trial(number).set_user_attr(REASON, told)
        self._end(number, "FAIL")
        return False

    def _have_trained(self) -> bool:
        """Whether a trial has had an epoch that can be compared, be it before its first rung."""
        trials = self._study.trials
        return (
            any(each.intermediate_values for each in trials)
            or any(self._seen.values())
            or any(
                self._metric in row
                for each in trials
                for path in self._folders(each.number)
                for row in read_rows(RunFolder(path).history)
            )
        )

    def _all_would_fail(self, told: str, is_whole: bool, number: int) -> TfdistError:
        log = self._folder.log(number)
        if is_whole:
            return TfdistError(f"{told} What its processes have printed is in {log}")
        return LaunchError(
            "the first trial must train", received=told, mend=f"Read what it has printed: {log}"
        )

    def _values(self, number: int) -> dict[int, float]:
        """Returns the metric by epoch, the mean of folds: early stopping may have ended some."""
        folds = [
            [row[self._metric] for row in read_rows(RunFolder(path).history)]
            for path in self._folders(number)
        ]
        epochs = range(1, max(map(len, folds)) + 1)
        return {
            epoch: sum(rows[min(epoch, len(rows)) - 1] for rows in folds) / len(folds)
            for epoch in epochs
        }

    def _complete(self, number: int, value: float) -> None:
        """Ends a trial that has come to its last epoch; Optuna takes finite values alone."""
        self._end(number, *(("COMPLETE", value) if math.isfinite(value) else ("PRUNED",)))

    def _end(self, number: int, state: str, value: float | None = None) -> None:
        self._study.end(number, state, value)
        self._on_change(self._row(number))

    def _row(self, number: int) -> TrialRow:
        trial = self._study.trials[number]
        epoch, seen = trial.last_step, self._seen.get(number)
        value = trial.intermediate_values.get(epoch)
        if seen:
            epoch = max(seen)
            value = sum(seen[epoch]) / len(seen[epoch])
        state, reason = STATES[trial.state.name], trial.user_attrs.get(REASON)
        return TrialRow(number, state, epoch, value, dict(trial.params), reason)


def _how_ended(code: int | None) -> str:
    if code is None:
        return "the node that it ran on was lost, and then the one that it was tried on again"
    return f"its process ended with {ending(code)}"
