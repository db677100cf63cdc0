"""LitServe's queue and processes behind an app of our own: starts them, watches them, ends them."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import multiprocessing
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import litserve
import uvicorn
from litserve.loops import inference_worker
from litserve.server import response_queue_to_buffer
from litserve.utils import LitAPIStatus, ResponseBufferItem, WorkerSetupStatus

from tfdist.errors import LaunchError, TfdistError
from tfdist.serving.fleet import SIGNALS, Fleet, StartError
from tfdist.serving.metrics import Metrics
from tfdist.serving.queues import Sender, Together
from tfdist.serving.replica import LOOK_S, Replica
from tfdist.serving.scaling import Rule, Scaling

_POLL_S = 0.1
# Within the time that whoever sends Ctrl-C leaves us: see ``launch.cleanup.TERM_GRACE_S``.
_DRAIN_S = 3
# Requests that are read, wait or are being answered: beyond, a client does better to ask later.
_MOST_INSIDE = 1024
# After the loss of a replica: longer than the queue may hand requests to it.
_AGAIN_S = 2 * LOOK_S + 1.0
_GONE = (None, LitAPIStatus.ERROR)


class UnavailableError(Exception):
    """A request that cannot be answered now: a status of HTTP and a line."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


@dataclass
class _Pending:
    records: list[bytes] | None
    item: ResponseBufferItem
    is_repeated: bool = False


