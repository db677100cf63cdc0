"""What the machine does beside a benchmark: a ratio measured while others compute is worth little.

The two ranks of a job slow down unlike one process does, so others' work does not cancel out.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

# Others may use this much of all cores.
QUIET_SHARE = 0.04
_WAIT_S = 180


def wait_until_quiet() -> None:
    """Returns once others leave the cores alone, or after three minutes."""
    deadline = time.monotonic() + _WAIT_S
    quiet_seconds = 0
    while quiet_seconds < 3 and time.monotonic() < deadline:
        used = psutil.cpu_percent(interval=1) / 100
        quiet_seconds = quiet_seconds + 1 if used <= QUIET_SHARE else 0


def load() -> float:
    """Returns the load average of the last minute."""
    return round(os.getloadavg()[0], 2)


@dataclass
class OthersWatch:
    """Measures, as a context, the share of all cores that other programs took.

    Attributes:
        own_s: returns the seconds of all cores that our own work has taken so far.
        share: 0.0 to 1.0, known when the context is left.
    """

    own_s: Callable[[], float]
    share: float = 0.0

    def __enter__(self) -> OthersWatch:
        self._busy, self._own, self._at = _busy_s(), self.own_s(), time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.monotonic() - self._at
        others = _busy_s() - self._busy - (self.own_s() - self._own)
        self.share = max(0.0, others / (seconds * psutil.cpu_count()))


def of_ended_children() -> float:
    """Returns the seconds that this process and its children, once they have ended, took."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def of_session() -> float:
    """Returns the seconds of the processes of this session: all that the launcher started."""
    session, total = os.getsid(0), 0.0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == session:
                times = process.cpu_times()
                total += times.user + times.system
    return total


def _busy_s() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice
