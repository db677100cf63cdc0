"""The open lines between the chief and its tasks: who is there, who is gone, who is silent.

gRPC tells neither in time: a stopped process looks like a slow one, and a server task never learns
that its chief has died. So each task holds the connection open on which it met the chief, and says
a word on it every second. The chief waits for the engine, but not for ever, nor for a task that is
gone.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tfdist.errors import LaunchError
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


# A dead task's line ends a moment before or after gRPC's own error about it, and a stopped one may
# have given a sign of life after the call that it holds up began.
_SETTLE_S = 2.0

_RESUME = (
    "Go on from the last checkpoint: tfdist.Checkpoints(folder, resume=True); --max-restarts of "
    "tfdist train and launch does"
)


class _Caller:
    """A thread that makes one call after the other; not a pool, for whose threads Python would
    wait at the end, and these may hang."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._make_calls, daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> concurrent.futures.Future:
        future: concurrent.futures.Future = concurrent.futures.Future()
        self._calls.put((future, call))
        return future

    def _make_calls(self) -> None:
        while True:
            future, call = self._calls.get()
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del future, call  # They would live until the next call.


class Watch:
    """Makes the engine's calls, any of which may hang, from other threads, and watches the tasks.

    Args:
        tasks: all tasks of the cluster.
        stall_timeout_s: how long a task may be silent, and a call may take.
        first_timeout_s: how long a call may take that also traces.
    """

    def __init__(
        self, lines: Lines, tasks: Sequence[Task], *, stall_timeout_s: float, first_timeout_s: float
    ):
        self._lines = lines
        self._servers = [task for task in tasks if task.role == "ps"]
        self._workers = [task for task in tasks if task.role == "worker"]
        self._stall_timeout_s = stall_timeout_s
        self._first_timeout_s = first_timeout_s
        self._told: set[int] = set()
        #: What ended the cluster; nothing is asked of it any more.
        self.broken: LaunchError | None = None
        self._caller, self._fetcher = _Caller(), _Caller()

    def fetch(self, call: Callable[[], Any]) -> concurrent.futures.Future:
        """Has ``call``, which waits for a step, made after those that wait for the steps before."""
        return self._fetcher.submit(call)

    def call(self, call: Callable[[], Any], what: str, *, is_first: bool = False) -> Any:
        """Returns what ``call`` returns; see ``result``."""
        return self.result(self._caller.submit(call), what, is_first=is_first)

    def result(
        self, future: concurrent.futures.Future, what: str, *, is_first: bool = False
    ) -> Any:
        """Returns the result of a call.

        Args:
            what: what is waited for, in words.
            is_first: whether the call also traces.

        Raises:
            LaunchError: a parameter server or all workers are lost, a task is silent for longer
                than the deadline, or the call takes longer.
        """
        begun = time.monotonic()
        limit = self._first_timeout_s if is_first else self._stall_timeout_s
        while not concurrent.futures.wait([future], timeout=_TICK_S).done:
            self.check()
            # A task that has stopped since the call began is to be named as silent first.
            if time.monotonic() - begun > limit + _SETTLE_S:
                self._end(
                    f"a step must end within {limit:g} s",
                    f"that {what} takes longer, with all tasks there",
                    "Raise --stall-timeout (stall_timeout_s) if a step is meant to take so long",
                )
        return future.result()

    def check(self) -> None:
        """Raises:
        LaunchError: a parameter server or all workers are lost, or a task is silent too long.
        """
        if self.broken is not None:
            raise self.broken
        lost = self._lines.lost
        gone = [task for task in self._servers if task.rank in lost]
        if gone:
            self._end(
                "all parameter servers must stay, since each holds a part of the weights",
                f"that {', '.join(map(str, gone))} is gone",
                _RESUME,
            )
        for task in self._workers:
            if task.rank in lost - self._told:
                self._told.add(task.rank)
                print(f"tfdist: {task} is lost; the others take over its steps", flush=True)
        if lost >= {task.rank for task in self._workers}:
            self._end("a job must have at least one worker", "none left", _RESUME)
        for task in (*self._workers, *self._servers):
            silence = self._lines.silence(task.rank)
            if task.rank not in lost and silence > self._stall_timeout_s:
                self._end(
                    f"every task must give a sign of life within {self._stall_timeout_s:g} s",
                    f"{task} silent for {silence:.0f} s",
                    f"Look for what has stopped that process. {_RESUME}",
                )

    @property
    def has_lost_a_worker(self) -> bool:
        return bool(self._told)

    def explain(self, error: Exception) -> LaunchError | None:
        """Returns which task is lost or silent, where that has caused ``error``."""
        until = time.monotonic() + _SETTLE_S
        while time.monotonic() < until:
            try:
                self.check()
            except LaunchError as cause:
                return cause
            time.sleep(_TICK_S)
        return None

    def _end(self, rule: str, received: str, mend: str) -> None:
        self.broken = LaunchError(rule, received=received, mend=mend)
        raise self.broken
