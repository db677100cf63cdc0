"""Threads that read the batches of a ``keras.utils.Sequence`` while a step runs, in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class ReadAhead:
    """What Keras' loops are told of it: see ``Model.fit``.

    Attributes:
        workers: threads; with fewer than two the batches are read one at a time.
        max_queue_size: batches that they may be ahead.
        use_multiprocessing: whether processes were asked for; threads take their place.
    """

    workers: int = 1
    max_queue_size: int = 10
    use_multiprocessing: bool = False

    @staticmethod
    def among(options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns those of a loop's options that say how to read ahead."""
        return {f.name: options[f.name] for f in fields(ReadAhead) if f.name in options}

    def read(self, read: Callable[[int], Any], numbers: Sequence[int]) -> Iterator[Any]:
        """Yields what ``read`` gives for each of ``numbers``."""
        if self.workers < 2:
            yield from map(read, numbers)
            return
        pool = ThreadPoolExecutor(self.workers, "tfdist-read-ahead")
        under_way: deque[Future] = deque()
        try:
            for number in numbers:
                under_way.append(pool.submit(read, number))
                if len(under_way) > max(self.max_queue_size, self.workers):
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
