"""The ranks of a Horovod job that may be lost, and that others may join."""

from __future__ import annotations

import json
import os
import select
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import LaunchError
from tfdist.strategies.horovod_ring import Ring, World
from tfdist.training.elastic import ElasticCollective


class Driver:
    """This process's end of its pipes to the job's driver (``tfdist.launch.elastic_driver``).

    Args:
        pipes: the one on which this process tells what it does, and the one with its orders.
    """

    def __init__(self, pipes: tuple[int, int]):
        self._words, self._orders = pipes
        self._unread = b""
        self._has_news = False

    @property
    def has_news(self) -> bool:
        """Whether others wait to join, or are to leave; only rank 0 is told."""
        while not self._has_news and select.select([self._orders], [], [], 0)[0]:
            self._take(self._next_order())
        return self._has_news

    def await_rank(self) -> None:
        """Returns when all others want to meet too, with this one's rank in the environment."""
        os.write(self._words, b"r")
        while not self._take(self._next_order()):
            pass
        self._has_news = False

    def tell_met(self) -> None:
        """Tells that Horovod is connected."""
        os.write(self._words, b"m")

    def _take(self, order: dict[str, Any]) -> bool:
        """Follows an order; returns whether it was to meet."""
        os.environ.update(order.get("variables", {}))
        self._has_news = self._has_news or "news" in order
        return "variables" in order

    def _next_order(self) -> dict[str, Any]:
        while b"\n" not in self._unread:
            data = os.read(self._orders, 4096)
            if not data:
                raise LaunchError(
                    "the driver of an elastic job must outlive its ranks",
                    received="its end",
                    mend="Give --max-restarts to start all again",
                )
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)


def meet(hvd: Any, driver: Driver) -> None:
    """Starts Horovod anew, with the ranks that the driver finds ready.

    Raises:
        LaunchError: they do not meet.
    """
    hvd.shutdown()
    driver.await_rank()
    try:
        hvd.init()  # Ends this process where another is lost meanwhile.
    except ValueError as error:
        raise LaunchError(
            "the ranks of an elastic job must meet",
            received=f"that Horovod did not start: {error}",
            mend="Look for the first rank that failed, or give --max-restarts to start all again",
        ) from error
    driver.tell_met()


class ElasticRing(Ring, ElasticCollective):
    """Ranks that meet anew after a loss.

    Args:
        world: shared by all rings of the process; changed when ranks meet.
        driver: of the job.
        planned: ranks that the job was asked to work with.
        commit_every_steps: steps between two commits.
        kept: see ``ElasticCollective``.
        options: see ``Ring``.
    """

    def __init__(
        self,
        hvd: Any,
        world: World,
        *,
        driver: Driver,
        planned: int,
        commit_every_steps: int,
        kept: Path,
        **options: Any,
    ):
        super().__init__(hvd, world, **options)
        self._driver = driver
        self._planned = planned
        self.commit_every_steps = commit_every_steps
        self.kept = kept

    @property
    def planned_replicas(self) -> int:
        return self._planned

    def will_change(self) -> bool:
        told = tf.constant(self._driver.has_news, tf.int32)
        return bool(self._hvd.broadcast(told, 0, name="tfdist.news"))

    def meet(self) -> None:
        meet(self._hvd, self._driver)
        self._world.size, self._world.rank = self._hvd.size(), self._hvd.rank()

    def hand_on(self, arrays: list[np.ndarray], root: int) -> list[np.ndarray]:
        if self.num_processes == 1:
            return arrays
        return [
            self._hvd.broadcast(tf.constant(array), root, name=f"tfdist.state.{index}").numpy()
            for index, array in enumerate(arrays)
        ]
