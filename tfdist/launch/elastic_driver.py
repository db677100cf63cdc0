"""Drives an elastic Horovod job: ``python -m tfdist.launch.elastic_driver SETTINGS -- COMMAND...``.

A worker asks to meet, and waits; when all that are there have asked, each gets its rank, and
Horovod connects them. Between two meetings they work. Horovod ends every process that is connecting
when one of them is lost (its C++ code throws where nothing catches). So a meeting that breaks is
held again with new processes in place of those that were left: each had written down its training
before (``checkpoints.survival``). A worker that joins imports TensorFlow first, and asks then.

What differs from ``horovodrun``'s driver: each slot stands for itself (``Slots``), nothing passes
through a shell or in an argument, all listen on loopback, and nobody listens for news.

Events (see ``launch.events``): "world" with the rank of each worker by its number, and how many had
slots that are no longer offered ("given_up"), "lost", "unfit" when a worker ends before it could
join, "waiting" when one waits for the others to meet it, "anew" when a meeting broke, and "no
discovery" when the slots cannot be learnt. A worker's number tags its output; it is its first rank,
or a new one for a worker that joins.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tfdist.errors import TfdistError
from tfdist.launch import discovery
from tfdist.launch.events import that_fits
from tfdist.launch.gloo_store import ON_LOOPBACK, GlooStore, place
from tfdist.launch.hosts import Host
from tfdist.launch.rank_output import TaggedProcess, asked_to_end, tell

_TICK_S = 0.05
_DISCOVERY_S = 1.0
_LONGEST_TEXT = 2000
# What std::terminate ends a process with.
_ABORTED = 128 + signal.SIGABRT
# Within it the guards have told the ends of all whom one loss has taken along.
_SETTLE_S = 1.5
# Meetings that break in a row though nobody was lost have a cause of their own.
_MOST_BROKEN = 3


class State(enum.Enum):
    """Of a worker."""

    STARTING = enum.auto()
    WAITING = enum.auto()  # For the others, to meet them.
    MEETING = enum.auto()
    WORKING = enum.auto()


class Worker(TaggedProcess):
    """A process of the job.

    It has two pipes: on one it tells that it waits ("r") and has met ("m"), on the other it gets
    the variables of its rank, and the word that others wait to join or that one is lost
    (``strategies.horovod.elastic.Driver``).
    """

    def __init__(self, name: str, number: int, command: list[str], env: dict[str, str]):
        self.name = name
        self.rank: int | None = None
        self.is_member = False
        self.state = State.STARTING
        self._words, words = os.pipe()
        orders, self._orders = os.pipe()
        os.set_blocking(self._words, False)
        theirs = (words, orders)
        try:
            driver = {"TFDIST_DRIVER": f"{words},{orders}"}
            super().__init__(command, {**env, **driver}, number, theirs)
        finally:
            for fd in theirs:
                os.close(fd)

    def hear(self) -> bytes:
        """Returns the words that have come."""
        try:
            return os.read(self._words, 64)
        except BlockingIOError:
            return b""

    def order(self, order: dict[str, Any]) -> None:
        """Sends one line; the worker may have ended."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._orders, json.dumps(order).encode() + b"\n")

    def close(self) -> None:
        """Lets go of a process that has ended."""
        self.finish_output()
        os.close(self._words)
        os.close(self._orders)


