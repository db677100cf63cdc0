"""The processes of a server that have a model: started, watched, told to leave, ended."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from litserve.utils import WorkerSetupStatus

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_END_S = 2.0
# Of a replica that has told what the user is to mend: another one would tell it again.
_USER_ERROR = 2
# Starts in a row that came to nothing, after which there is no other.
_MOST_FAILED_STARTS = 3


class StartError(Exception):
    """The system gives no process, or no pipe to it."""


@dataclass
class Member:
    """A process.

    Attributes:
        number: its own; none is used twice.
        process: it.
        door: closed, it tells the process to leave. A lock or a queue could be held by one that
            was killed; the end of a pipe cannot.
        until: when it must be ready, or must have left.
    """

    number: int
    process: Any
    door: Connection
    until: float
    is_ready: bool = False
    is_leaving: bool = False
    is_late: bool = False


class Fleet:
    """All processes of a version.

    Args:
        launch: starts the process of a number, which leaves when the given end of a
            pipe is closed on the other side. Raises StartError: it cannot.
        state_of: what LitServe says of the process of a number.
        numbers: of the next processes.
        start_timeout_s: until one must be ready.
        leave_timeout_s: until one must have left: when requests are given up.
    """

    def __init__(
        self,
        launch: Callable[[int, Connection], Any],
        state_of: Callable[[int], Any],
        numbers: Iterator[int],
        start_timeout_s: float,
        leave_timeout_s: float,
    ):
        self._launch, self._state_of, self._numbers = launch, state_of, numbers
        self._start_timeout_s, self._leave_timeout_s = start_timeout_s, leave_timeout_s
        self._members: dict[int, Member] = {}
        self._failed_starts = 0  # In a row.

    def ready(self) -> list[Member]:
        """Returns those that take requests."""
        return [m for m in self.present() if m.is_ready]

    def present(self) -> list[Member]:
        """Returns those that take requests, or will."""
        return [m for m in self._members.values() if not m.is_leaving]

    @property
    def is_empty(self) -> bool:
        """Whether all have ended, and those that were told to."""
        return not self._members

    @property
    def may_start(self) -> bool:
        """Whether another one is started where it is wanted."""
        return self._failed_starts < _MOST_FAILED_STARTS

    def follow(self, wanted: int) -> None:
        """Starts what is missing, or has those leave that are too many: first who loads."""
        present = sorted(self.present(), key=lambda member: not member.is_ready)
        missing = max(0, wanted - len(present)) if self.may_start else 0
        if self._failed_starts:  # One by one then, so that a peak alone does not end all starting.
            missing = min(missing, int(all(member.is_ready for member in present)))
        self.start(missing)
        # Nobody would come after the last one.
        self.leave(present[wanted if self.may_start else max(1, wanted) :])

    def start(self, count: int) -> None:
        # They are not to hear what is sent to the whole group: they answer what they have.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            for _ in range(count):
                number = next(self._numbers)
                inside, door = multiprocessing.Pipe(duplex=False)
                with inside:
                    try:
                        process = self._launch(number, inside)
                    except StartError:
                        door.close()
                        self._failed_starts += 1
                        break
                until = time.monotonic() + self._start_timeout_s
                self._members[number] = Member(number, process, door, until)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def leave(self, members: list[Member]) -> None:
        """Has processes take no more requests, answer what they have, and end."""
        for member in members:
            member.is_leaving = True
            member.until = time.monotonic() + self._leave_timeout_s
            member.door.close()

    def look(self) -> list[Member]:
        """Returns those that have ended since the last look, and not as they were told to."""
        lost = []
        for member in list(self._members.values()):
            if not (member.is_ready or member.is_leaving):
                state = self._state_of(member.number)
                member.is_ready = state == WorkerSetupStatus.READY
                if member.is_ready:
                    self._failed_starts = 0
            has_to = member.is_leaving or not member.is_ready
            if has_to and time.monotonic() > member.until:
                member.is_late = True
                member.process.kill()
                member.process.join(_END_S)
            if not member.process.is_alive():
                member.is_ready |= self._state_of(member.number) == WorkerSetupStatus.READY
                del self._members[member.number]
                member.door.close()
                if not (member.is_ready or member.is_leaving):
                    is_told = member.process.exitcode == _USER_ERROR
                    self._failed_starts += _MOST_FAILED_STARTS if is_told else 1
                # One that was told to leave while it loaded is killed when its time is over.
                if not member.is_leaving or (member.process.exitcode and member.is_ready):
                    lost.append(member)
        return lost

    def end(self) -> None:
        """Ends all."""
        for member in self._members.values():
            member.door.close()
        deadline = time.monotonic() + _END_S
        for member in self._members.values():
            member.process.join(max(0.0, deadline - time.monotonic()))
            member.process.kill()
            member.process.join()
