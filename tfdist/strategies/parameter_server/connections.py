"""The open lines between the chief and its tasks: who is there, who is gone, who is silent.

gRPC tells neither in time: a stopped process looks like a slow one, and a server task never learns
that its chief has died. So each task holds the connection open on which it met the chief, and says
a word on it every second.
"""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
import threading
import time
from dataclasses import dataclass

from tfdist.topology import Topology

_BEAT_S = 1.0
_TICK_S = 0.2
_BEAT = b"."
_BYE = b"bye"


@dataclass(frozen=True)
class Task:
    """One process of the cluster; ``index`` counts those of its role."""

    rank: int
    role: str
    index: int
    address: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.role} {self.index} at {self.address})"


def tasks_of(place: Topology) -> list[Task]:
    """Returns the tasks of a cluster in the order of ranks."""
    return [
        Task(rank, role, place.roles[:rank].count(role), address)
        for rank, (role, address) in enumerate(zip(place.roles, place.addresses, strict=True))
    ]


class Lines:
    """The chief's end of the lines; a thread of its own listens.

    Args:
        lines: rank -> the line to it.
    """

    def __init__(self, lines: dict[int, socket.socket]):
        self._lines = lines
        self._lost: set[int] = set()
        self._looked_at = time.monotonic()
        self._heard_at = dict.fromkeys(lines, self._looked_at)
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def lost(self) -> set[int]:
        """The ranks whose processes have ended."""
        return set(self._lost)

    def silence(self, rank: int) -> float:
        """Returns for how many seconds nothing has come from ``rank``."""
        # Counted to the last look: after a pause of this process what has come is unread as yet.
        return self._looked_at - self._heard_at[rank]

    def say_goodbye(self) -> None:
        """Tells all tasks to end. The lines stay open until this process does."""
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.sendall(_BYE)

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, line in self._lines.items():
                selector.register(line, selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(_TICK_S)
                now = time.monotonic()
                for key, _ in ready:
                    if _received(key.fileobj):
                        self._heard_at[key.data] = now
                    else:
                        selector.unregister(key.fileobj)
                        self._lost.add(key.data)
                self._looked_at = now


def stay_until_goodbye(line: socket.socket) -> bool:
    """Serves as a task's end of its line to the chief, until that ends.

    Returns:
        Whether the chief has said goodbye; False when it has died.
    """
    while True:
        try:
            line.sendall(_BEAT)
        except OSError:
            return False
        if select.select([line], [], [], _BEAT_S)[0]:
            return _received(line) == _BYE


def _received(line: socket.socket) -> bytes:
    """Returns what has come; nothing when the other end is gone."""
    try:
        return line.recv(4096)
    except OSError:
        return b""
