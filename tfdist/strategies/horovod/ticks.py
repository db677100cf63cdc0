"""Signs of life of ranks that wait for one which is busy alone.

Horovod ends a job in which one rank has asked for a sum and another one has not, within a deadline
that is of steps. A rank that writes a file takes longer, and is well. So a thread of each rank asks
for sums meanwhile, one after the other, of the ranks that are still busy: the last one is zero.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf


class Ticks:
    """The sums of one rank; all ranks make theirs together.

    Args:
        hvd: Horovod, which runs.
        interval_s: a rank that is busy gives a sign so often.
    """

    def __init__(self, hvd: Any, interval_s: float):
        self._hvd = hvd
        self._interval_s = interval_s
        self._is_done = threading.Event()
        self._is_lost = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Encloses what this rank does by itself."""
        self._thread.start()
        try:
            yield
        except BaseException:
            self._is_lost = True  # Others wait for it until their deadline, as for any rank.
            raise
        finally:
            self._is_done.set()

    def until_all_are_done(self) -> None:
        """Waits for the other ranks.

        Raises:
            Exception: of Horovod, where a rank was lost meanwhile.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        num_busy = 1
        try:
            while num_busy and not self._is_lost:
                self._is_done.wait(self._interval_s)
                num_busy = self._sum(0 if self._is_done.is_set() else 1)
        except Exception as error:  # Whatever Horovod says of a rank that was lost.
            self._error = error

    def _sum(self, own: int) -> int:
        with tf.device("CPU:0"):
            told = tf.constant(own, tf.int32)
            return int(self._hvd.allreduce(told, op=self._hvd.Sum, name="tfdist.ticks"))
