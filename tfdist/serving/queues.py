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


class Requests:
    """Those that no replica has taken, first come, first served. Lies in the manager's process."""

    def __init__(self) -> None:
        self._waiting: deque[Any] = deque()
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

    def take(self, most: int, patience_s: float, wait_s: float) -> list[Any] | None:
        """Returns requests that are to be answered together; none where none has come.

        Args:
            most: of them.
            patience_s: for the first one.
            wait_s: from then on for others.
        """
        found: list[Any] = []
        until = time.monotonic() + patience_s
        with self._changed:
            while len(found) < most and not self._is_closed:
                if self._waiting:
                    if not found:
                        until = time.monotonic() + wait_s
                    found.append(self._waiting.popleft())
                # What has come as the time was over may have woken nobody else.
                elif not self._changed.wait(until - time.monotonic()) and not self._waiting:
                    break
            return None if self._is_closed else found


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


SyncManager.register("Requests", Requests, exposed=("put", "close", "take"))
