"""Ends a step that waits too long for the other workers, where the engine would wait for ever."""

from __future__ import annotations

import abc
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import tensorflow as tf

from tfdist.training.engine.collective import Collective

_TICK_S = 0.2
_PAUSE_S = 1.0
# What is done between steps may keep one worker busy alone, as a disk does that is slow.
_LONGER = 10


class StepWatch(tf.keras.callbacks.Callback):
    """Calls ``on_stall`` from a thread of its own when a step takes longer than its deadline.

    Args:
        timeout_s: of a step, in seconds.
        first_timeout_s: of the first step of a loop, which also traces it.
        on_stall: called once, with what is known of the place, "epoch 2, step 17", and with the
            seconds that were waited.
        margin_s: beside each deadline, for the engine's own to come first.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        first_timeout_s: float,
        on_stall: Callable[[str, float], None],
        margin_s: float = 0.0,
    ):
        super().__init__()
        self._timeout_s = timeout_s
        self._first_timeout_s = first_timeout_s
        self._on_stall = on_stall
        self._margin_s = margin_s
        self._limit_s = 0.0
        self._deadline: float | None = None
        self._forgiven_s = 0.0
        #: Of the step that runs, or ran last; empty before the first.
        self.place = ""
        self._epoch = 0
        self._is_first = True
        self._over = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Watches while the block runs."""
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    @contextlib.contextmanager
    def within(self, place: str, more_s: float = 0.0) -> Iterator[None]:
        """Encloses what all workers do together between steps.

        It has ten times as long as a step, and ``more_s``: nobody tells that a worker is only busy.
        """
        before = self.place, self._limit_s, self._deadline
        begun = time.monotonic()
        self._start(place, _LONGER * self._timeout_s + more_s)
        try:
            yield
            self.place = before[0]  # After an error it is still that of the error.
        finally:
            _, self._limit_s, deadline = before
            # The step around it, if there is one, is given the time that this took.
            self._deadline = deadline and deadline + time.monotonic() - begun

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Encloses a loop within a step, as one that a callback runs: it has a watch of its own."""
        deadline, begun = self._deadline, time.monotonic()
        self._deadline = None
        try:
            yield
        finally:
            self._deadline = deadline and deadline + time.monotonic() - begun

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._over.wait(_TICK_S):
            now = time.monotonic()
            paused, before = now - before - _TICK_S, now
            if paused > _PAUSE_S:  # This process did not run: the others waited for it.
                self._forgiven_s += paused
            deadline = self._deadline
            if deadline is not None and now > deadline + self._forgiven_s:
                self._on_stall(self.place, self._limit_s)
                return

    # Keras' hooks -------------------------------------------------------------------------------

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        self._begin(f"epoch {self._epoch + 1}, step {batch + 1}")

    def on_test_begin(self, logs: dict | None = None) -> None:
        self._is_first = True

    def on_test_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        self._begin(f"step {batch + 1} of the evaluation")

    def on_predict_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        self._begin(f"step {batch + 1} of the prediction")

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self._deadline = None
        self._is_first = False

    on_test_batch_end = on_predict_batch_end = on_train_batch_end

    def _begin(self, place: str) -> None:
        self._start(place, self._first_timeout_s if self._is_first else self._timeout_s)

    def _start(self, place: str, limit_s: float) -> None:
        self.place = place
        self._limit_s = limit_s
        self._forgiven_s = 0.0
        self._deadline = time.monotonic() + limit_s + self._margin_s


class WatchedSteps(Collective):
    """Processes that wait for each other in each step, as long as a ``StepWatch`` lets them."""

    _watch: StepWatch | None = None

    @abc.abstractmethod
    def new_watch(self) -> StepWatch:
        """Returns what watches a loop."""

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[StepWatch]]:
        if self.num_processes == 1:
            yield []
            return
        before = self._watch  # A callback may evaluate.
        self._watch = self.new_watch()
        paused = contextlib.nullcontext() if before is None else before.paused()
        with paused, self._watch.running():
            yield [self._watch]
        self._watch = before  # After an error it tells the place.

    def waiting(self, place: str, more_s: float = 0.0) -> contextlib.AbstractContextManager[None]:
        watch = self._watch
        return contextlib.nullcontext() if watch is None else watch.within(place, more_s)

    def told_wait(self, place: str, limit_s: float) -> str:
        """Returns what has stalled, as ``on_stall`` is told of it, in words."""
        return (
            f"rank {self.process} on {socket.gethostname()} has waited for the others in {place} "
            f"for more than {limit_s:.4g} s"
        )
