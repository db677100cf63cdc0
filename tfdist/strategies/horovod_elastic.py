"""The ranks of a Horovod job that may be lost, and that others may join."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import LaunchError
from tfdist.strategies.horovod_ring import Ring, World
from tfdist.training.elastic import ElasticCollective


class HostNews:
    """Hears from Horovod's driver that slots have come or gone; only rank 0 is told."""

    def __init__(self) -> None:
        from horovod.common.elastic import notification_manager

        self.has_come = False
        notification_manager.init()
        notification_manager.register_listener(self)

    # Horovod's name for it: ``horovod.common.elastic.State``.
    def on_hosts_updated(self, timestamp: int, result: int) -> None:
        self.has_come = True


def await_turn(stand_by: tuple[int, int]) -> None:
    """Tells Horovod's driver that this process is ready, and waits for its rank.

    Args:
        stand_by: see ``Topology``.
    """
    ready, turn = stand_by
    os.write(ready, b"\n")
    with os.fdopen(turn) as pipe:
        os.environ.update(json.loads(pipe.readline()))


def meet(hvd: Any) -> None:
    """Starts Horovod anew, with the ranks that its driver finds ready.

    Raises:
        LaunchError: they do not meet.
    """
    hvd.shutdown()
    hvd.init()  # Waits until the driver has a rank for each; aborts when one does not come.
    if not hvd.is_initialized():
        raise LaunchError(
            "the ranks of an elastic job must meet",
            received="that Horovod did not start",
            mend="Look for the first rank that failed; --max-restarts starts all again",
        )


class ElasticRing(Ring, ElasticCollective):
    """Ranks that meet anew after a loss.

    Args:
        world: shared by all rings of the process; changed when ranks meet.
        news: of slots.
        planned: ranks that the job was asked to work with.
        commit_every_steps: steps between two commits.
        options: see ``Ring``.
    """

    def __init__(
        self,
        hvd: Any,
        world: World,
        *,
        news: HostNews,
        planned: int,
        commit_every_steps: int,
        **options: Any,
    ):
        super().__init__(hvd, world, **options)
        self._news = news
        self._planned = planned
        self.commit_every_steps = commit_every_steps

    @property
    def planned_replicas(self) -> int:
        return self._planned

    def will_change(self) -> bool:
        told = tf.constant(self._news.has_come, tf.int32)
        return bool(self._hvd.broadcast(told, 0, name="tfdist.news"))

    def meet(self) -> None:
        self._news.has_come = False
        meet(self._hvd)
        self._world.size, self._world.rank = self._hvd.size(), self._hvd.rank()

    def hand_on(self, arrays: list[np.ndarray], root: int) -> list[np.ndarray]:
        if self.num_processes == 1:
            return arrays
        return [
            self._hvd.broadcast(tf.constant(array), root, name=f"tfdist.state.{index}").numpy()
            for index, array in enumerate(arrays)
        ]
