"""Between the process that speaks HTTP and the replicas: whole batches in a message.

What is on its way lies in a process of its own, that of LitServe's manager, so that a replica that
is killed holds nothing that others wait for. A call to that process takes as long as a small model.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.managers import SyncManager
from typing import Any

from litserve.transport.base import MessageTransport

# After so many batches of one request the first one does not wait: nobody would come.
_ALONE = 8


class Requests:
    """Requests, first come, first served, and who has taken them. Lies in the manager's process.

    Replicas go by their numbers. Requests are (consumer, uid, time, records), as LitServe's.
    """

    def __init__(self) -> None:
        self._waiting: deque[Any] = deque()
        self._taken: dict[int, list[str]] = {}
        self._alone = 0  # Batches of one in a row.
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, requests: Sequence[Any]) -> None:
        with self._changed:
            self._waiting.extend(requests)
            self._changed.notify(len(requests))

    def close(self) -> None:
        """Has all that take, and will, return None."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def waiting(self) -> int:
        """Returns how many no replica has taken."""
        with self._changed:
            return len(self._waiting)

    def begin(self, replica: int) -> None:
        """Lets a replica take requests."""
        with self._changed:
            self._taken[replica] = []

    def forget(self, uid: str) -> None:
        """Takes back a request that nobody waits for, where no replica has taken it."""
        with self._changed:
            self._waiting = deque(one for one in self._waiting if one[1] != uid)

    def end(self, replica: int) -> list[str]:
        """Returns the uids of what a replica took last; it takes nothing from now on.

        Not even by a call that it made before it was killed.
        """
        with self._changed:
            taken = self._taken.pop(replica, [])
            self._changed.notify_all()
            return taken

    def take(self, replica: int, most: int, patience_s: float, wait_s: float) -> list[Any] | None:
        """Returns requests that are to be answered together; none where none has come.

        Args:
            replica: who takes them; what it took before is answered.
            most: of them.
            patience_s: for the first one.
            wait_s: from then on for others, where some have come of late.
        """
        found: list[Any] = []
        until = time.monotonic() + patience_s
        with self._changed:
            if replica in self._taken:
                self._taken[replica] = []
            while len(found) < most and self._is_open_to(replica):
                if self._waiting:
                    if not found:
                        until = time.monotonic() + (wait_s if self._alone < _ALONE else 0.0)
                    found.append(self._waiting.popleft())
                    self._taken[replica].append(found[-1][1])
                # What has come as the time was over may have woken nobody else.
                elif not self._changed.wait(until - time.monotonic()) and not self._waiting:
                    break
            if found:
                self._alone = self._alone + 1 if len(found) == 1 else 0
            return found if self._is_open_to(replica) else None

    def _is_open_to(self, replica: int) -> bool:
        return not self._is_closed and replica in self._taken


class Sender:
    """Puts requests into the queue; those that come while others are sent, together.

    Args:
        queue: a proxy of ``Requests``.
    """

    def __init__(self, queue: Any):
        self._queue = queue
        self._unsent: list[Any] = []
        self._sending: asyncio.Task[None] | None = None

    async def put(self, request: Any) -> None:
        self._unsent.append(request)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())
        await asyncio.shield(self._sending)

    async def _send(self) -> None:
        while self._unsent:
            requests, self._unsent = self._unsent, []
            await asyncio.to_thread(self._queue.put, requests)


class Together(MessageTransport):
    """LitServe's transport, where what a replica says is kept until ``flush``, and is one message.

    Args:
        inner: LitServe's own, with one consumer.
    """

    def __init__(self, inner: MessageTransport):
        self._inner = inner
        self._said: list[Any] = []
        self._heard: deque[Any] = deque()

    def send(self, item: Any, consumer_id: int) -> None:
        self._said.append(item)

    def flush(self) -> None:
        if self._said:
            self._inner.send(self._said, consumer_id=0)
            self._said = []

    async def areceive(self, consumer_id: int, timeout: float | None = None) -> Any:
        if not self._heard:
            self._heard.extend(await self._inner.areceive(consumer_id, timeout) or ())
        return self._heard.popleft() if self._heard else None


_CALLS = ("put", "close", "waiting", "begin", "forget", "end", "take")
SyncManager.register("Requests", Requests, exposed=_CALLS)
