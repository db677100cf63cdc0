"""How long workers have nothing to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Idle:
    """Adds up the time in which workers have no step.

    Args:
        num_workers: that take steps; of more steps than that, some wait for a worker.
        clock: tells the seconds.
    """

    def __init__(self, num_workers: int, clock: Callable[[], float] = time.monotonic):
        self._num_workers = num_workers
        self._clock = clock
        self._lock = threading.Lock()
        self._steps = 0
        self._seconds = 0.0
        self._counted_at = clock()

    def begin(self) -> None:
        """Tells that a step is on its way."""
        self._count(1)

    def end(self) -> None:
        """Tells that a step has ended; from any thread."""
        self._count(-1)

    def seconds(self) -> float:
        """Returns the seconds that a worker had no step until now, on average of all workers."""
        self._count(0)
        return self._seconds

    def _count(self, more_steps: int) -> None:
        with self._lock:
            now = self._clock()
            idle = max(0, self._num_workers - self._steps)
            self._seconds += (now - self._counted_at) * idle / self._num_workers
            self._counted_at = now
            self._steps += more_steps