class Server(litserve.LitServer):
    """Replicas of a model, and the app that asks them.

    Args:
        replica: what each process runs.
        scaling: how many there are.
        timeout_s: until a request is given up.
        add_routes: puts the addresses on an app.
    """

    def __init__(
        self,
        replica: Replica,
        scaling: Scaling,
        timeout_s: float,
        add_routes: Callable[[Any, Server], None],
    ):
        self._add_routes = add_routes
        self._replica, self._timeout_s = replica, timeout_s
        self._inside = 0
        self._pending: dict[str, _Pending] = {}
        self._was_asked = False
        self._scaling, self._rule = scaling, Rule(scaling)
        self._is_stopped, self._is_over = threading.Event(), threading.Event()
        self._failure: Exception | None = None
        self.metrics = Metrics()
        super().__init__(
            replica,
            accelerator="cpu",  # TensorFlow finds its devices itself.
            timeout=timeout_s,
            restart_workers=True,  # So that a replica tells which requests it has taken.
            disable_openapi_url=True,
        )

    def _register_internal_endpoints(self) -> None:
        self._add_routes(self.app, self)

    def _register_api_endpoints(self, *_: Any) -> None:
        """Those of ``add_routes`` are all."""

    @contextlib.contextmanager
    def started(self, timeout_s: float) -> Iterator[None]:
        """Encloses what needs the replicas: all are ready, and ended afterwards.

        Raises:
            TfdistError: one cannot start, or not in time.
        """
        for number in SIGNALS:
            signal.signal(number, lambda *_: self._is_stopped.set())
        # The process that holds the queue is to outlive what the whole group is sent.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            manager = self._init_manager(1)
            self._queue = manager.Requests()
            self._sender = Sender(self._queue)
            self._transport = Together(self._transport)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        self._fleet = Fleet(
            *(self._launch, self._state_of, timeout_s),
            leave_timeout_s=self._timeout_s + LOOK_S + _POLL_S,
        )
        try:
            self._fleet.start(self._scaling.first)
            self._wait(timeout_s)
            yield
        finally:
            self._end()
            manager.shutdown()

    def _launch(self, number: int, door: Connection) -> Any:
        replica = copy.copy(self._replica)
        replica.door = door
        self.workers_setup_status[_key(number)] = WorkerSetupStatus.STARTING
        process = multiprocessing.get_context("spawn").Process(
            target=inference_worker,
            args=(
                *(replica, "cpu", number, self._queue, self._transport),
                *(self.workers_setup_status, self._callback_runner, self.restart_workers),
            ),
            name=f"replica-{number}",
        )
        try:
            process.start()
        except OSError as error:
            raise StartError(str(error)) from error
        return process

    def _state_of(self, number: int) -> Any:
        return self.workers_setup_status[_key(number)]

    def _wait(self, timeout_s: float) -> None:
        wanted = self._scaling.first
        while not self._is_stopped.is_set() and len(self._fleet.ready()) < wanted:
            lost = self._fleet.look()
            if lost or len(self._fleet.present()) < wanted:
                late = f"one that is not, after {timeout_s:g} s"
                found = late if lost and lost[0].is_late else "one that ended"
                raise TfdistError(
                    "each replica must be ready before the server listens",
                    received=found,
                    mend="Read what it said above; with too little memory ask for fewer --replicas",
                )
            time.sleep(_POLL_S)

    def _end(self) -> None:
        # Without the process that holds the queue they are killed.
        with contextlib.suppress(OSError, EOFError):
            self._queue.close()
        self._fleet.end()

    def serve(self, listening: socket.socket) -> None:
        """Answers until a signal, ``stop``, or the loss of the last replica.

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
    def replicas(self) -> int:
        """How many processes answer."""
        return len(self._fleet.ready())

    @property
    def can_answer(self) -> bool:
        """Whether a replica answers, or one will."""
        may_start = self._scaling.is_scaled and self._fleet.may_start
        return may_start or bool(self._fleet.present())

    @property
    def waiting(self) -> int:
        """How many requests no replica has taken yet."""
        return sum(p.item.worker_id is None for p in self._pending.values())

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
        """Encloses a request, from before its body is read. Raises UnavailableError: too many."""
        if not self.can_answer or self._inside >= _MOST_INSIDE:
            raise UnavailableError(503, "no replica is free: ask again later")
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    async def ask(self, records: list[bytes] | None) -> Any:
        """Returns what a replica says of some records; of None, what its outputs are.

        To be called within ``admitted``.

        Raises:
            UnavailableError: none can answer now, or not in time.
        """
        uid = str(uuid.uuid4())
        pending = _Pending(records, ResponseBufferItem(asyncio.Event()))
        self._pending[uid] = pending
        self._was_asked = True
        self.response_buffer[uid] = pending.item
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._put(uid, records)
                await pending.item.event.wait()
        except TimeoutError:
            raise UnavailableError(504, "no answer in time") from None
        finally:
            del self._pending[uid], self.response_buffer[uid]
        assert pending.item.response is not None
        answer, status = pending.item.response
        if status != LitAPIStatus.OK:
            is_lost = answer is None or not self.can_answer
            text = "the replica was lost: ask again" if is_lost else "the model failed"
            raise UnavailableError(503 if is_lost else 500, text)
        found, rows = answer
        if rows:
            self.metrics.batches.add(rows)
        return found

    async def _put(self, uid: str, records: list[bytes] | None) -> None:
        await self._sender.put((0, uid, time.monotonic(), records))

    async def _watch(self) -> None:
        """Has the server end when it is to, or when nobody could."""
        try:
            await self._look_after_replicas()
        except Exception as error:
            self._failure = error
        self._uvicorn.should_exit = True

    async def _look_after_replicas(self) -> None:
        """Repeats once what a replica had when it ended; returns when none can answer."""
        again_at = float("inf")
        # A signal may have come before uvicorn's own handlers were there.
        while self.can_answer and not self.is_stopped and not self._is_over.is_set():
            lost = self._fleet.look()
            for member in lost:
                code = member.process.exitcode
                _tell(f"replica {member.number} ended with code {code}; {self.replicas} left")
            # For a look the queue may still hand a request to one that has ended.
            had_requests = {member.number for member in lost if member.is_ready}
            is_over = not had_requests and time.monotonic() > again_at
            if had_requests or is_over or not self.can_answer:
                again_at = float("inf") if is_over else time.monotonic() + _AGAIN_S
                await self._repeat(had_requests)
            if self._scaling.is_scaled:
                self._follow_load()
            await asyncio.sleep(_POLL_S)

    def _follow_load(self) -> None:
        before = self._rule.replicas
        # One that came and went since the last look counts, too.
        ongoing = max(len(self._pending), int(self._was_asked))
        self._was_asked = False
        wanted = self._rule.observe(time.monotonic(), ongoing)
        if wanted != before:
            _tell(f"{before} to {wanted} replicas, for {self._rule.ongoing:.3g} requests at a time")
        self._fleet.follow(wanted)

    async def _repeat(self, lost: set[int]) -> None:
        for uid, pending in list(self._pending.items()):
            item = pending.item
            # What none has told of may have been on its way to the lost one.
            if item.event.is_set() or item.worker_id not in {None, *lost}:
                continue
            if not self.can_answer or (pending.is_repeated and item.worker_id is not None):
                item.response = _GONE
                item.event.set()
                continue
            pending.is_repeated |= item.worker_id is not None
            item.worker_id = None
            self.metrics.retried += 1
            await self._put(uid, pending.records)


def _key(number: int) -> str:
    """Returns what ``inference_worker`` calls the state of a replica."""
    return f"predict_{number}"


def _tell(text: str) -> None:
    print(f"tfdist: {text}", file=sys.stderr, flush=True)
