"""What all workers of a TensorFlow cluster have in common, whatever each of them holds."""

from __future__ import annotations

import abc
import contextlib
import pickle
import re
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from tfdist.errors import LaunchError
from tfdist.strategies.step_watch import StepWatch
from tfdist.topology import Topology
from tfdist.training.engine.collective import Collective

# What TensorFlow says where a peer is gone; its error classes say the same of other causes.
_LOST = ("Collective ops is aborted", "UNAVAILABLE", "failed to connect", "heartbeat")


class Cluster(Collective):
    """The workers of a cluster, which TensorFlow has connected.

    Args:
        place: of this worker among them.
        start_timeout_s: what the first step of a loop may take beside, since it is traced.
        stall_timeout_s: seconds that a step waits for the others.
    """

    def __init__(self, place: Topology, *, start_timeout_s: float, stall_timeout_s: float):
        self.num_processes = place.world_size
        self.process = place.rank
        self._addresses = place.addresses
        self._start_timeout_s = start_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._watch: StepWatch | None = None
        # What this rank has waited for when it ended its collectives itself.
        self._stall: str | None = None

    @abc.abstractmethod
    def _rows_of_all(self, rows: np.ndarray) -> list[np.ndarray]:
        """Returns the ``rows`` of each process, which may be of other lengths; on all processes."""

    def explain(self, error: Exception) -> Exception | None:
        text = str(error)
        is_lost = isinstance(error, tf.errors.UnavailableError) or any(w in text for w in _LOST)
        if self._stall is None and not is_lost:
            return None
        named = map(int, re.findall(r"/job:worker(?:/replica:\d+)?/task:(\d+)", text))
        lost = next((rank for rank in named if rank != self.process), None)
        if self._stall is not None:
            received = self._stall
        elif lost is not None:
            received = f"rank {self.process} has lost rank {lost} at {self._addresses[lost]}"
            if self._watch is not None and self._watch.place:
                received += f" in {self._watch.place}"
        else:
            received = text.splitlines()[0]
        return LaunchError(
            "all workers must take every step together",
            received=received,
            mend="Look for the first worker that failed or stopped; its last lines name the cause",
        )

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[Any]]:
        if self.num_processes == 1:
            yield []
            return
        before = self._watch  # A callback may evaluate.
        self._watch = StepWatch(
            timeout_s=self._stall_timeout_s,
            first_timeout_s=self._stall_timeout_s + self._start_timeout_s,
            on_stall=self._abort,
        )
        with self._watch.running():
            yield [self._watch]
        self._watch = before  # After an error it tells the place.

    def waiting(self, place: str, more_s: float = 0.0) -> contextlib.AbstractContextManager[None]:
        return (
            contextlib.nullcontext() if self._watch is None else self._watch.within(place, more_s)
        )

    def _abort(self, place: str, limit_s: float) -> None:
        """Makes the step that waits raise: TensorFlow itself would wait for ever."""
        self._stall = (
            f"rank {self.process} on {socket.gethostname()} has waited for the others in {place} "
            f"for more than {limit_s:.4g} s"
        )
        context.context().abort_collective_ops(tf.errors.UNAVAILABLE, self._stall)

    def gather(self, value: Any) -> list[Any]:
        if self.num_processes == 1:
            return [value]
        # Pickled and read by the ranks of one job, as Horovod does: nobody else's data.
        parts = self._rows_of_all(words_of(pickle.dumps(value)))
        return [pickle.loads(part.tobytes()) for part in parts]


def words_of(data: bytes) -> np.ndarray:
    """Returns bytes as TensorFlow's collectives take them, int32, filled up with zeros."""
    return np.frombuffer(data + bytes(-len(data) % 4), np.int32)
