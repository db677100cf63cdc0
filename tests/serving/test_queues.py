"""The queue of a server, and messages together, in this process."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from tfdist.serving.queues import Requests, Sender, Together

_LONG_S = 60.0


def _queue_of(*replicas: int) -> Requests:
    queue = Requests()
    for replica in replicas:
        queue.begin(replica)
    return queue


def _asked(*numbers: int) -> list[tuple[int, str, float, int]]:
    return [(0, str(number), 0.0, number) for number in numbers]


@pytest.mark.timeout(50)  # Less than what must not be waited for.
def test_requests_are_taken_in_their_order_and_as_many_as_may_be():
    queue = _queue_of(7)
    queue.put(_asked(1, 2, 3))
    assert queue.take(7, 2, _LONG_S, _LONG_S) == _asked(1, 2)
    assert queue.waiting() == 1
    assert queue.take(7, 2, _LONG_S, 0.0) == _asked(3)
    assert queue.take(7, 2, 0.0, _LONG_S) == []


@pytest.mark.timeout(50)
def test_what_a_replica_had_when_it_ended_is_known_and_it_takes_no_more():
    queue = _queue_of(0, 1)
    queue.put(_asked(1, 2, 3))
    assert queue.take(0, 2, _LONG_S, _LONG_S) == _asked(1, 2)
    assert queue.take(1, 1, _LONG_S, _LONG_S) == _asked(3)
    taken = []
    # A call of one that was killed still waits in the manager's process.
    thread = threading.Thread(target=lambda: taken.append(queue.take(0, 2, _LONG_S, 0.0)))
    thread.start()
    while queue._taken[0]:
        time.sleep(0.001)
    assert queue.end(0) == []
    queue.put(_asked(4))
    thread.join()
    assert taken == [None]
    assert (queue.take(0, 1, 0.0, 0.0), queue.waiting()) == (None, 1)
    assert (queue.end(1), queue.end(1)) == (["3"], [])
    queue.forget("4")
    assert queue.waiting() == 0


@pytest.mark.timeout(50)
def test_the_first_of_a_batch_waits_for_others():
    queue = _queue_of(0)
    threading.Thread(target=lambda: [queue.put(_asked(n)) for n in range(3)]).start()
    assert queue.take(0, 3, _LONG_S, _LONG_S) == _asked(0, 1, 2)


@pytest.mark.timeout(50)
def test_who_comes_alone_waits_for_nobody_until_two_come():
    queue = _queue_of(0)
    for number in range(8):
        queue.put(_asked(number))
        assert queue.take(0, 2, 0.0, 0.0) == _asked(number)
    queue.put(_asked(8))
    assert queue.take(0, 2, 0.0, _LONG_S) == _asked(8)
    queue.put(_asked(9, 10))
    assert queue.take(0, 2, 0.0, _LONG_S) == _asked(9, 10)
    threading.Thread(target=lambda: [queue.put(_asked(n)) for n in range(2)]).start()
    assert queue.take(0, 2, _LONG_S, _LONG_S) == _asked(0, 1)


@pytest.mark.timeout(50)
def test_several_take_each_request_once():
    queue, taken = _queue_of(0, 1, 2), []

    def take(replica: int) -> None:
        while (found := queue.take(replica, 4, _LONG_S, 1e-4)) is not None:
            taken.extend(number for *_, number in found)

    threads = [threading.Thread(target=take, args=(replica,)) for replica in range(3)]
    for thread in threads:
        thread.start()
    for number in range(500):
        queue.put(_asked(2 * number, 2 * number + 1))
    while len(taken) < 1000:
        time.sleep(0.001)
    queue.close()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(1000))
    assert queue.take(0, 1, _LONG_S, 0.0) is None


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
