"""The queue of a server, and messages together, in this process."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from tfdist.serving.queues import Requests, Sender, Together

_LONG_S = 60.0


@pytest.mark.timeout(50)  # Less than what must not be waited for.
def test_requests_are_taken_in_their_order_and_as_many_as_may_be():
    queue = Requests()
    queue.put([1, 2, 3])
    assert queue.take(2, _LONG_S, _LONG_S) == [1, 2]
    assert queue.take(2, _LONG_S, 0.0) == [3]
    assert queue.take(2, 0.0, _LONG_S) == []


@pytest.mark.timeout(50)
def test_the_first_of_a_batch_waits_for_others():
    queue = Requests()
    threading.Thread(target=lambda: [queue.put([n]) for n in range(3)]).start()
    assert queue.take(3, _LONG_S, _LONG_S) == [0, 1, 2]


@pytest.mark.timeout(50)
def test_several_take_each_request_once():
    queue, taken = Requests(), []

    def take() -> None:
        while (found := queue.take(4, _LONG_S, 1e-4)) is not None:
            taken.extend(found)

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(500):
        queue.put([2 * number, 2 * number + 1])
    while len(taken) < 1000:
        time.sleep(0.001)
    queue.close()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(1000))
    assert queue.take(1, _LONG_S, 0.0) is None


class _Queue:
    """Notes what is put, each time after a while."""

    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.may_end = threading.Event()

    def put(self, requests: list[int]) -> None:
        assert self.may_end.wait(20)
        if requests == [9]:
            raise BrokenPipeError
        self.puts.append(requests)


@pytest.mark.timeout(50)
def test_what_comes_while_others_are_sent_goes_together():
    queue = _Queue()
    sender = Sender(queue)

    async def send() -> None:
        tasks = []
        for number in range(5):
            tasks.append(asyncio.create_task(sender.put(number)))
            await asyncio.sleep(0)
        tasks[1].cancel()  # Which is no reason that others are not sent.
        await asyncio.sleep(0)
        queue.may_end.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(BrokenPipeError):
            await sender.put(9)

    asyncio.run(send())
    assert [one for many in queue.puts for one in many] == list(range(5))
    assert len(queue.puts) == 2


class _Transport:
    def __init__(self) -> None:
        self.sent: list[list[str]] = []

    def send(self, item: list[str], consumer_id: int) -> None:
        self.sent.append(item)

    async def areceive(self, consumer_id: int, timeout: float | None = None) -> list[str] | None:
        return self.sent.pop(0) if self.sent else None


def test_what_is_said_together_is_heard_one_by_one():
    inner = _Transport()
    said = Together(inner)
    said.flush()
    for item in "abc":
        said.send(item, 0)
    assert inner.sent == []
    said.flush()
    said.flush()
    assert inner.sent == [["a", "b", "c"]]
    heard = Together(inner)
    assert [asyncio.run(heard.areceive(0)) for _ in range(4)] == ["a", "b", "c", None]
