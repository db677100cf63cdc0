"""A version of the model that is served: its queue, its replicas, and what these are asked.

Each has a queue of its own, so that no batch and no answer is of two.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from litserve.utils import ResponseBufferItem

from tfdist.errors import notice
from tfdist.serving.fleet import Fleet
from tfdist.serving.queues import Sender
from tfdist.serving.served import Served


class State(StrEnum):
    """What TensorFlow Serving calls it."""

    LOADING = "LOADING"
    AVAILABLE = "AVAILABLE"
    UNLOADING = "UNLOADING"
    END = "END"


@dataclass
class Pending:
    """A request without an answer so far.

    Attributes:
        records: of it; None: it asks what the outputs are.
        version: which has it.
        is_pinned: whether no other version may answer.
        item: where LitServe puts the answer.
        is_repeated: whether a replica was lost that had taken it.
    """

    records: list[bytes] | None
    version: Version
    is_pinned: bool
    item: ResponseBufferItem = field(default_factory=lambda: ResponseBufferItem(asyncio.Event()))
    is_repeated: bool = False


#: Requests by their uids, and whether a replica had taken them.
Lost = list[tuple[str, Pending, bool]]


class Version:
    """A version, with its replicas.

    Args:
        number: its own.
        served: what it answers with.
        queue: where its replicas find requests.
        fleet: its replicas, none of them started.

    Attributes:
        state: which a status tells.
        error: why it is not served.
        wanted: how many replicas there are to be; None: a lost one is not replaced.
        sender: puts requests into the queue.
        pending: the requests that it has.
    """

    def __init__(self, number: int, served: Served, queue: Any, fleet: Fleet):
        self.number, self.served, self.queue, self.fleet = number, served, queue, fleet
        self.sender = Sender(queue)
        self.state, self.error = State.LOADING, ""
        self.wanted: int | None = None
        self.pending: dict[str, Pending] = {}

    @property
    def replicas(self) -> int:
        """How many processes answer."""
        return len(self.fleet.ready())

    @property
    def can_answer(self) -> bool:
        """Whether a replica answers, or one will."""
        may_start = self.wanted is not None and self.fleet.may_start
        return may_start or bool(self.fleet.present())

    def look(self) -> Lost:
        """Looks after the replicas. Returns the requests that must be put into a queue once more.

        Raises OSError, EOFError: the process that holds the queue is no more.
        """
        lost = self.fleet.look()
        taken: set[str] = set()
        for member in lost:
            code = member.process.exitcode
            notice(f"replica {member.number} ended with code {code}; {self.replicas} left")
            taken.update(self.queue.end(member.number))
        can_answer = self.can_answer
        # What none has taken waits for those that are left, if there are any.
        found = [
            (uid, pending, uid in taken)
            for uid, pending in self.pending.items()
            if not pending.item.event.is_set() and (uid in taken or not can_answer)
        ]
        if self.wanted is not None:
            self.fleet.follow(self.wanted)
        return found

    def retire(self) -> bool:
        """Has the replicas leave when nobody waits for them. Returns whether all have left."""
        if not self.pending:
            self.fleet.leave(self.fleet.present())
        if not self.fleet.is_empty:
            return False
        if self.served.weights != self.served.file:
            self.served.weights.unlink(missing_ok=True)
        return True

    def status(self) -> dict[str, Any]:
        """Returns what a status tells of it."""
        code = "UNKNOWN" if self.error else "OK"
        status = {"error_code": code, "error_message": self.error}
        return {"version": str(self.number), "state": self.state, "status": status}


class Versions:
    """All versions of a server.

    Attributes:
        current: the one that answers.
        present: it, and those that are coming or leaving.
    """

    def __init__(self) -> None:
        self.current: Version
        self.present: list[Version] = []
        # The last one that came to nothing, until another one comes to something.
        self._refused: Version | None = None

    def switch(self, version: Version) -> None:
        """Has a version answer from now on; that before it answers what it has, and leaves."""
        if self.present != [version]:
            self.current.state, self.current.wanted = State.UNLOADING, None
        self.current, self._refused = version, None
        version.state = State.AVAILABLE

    def refuse(self, version: Version, why: str) -> None:
        """Gives up a version that was to come."""
        version.state, version.wanted, version.error = State.END, None, why
        self._refused = version

    def retire(self) -> None:
        """Has those leave that are to, when nobody waits for them."""
        is_over = (State.UNLOADING, State.END)
        self.present = [v for v in self.present if v.state not in is_over or not v.retire()]

    def status(self, number: int | None) -> list[dict[str, Any]]:
        """Returns a ModelVersionStatus of TensorFlow Serving's of each, or of one, newest first."""
        told = {version.number: version for version in self.present}
        if self._refused is not None:
            told[self._refused.number] = self._refused
        return [told[n].status() for n in sorted(told, reverse=True) if number in (None, n)]
