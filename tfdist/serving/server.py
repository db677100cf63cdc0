"""LitServe's queue and processes behind an app of our own: starts them, watches them, ends them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import multiprocessing
import signal
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from multiprocessing.connection import Connection
from typing import Any

import litserve
import uvicorn
from litserve.server import response_queue_to_buffer
from litserve.utils import LitAPIStatus, WorkerSetupStatus

from tfdist.errors import LaunchError, TfdistError, notice
from tfdist.serving.bodies import RefusedError
from tfdist.serving.fleet import SIGNALS, Fleet, StartError
from tfdist.serving.metrics import Metrics
from tfdist.serving.queues import Together
from tfdist.serving.replica import LOOK_S, Replica
from tfdist.serving.scaling import MOST_INSIDE, Rule, Scaling
from tfdist.serving.served import Served
from tfdist.serving.versions import Lost, Pending, Version, Versions

_POLL_S = 0.1
# Within the time that whoever sends Ctrl-C leaves us: see ``launch.cleanup.TERM_GRACE_S``.
_DRAIN_S = 3
_GONE = (None, LitAPIStatus.ERROR)


class Server(litserve.LitServer):
    """Replicas of a model, and the app that asks them.

    Args:
        served: the first version of the model.
        replica: what each process runs.
        scaling: how many there are.
        timeout_s: until a request is given up.
        start_timeout_s: until a replica must be ready.
        add_routes: puts the addresses on an app.
    """

    def __init__(
        self,
        served: Served,
        replica: Replica,
        scaling: Scaling,
        timeout_s: float,
        start_timeout_s: float,
        add_routes: Callable[[Any, Server], None],
    ):
        self._add_routes = add_routes
        self._served, self._replica = served, replica
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._inside = 0
        self._was_asked = False
        self._replica_numbers = itertools.count()
        self.versions = Versions()
        self._scaling, self._rule = scaling, Rule(scaling)
        self._is_stopped, self._is_over = threading.Event(), threading.Event()
        self._failure: Exception | None = None
        self.metrics = Metrics()
        super().__init__(
            replica,
            accelerator="cpu",  # TensorFlow finds its devices itself.
            timeout=timeout_s,
            disable_openapi_url=True,
        )

    def _register_internal_endpoints(self) -> None:
        self._add_routes(self.app, self)

    def _register_api_endpoints(self, *_: Any) -> None:
        """Those of ``add_routes`` are all."""

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        """Encloses what needs the replicas: all are ready, and ended afterwards.

        Raises:
            TfdistError: one cannot start, or not in time.
        """
        for number in SIGNALS:
            signal.signal(number, lambda *_: self._is_stopped.set())
        # The process that holds the queue is to outlive what the whole group is sent.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            before = set(multiprocessing.active_children())
            self._manager = self._init_manager(1)
            (self._queue_process,) = set(multiprocessing.active_children()) - before
            self._transport = Together(self._transport)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            first = self.begin(1, self._served)
            first.fleet.start(self._scaling.first)
            self._wait(first.fleet)
            self.switch(first)
            yield
        finally:
            self._end()
            self._manager.shutdown()

    def begin(self, number: int, served: Served) -> Version:
        """Returns a new version, of which no replica is started until some are wanted."""
        queue = self._manager.Requests()
        fleet = Fleet(
            *(functools.partial(self._launch, served, queue), self._state_of),
            *(self._replica_numbers, self._start_timeout_s),
            leave_timeout_s=self._timeout_s + LOOK_S + _POLL_S,
        )
        version = Version(number, served, queue, fleet)
        self.versions.present.append(version)
        return version

    def switch(self, version: Version) -> None:
        """Has a version answer from now on."""
        version.wanted = self._rule.replicas if self._scaling.is_scaled else None
        self.versions.switch(version)

    def _launch(self, served: Served, queue: Any, number: int, door: Connection) -> Any:
        self.workers_setup_status[_key(number)] = WorkerSetupStatus.STARTING
        told = self._transport, self.workers_setup_status, self._callback_runner
        try:
            return self._replica.of(served, number, door).started(queue, *told)
        except OSError as error:
            raise StartError(str(error)) from error

    def _state_of(self, number: int) -> Any:
        return self.workers_setup_status[_key(number)]

    def _wait(self, fleet: Fleet) -> None:
        wanted = self._scaling.first
        while not self._is_stopped.is_set() and len(fleet.ready()) < wanted:
            lost = fleet.look()
            if lost or len(fleet.present()) < wanted:
                late = f"one that is not, after {self._start_timeout_s:g} s"
                found = late if lost and lost[0].is_late else "one that ended"
                raise TfdistError(
                    "each replica must be ready before the server listens",
                    received=found,
                    mend="Read what it said above; with too little memory ask for fewer --replicas",
                )
            time.sleep(_POLL_S)

    def _end(self) -> None:
        for version in self.versions.present:
            # Without the process that holds the queue they are killed.
            with contextlib.suppress(OSError, EOFError):
                version.queue.close()
        for version in self.versions.present:
            version.fleet.end()

    def serve(
        self, listening: socket.socket, beside: Callable[[], Coroutine] | None = None
    ) -> None:
        """Answers until a signal, ``stop``, or the loss of the last replica.

        Args:
            beside: what runs meanwhile; None: nothing.

        Raises:
            LaunchError: no replica is left.
        """
        if self._is_stopped.is_set():
            return
        config = uvicorn.Config(
            self.app,
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_DRAIN_S,
        )
        self.app.response_queue_id = 0
        self._beside = beside
        self._uvicorn = uvicorn.Server(config)
        self._uvicorn.run(sockets=[listening])
        self._is_over.clear()
        if self._failure is not None:
            raise LaunchError(
                "a server must reach its replicas",
                received=repr(self._failure),
                mend="See what has ended the process that holds their queue, and start anew",
            )
        if not self.can_answer:
            raise LaunchError(
                "a replica must be left to answer",
                received="that all have ended",
                mend="See why, such as by dmesg where memory ran out, and start anew",
            )

    def stop(self) -> None:
        """Has ``serve`` return, or the next one, when what it has is answered."""
        self._is_over.set()

    @property
    def is_stopped(self) -> bool:
        """Whether a signal asked for the end."""
        return self._is_stopped.is_set()

    @property
    def can_answer(self) -> bool:
        """Whether a replica answers, or one will."""
        return self.versions.current.can_answer

    @property
    def wanted(self) -> int:
        """How many replicas a version must have to answer in the place of the current one."""
        return max(1, self._rule.replicas) if self._scaling.is_scaled else self._scaling.first

    def waiting(self) -> int:
        """Returns how many requests no replica has taken yet."""
        return sum(version.queue.waiting() for version in self.versions.present)

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Any) -> AsyncIterator[None]:
        answers = response_queue_to_buffer(
            self._transport, self.response_buffer, 0, self.litapi_connector
        )
        tasks = [asyncio.create_task(answers), asyncio.create_task(self._watch())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Encloses a request, from before its body is read. Raises RefusedError: too many."""
        if not self.can_answer or self._inside >= MOST_INSIDE:
            raise RefusedError(503, "no replica is free: ask again later")
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    async def ask(self, records: list[bytes] | None, version: Version | None = None) -> Any:
        """Returns what a replica says of some records; of None, what its outputs are.

        To be called within ``admitted``, where the current version is asked.

        Args:
            version: which alone is to answer; None: that which is current now, or a later one
                should that lose all its replicas.

        Raises:
            RefusedError: none can answer now, or not in time.
        """
        uid = str(uuid.uuid4())
        current = self.versions.current
        pending = Pending(records, version or current, is_pinned=version is not None)
        pending.version.pending[uid] = pending
        self._was_asked |= pending.version is current
        self.response_buffer[uid] = pending.item
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._put(uid, pending)
                await pending.item.event.wait()
        except TimeoutError:
            await asyncio.to_thread(pending.version.queue.forget, uid)
            raise RefusedError(504, "no answer in time") from None
        finally:
            del pending.version.pending[uid], self.response_buffer[uid]
        assert pending.item.response is not None
        answer, status = pending.item.response
        if status != LitAPIStatus.OK:
            is_lost = answer is None or not self.can_answer
            text = "the replica was lost: ask again" if is_lost else "the model failed"
            raise RefusedError(503 if is_lost else 500, text)
        found, rows = answer
        if rows:
            self.metrics.batches.add(rows)
        return found

    async def _put(self, uid: str, pending: Pending) -> None:
        await pending.version.sender.put((0, uid, time.monotonic(), pending.records))

    async def _watch(self) -> None:
        """Has the server end when it is to, or when nobody could."""
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = self._beside and tasks.create_task(self._beside())
                await self._look_after_replicas()
                if beside is not None:
                    beside.cancel()
        except ExceptionGroup as errors:
            self._failure = errors.exceptions[0]
        self._uvicorn.should_exit = True

    async def _look_after_replicas(self) -> None:
        """Repeats once what a replica had when it ended; returns when none can answer."""
        # A signal may have come before uvicorn's own handlers were there.
        while self.can_answer and not self.is_stopped and not self._is_over.is_set():
            # No replica may be there to tell.
            if not self._queue_process.is_alive():
                raise ConnectionError("the process that holds their queue has ended")
            if self._scaling.is_scaled:
                self._follow_load()
            for version in list(self.versions.present):
                await self._repeat(version, version.look())
            self.versions.retire()
            await asyncio.sleep(_POLL_S)

    def _follow_load(self) -> None:
        before = self._rule.replicas
        # One that came and went since the last look counts, too.
        ongoing = max(len(self.versions.current.pending), int(self._was_asked))
        self._was_asked = False
        wanted = self._rule.observe(time.monotonic(), ongoing)
        if wanted != before:
            notice(
                f"{before} to {wanted} replicas, for {self._rule.ongoing:.3g} requests at a time"
            )
        self.versions.current.wanted = wanted

    async def _repeat(self, version: Version, lost: Lost) -> None:
        for uid, pending, was_taken in lost:
            if uid not in version.pending or pending.item.event.is_set():  # Since it was looked at.
                continue
            home = version if version.can_answer else self.versions.current
            may_move = home is version or not pending.is_pinned
            if not (home.can_answer and may_move) or (pending.is_repeated and was_taken):
                pending.item.response = _GONE
                pending.item.event.set()
                continue
            pending.is_repeated |= was_taken
            home.pending[uid], pending.version = version.pending.pop(uid), home
            self.metrics.retried += 1
            await self._put(uid, pending)


def _key(number: int) -> str:
    """Returns what ``inference_worker`` calls the state of a replica."""
    return f"predict_{number}"