class Driver:
    """One job.

    Args:
        command: of a worker.
        slots: where workers can run.
        environ: of the workers.
        min_workers: that meet.
        max_workers: that meet.
    """

    def __init__(
        self,
        command: list[str],
        slots: discovery.Slots,
        environ: dict[str, str],
        *,
        min_workers: int,
        max_workers: int,
    ):
        self._command = command
        self._slots = slots
        self._environ = environ
        self._min_workers = min_workers
        self._max_workers = max_workers
        self._store = GlooStore()
        self._workers: list[Worker] = []
        self._numbers: dict[str, int] = {}
        self._meeting = 0
        self._is_meeting = False
        self._broken_in_a_row = 0
        self._has_sent_news = False
        self._exits: list[tuple[int, int]] = []  # Rank and code, of the last world.
        self._kept = tempfile.mkdtemp(prefix="tfdist-kept-")

    def run(self, workers: int, ended: threading.Event) -> int:
        """Runs the job to its end; returns its exit code.

        Args:
            workers: number to begin with.
            ended: set from outside to end it.
        """
        try:
            while len(self._slots.names) < workers and not ended.wait(_TICK_S):
                self._slots.ask()
            self._begin()
            while self._members and not ended.wait(_TICK_S):
                self._hear()
                self._bury()
                self._offer()
                self._meet()
            return self._exit_code()
        finally:
            self._end(self._workers)
            self._store.close()
            shutil.rmtree(self._kept, ignore_errors=True)

    @property
    def _members(self) -> list[Worker]:
        """The workers of the present world that have not ended, in the order of ranks."""
        members = [worker for worker in self._workers if worker.is_member]
        return sorted(members, key=lambda worker: (worker.rank, worker.number))

    # Starting and ending ------------------------------------------------------------------------

    def _begin(self) -> None:
        names = self._slots.names[: self._max_workers]
        for rank, name in enumerate(names):
            self._start_member(name, rank, len(names))
        self._tell_world()

    def _start_member(self, name: str, rank: int, size: int) -> None:
        worker = self._start(name, place(name, rank, size, is_alone=True))
        worker.is_member, worker.rank = True, rank

    def _start(self, name: str, more: dict[str, str]) -> Worker:
        number = self._numbers.setdefault(name, len(self._numbers))
        own = {
            "HOROVOD_ELASTIC": "1",
            **ON_LOOPBACK,
            "TFDIST_LOCAL_RANK": str(discovery.local_rank(name)),
            "TFDIST_KEPT": str(Path(self._kept, str(number))),
        }
        worker = Worker(name, number, self._command, {**self._environ, **own, **more})
        self._workers.append(worker)
        return worker

    def _end(self, workers: Iterable[Worker]) -> None:
        workers = list(workers)
        for worker in workers:
            worker.ask_to_end()
        for worker in workers:
            worker.end()
            self._let_go(worker)

    def _let_go(self, worker: Worker) -> None:
        self._workers.remove(worker)
        worker.close()

    def _tell_world(self, given_up: int = 0) -> None:
        ranks = {str(worker.number): worker.rank for worker in self._members}
        tell({"event": "world", "ranks": ranks, "given_up": given_up})

    # What workers do ----------------------------------------------------------------------------

    def _hear(self) -> None:
        for worker in self._workers:
            words = worker.hear()
            if words.endswith(b"r"):
                worker.state = State.WAITING
                if worker.is_member and self._meeting:
                    tell({"event": "waiting"})
            elif words.endswith(b"m"):
                worker.state = State.WORKING
        if self._is_meeting and all(w.state is State.WORKING for w in self._members):
            self._is_meeting = False
            self._broken_in_a_row = 0

    def _bury(self) -> None:
        dead = [worker for worker in self._workers if worker.code is not None]
        if self._is_meeting and any(worker.is_member for worker in dead):
            self._hold_anew()
            return
        for worker in dead:
            if worker.is_member:
                self._count_exit(worker)
                self._tell_of_loss(worker)
            else:
                self._slots.lose(worker.name)
                host = discovery.host_of(worker.name)
                tell({"event": "unfit", "host": host, "code": worker.code})
            self._let_go(worker)

    def _count_exit(self, worker: Worker) -> None:
        self._exits.append((worker.rank, worker.code))
        if worker.code != 0:
            self._slots.lose(worker.name)
            lost = {"number": worker.number, "rank": worker.rank, "code": worker.code}
            tell({"event": "lost", "host": discovery.host_of(worker.name), **lost})

    def _tell_of_loss(self, lost: Worker) -> None:
        """Gloo's ranks notice one that has gone, but may wait for each other nevertheless."""
        for worker in self._members:
            if lost.code != 0 and worker.state is State.WORKING:
                worker.order({"lost": lost.number})

    def _hold_anew(self) -> None:
        """Begins a broken meeting anew, with new processes for all that it has not lost."""
        self._is_meeting = False
        members = self._members
        until = time.monotonic() + _SETTLE_S
        while time.monotonic() < until and any(worker.code is None for worker in members):
            time.sleep(_TICK_S)
        # Horovod aborts those that are left.
        lost = [w for w in members if w.code is not None and w.code not in (0, _ABORTED)]
        self._broken_in_a_row = 0 if lost else self._broken_in_a_row + 1
        if self._broken_in_a_row == _MOST_BROKEN:
            lost = [worker for worker in members if worker.code is not None]
        left = [worker for worker in members if worker not in lost]
        for worker in lost:
            self._count_exit(worker)
            self._let_go(worker)
        self._end(left)
        if left:
            tell({"event": "anew"})
        for rank, worker in enumerate(left):
            self._start_member(worker.name, rank, len(left))

    # Slots --------------------------------------------------------------------------------------

    def _offer(self) -> None:
        """Starts workers in new slots, apart from the others, and ends those that left theirs."""
        self._slots.ask()
        names = self._slots.names
        self._end(w for w in self._workers if not w.is_member and w.name not in names)
        for name in names:
            if name not in self._numbers:
                self._start(name, {})
        joining = any(w.state is State.WAITING for w in self._workers if not w.is_member)
        leaving = any(worker.name not in names for worker in self._members)
        has_changed = joining or (leaving and len(names) >= self._min_workers)
        chief = next(iter(self._members), None)
        is_reachable = chief is not None and chief.state is State.WORKING
        if has_changed and is_reachable and not self._has_sent_news:
            self._has_sent_news = True
            chief.order({"news": True})

    # Meetings -----------------------------------------------------------------------------------

    def _meet(self) -> None:
        """Gives ranks to all that wait, once every member does."""
        members = self._members
        if not members or any(worker.state is not State.WAITING for worker in members):
            return
        names = self._slots.names
        waiting = [w for w in self._workers if w.state is State.WAITING and not w.is_member]
        meeting = [worker for worker in (*members, *waiting) if worker.name in names]
        if len(meeting) < self._min_workers:
            if any(code == 0 for _, code in self._exits):  # Nobody needs the rest any more.
                self._end(members)
            return  # Slots may come; the supervisor does not wait for ever.
        meeting = meeting[: self._max_workers]
        given_up = [worker for worker in members if worker not in meeting]
        self._end(given_up)
        self._meeting += 1
        self._is_meeting, self._has_sent_news = True, False
        self._exits.clear()
        self._store.forget()
        for rank, worker in enumerate(meeting):
            worker.is_member, worker.rank, worker.state = True, rank, State.MEETING
        self._tell_world(len(given_up))
        for worker in meeting:
            own = place(worker.name, worker.rank, len(meeting), is_alone=True)
            # Horovod asks again for what it is told here, where it has met others before.
            told = ",".join(
                own[f"HOROVOD_{name}"]
                for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
            )
            self._store.put(self._meeting, "rank_and_size", f"{worker.name}:0", told)
            worker.order({"variables": {**own, **self._store.variables(self._meeting)}})

    def _exit_code(self) -> int:
        """Returns the job's: 0 where some of the last world did their work and no other failed.

        A worker that a signal ended is one that the others could do without; not so the chief,
        which writes the results.
        """
        codes = [code for _, code in self._exits]
        if 0 in codes:
            codes = [code for rank, code in self._exits if rank == 0 or code < 128]
        return next((code for code in codes if code), 0 if codes else 1)


