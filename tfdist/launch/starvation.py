"""How long processes were kept from a core that they wanted: no silence of their own making."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable

_NANOSECONDS = 1e-9


class Starvation:
    """Watches processes of this machine, with all that they have started."""

    def __init__(self) -> None:
        self._waited: dict[int, int] | None = None

    def since_last(self, pids: Iterable[int]) -> float:
        """Returns for how many seconds one of their threads has waited for a core.

        Since the call before this one: infinite, so unknown, in the first one. 0 for threads that
        are new, and where the kernel does not tell. The longest of all threads counts: the others
        wait for that one.
        """
        before = self._waited
        self._waited = {tid: time for pid in pids for tid, time in _waited_by_threads(pid)}
        if before is None:
            return math.inf
        grown = [time - before.get(tid, time) for tid, time in self._waited.items()]
        return max(grown, default=0) * _NANOSECONDS


def _waited_by_threads(pid: int) -> list[tuple[int, int]]:
    """Returns thread -> nanoseconds, of a process and its descendants."""
    import psutil  # here, because few jobs are ever silent

    found = []
    with contextlib.suppress(psutil.Error):
        own = psutil.Process(pid)
        for process in (own, *own.children(recursive=True)):
            # A thread may end at any time.
            with contextlib.suppress(OSError, ValueError, IndexError):
                for tid in os.listdir(f"/proc/{process.pid}/task"):
                    with open(f"/proc/{process.pid}/task/{tid}/schedstat") as file:
                        found.append((int(tid), int(file.read().split()[1])))
    return found
