"""Says that a first step traces the model, and for how long: until then nothing else is shown."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

# A line after so many seconds, and whenever the time has doubled since.
_FIRST_LINE_S = 5.0

# Keras' step functions that have been run.
_TRACED: weakref.WeakSet = weakref.WeakSet()


def _say(text: str) -> None:
    print(text, flush=True)


class TracingNotice(tf.keras.callbacks.Callback):
    """Prints a line once a first step takes more than a few seconds, and how long it took.

    Later steps, and those of a later call of the same model, trace nothing and say nothing.
    Whoever calls Keras' loop encloses it with ``closing``.

    Args:
        first_line_s: seconds before the first line; None: five.
        say: prints a line.
    """

    # Keras would else bring the logs of each step to the host for it.
    _supports_tf_logs = True

    def __init__(self, *, first_line_s: float | None = None, say: Callable[[str], None] = _say):
        super().__init__()
        self._first_line_s = _FIRST_LINE_S if first_line_s is None else first_line_s
        self._say = say
        self._over: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        self._begin(self.model.train_function, "training")

    def on_test_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        self._begin(self.model.test_function, "evaluation")

    def on_predict_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        self._begin(self.model.predict_function, "prediction")

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self.end()

    on_test_batch_end = on_predict_batch_end = on_train_batch_end

    def _begin(self, function: Any, loop: str) -> None:
        if function is None or function in _TRACED:  # Engines may have steps of their own.
            return
        _TRACED.add(function)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell, args=(self._over, loop), daemon=True)
        self._thread.start()

    def _tell(self, over: threading.Event, loop: str) -> None:
        step = f"the first step of {loop}"
        begun = time.monotonic()
        for doubled in itertools.count():
            until = begun + self._first_line_s * 2**doubled
            if over.wait(until - time.monotonic()):
                break
            seconds = time.monotonic() - begun
            self._say(f"tfdist: tracing {step} of '{self.model.name}' for {seconds:.0f} s so far")
        if doubled:
            seconds = time.monotonic() - begun
            self._say(f"tfdist: {step} took {seconds:.0f} s with its tracing, which comes once")

    def end(self) -> None:
        """Says how long it took, if anything was said before."""
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self._over = self._thread = None


@contextlib.contextmanager
def closing(callbacks: Sequence[Any]) -> Iterator[None]:
    """Encloses a loop of Keras: a step that fails or is broken off ends what is said of it."""
    try:
        yield
    finally:
        for callback in callbacks:
            if isinstance(callback, TracingNotice):
                callback.end()