class _Discovery:
    """Asks a script for slots, in a thread of its own: it may take seconds."""

    def __init__(self, script: str):
        self._script = script
        self._complaint = ""
        self._hosts: list[Host] = []
        threading.Thread(target=self._ask_for_ever, daemon=True).start()

    def hosts(self) -> list[Host]:
        """Returns what was printed last."""
        return self._hosts

    def _ask_for_ever(self) -> None:
        while True:
            try:
                self._hosts = discovery.run(self._script)
            except TfdistError as error:  # Those that there were are still there.
                self._complain(str(error))
            time.sleep(_DISCOVERY_S)

    def _complain(self, text: str) -> None:
        if text != self._complaint:  # Not every second.
            self._complaint = text
            tell({"event": "no discovery", "text": that_fits(text[:_LONGEST_TEXT])})


def main() -> None:
    settings = json.loads(sys.argv[1])
    assert sys.argv[2] == "--", sys.argv
    script = settings["host_discovery"]
    here = [Host("localhost", settings["workers"])]
    slots = discovery.Slots(
        (lambda: here) if script is None else _Discovery(script).hosts, settings["max_workers"]
    )
    ended = asked_to_end()
    driver = Driver(
        sys.argv[3:],
        slots,
        dict(os.environ),
        min_workers=settings["min_workers"],
        max_workers=settings["max_workers"],
    )
    sys.exit(driver.run(settings["workers"], ended))


if __name__ == "__main__":
    main()
