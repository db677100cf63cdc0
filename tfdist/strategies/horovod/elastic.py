"""The ranks of a Horovod job that may be lost, and that others may join."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import LaunchError
from tfdist.strategies.horovod.ring import Ring, World
from tfdist.training.engine.elastic_collective import ElasticCollective


class Driver:
    """This process's end of its pipes to the job's driver (``tfdist.launch.elastic_driver``).

    Args:
        pipes: the one on which this process tells what it does, and the one with its orders.
    """

    def __init__(self, pipes: tuple[int, int]):
        self._words, orders = pipes
        self._places: queue.SimpleQueue = queue.SimpleQueue()
        self._connected: dict[int, str] = {}
        #: Whether others wait to join, or are to leave; only rank 0 is told.
        self.has_news = False
        threading.Thread(target=self._follow, args=(orders,), daemon=True).start()

    def await_rank(self) -> None:
        """Returns when all others want to meet too, with this one's rank in the environment."""
        os.write(self._words, b"r")
        place = self._places.get()
        if place is None:
            raise LaunchError(
                "the driver of an elastic job must outlive its ranks",
                received="its end",
                mend="Give --max-restarts to start all again",
            )
        os.environ.update(place)
        self.has_news = False

    def tell_met(self, connected: dict[int, str]) -> None:
        """Tells that Horovod is connected, by these sockets: see ``_sockets``."""
        self._connected = connected
        os.write(self._words, b"m")

    def _follow(self, orders: int) -> None:
        """Follows the driver's orders, whatever this process waits for."""
        with os.fdopen(orders) as pipe:
            for line in pipe:
                order = json.loads(line)
                if "variables" in order:
                    self._places.put(order["variables"])
                elif "news" in order:
                    self.has_news = True
                else:
                    self._hang_up()
        self._places.put(None)

    def _hang_up(self) -> None:
        """Ends Horovod's wait for a rank that is lost, which may be one for another that knows."""
        present = _sockets()
        for fd, name in self._connected.items():
            if present.get(fd) == name:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as line:
                    line.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, str]:
    """Returns this process's sockets: file descriptor -> the name that no other ever has."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{fd}")
            if name.startswith("socket:"):
                found[int(fd)] = name
    return found


def meet(hvd: Any, driver: Driver) -> None:
    """Starts Horovod anew, with the ranks that the driver finds ready.

    Raises:
        LaunchError: they do not meet.
    """
    hvd.shutdown()
    driver.await_rank()
    before = _sockets()
    try:
        hvd.init()  # Ends this process where another is lost meanwhile.
    except ValueError as error:
        raise LaunchError(
            "the ranks of an elastic job must meet",
            received=f"that Horovod did not start: {error}",
            mend="Look for the first rank that failed, or give --max-restarts to start all again",
        ) from error
    driver.tell_met({fd: name for fd, name in _sockets().items() if before.get(fd) != name})


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
