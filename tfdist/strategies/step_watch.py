"""Ends a step that waits too long for the other workers, where the engine would wait for ever."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import tensorflow as tf

_TICK_S = 0.2
_PAUSE_S = 1.0


class StepWatch(tf.keras.callbacks.Callback):
    """Calls ``on_stall`` from a thread of its own when a step takes longer than its deadline.

    Args:
        timeout_s: of a step, in seconds.
        first_timeout_s: of the first step of a loop, which also traces it.
        on_stall: called once, with what is known of the place: "epoch 2, step 17".
    """

    def __init__(
        self, *, timeout_s: float, first_timeout_s: float, on_stall: Callable[[str], None]
    ):
        super().__init__()
        self._timeout_s = timeout_s
        self._first_timeout_s = first_timeout_s
        self._on_stall = on_stall
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
    def within(self, place: str) -> Iterator[None]:
        """Encloses what all workers do together beside steps, which has the deadline of a step."""
        before = self.place, self._deadline
        self._start(place, self._timeout_s)
        try:
            yield
        finally:
            self.place, self._deadline = before

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._over.wait(_TICK_S):
            now = time.monotonic()
            paused, before = now - before - _TICK_S, now
            if paused > _PAUSE_S:  # This process did not run: the others waited for it.
                self._forgiven_s += paused
            deadline = self._deadline
            if deadline is not None and now > deadline + self._forgiven_s:
                self._on_stall(self.place)
                return

    # Keras' hooks -------------------------------------------------------------------------------

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        self._begin(f"epoch {self._epoch + 1}, step {batch + 1}")

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self._end()

    def on_test_begin(self, logs: dict | None = None) -> None:
        self._is_first = True

    def on_test_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        self._begin(f"step {batch + 1} of the evaluation")

    def on_test_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self._end()

    def on_predict_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        self._begin(f"step {batch + 1} of the prediction")

    def on_predict_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self._end()

    def _begin(self, place: str) -> None:
        self._start(place, self._first_timeout_s if self._is_first else self._timeout_s)

    def _start(self, place: str, limit_s: float) -> None:
        self.place = place
        self._forgiven_s = 0.0
        self._deadline = time.monotonic() + limit_s

    def _end(self) -> None:
        self._deadline = None
        self._is_first = False
