"""What all workers of a TensorFlow cluster have in common, whatever each of them holds."""

from __future__ import annotations

import abc
import functools
import pickle
import re
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.cross_device_utils import (
    CollectiveKeys,
    CollectiveReplicaLauncher,
)
from tensorflow.python.eager import context
from tensorflow.python.ops import collective_ops

from tfdist.errors import LaunchError
from tfdist.strategies.step_watch import StepWatch, WatchedSteps
from tfdist.topology import Topology

# What TensorFlow says where a peer is gone; its error classes say the same of other causes.
_LOST = ("Collective ops is aborted", "UNAVAILABLE", "failed to connect", "heartbeat")
# What a user has named: nodes, and the files that they were made in.
_OWN_NAMES = re.compile(
    r"\[\[.*?\]\]|\{\{node .*?\}\}|^(?:Detected at node|Node:| *File ).*$", re.MULTILINE
)


class Cluster(WatchedSteps):
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
        # What this rank has waited for when it ended its collectives itself.
        self._stall: str | None = None

    @abc.abstractmethod
    def _rows_of_all(self, rows: np.ndarray) -> list[np.ndarray]:
        """Returns the ``rows`` of each process, which may be of other lengths; on all processes."""

    def explain(self, error: Exception) -> Exception | None:
        text = str(error)
        said = _OWN_NAMES.sub("", text)
        is_lost = isinstance(error, tf.errors.UnavailableError) or any(w in said for w in _LOST)
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

    def new_watch(self) -> StepWatch:
        return StepWatch(
            timeout_s=self._stall_timeout_s,
            first_timeout_s=self._stall_timeout_s + self._start_timeout_s,
            on_stall=self._abort,
        )

    def _abort(self, place: str, limit_s: float) -> None:
        """Makes the step that waits raise: TensorFlow itself would wait for ever."""
        self._stall = self.told_wait(place, limit_s)
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


# Numbers of groups, far above those of TensorFlow's own strategy on the same connection.
OF_STEPS, BETWEEN_STEPS, OF_PARTS = 1_000, 1_001, 1_002


class Launcher(CollectiveReplicaLauncher):
    """TensorFlow's collectives among the workers of a cluster, as its own strategy calls them.

    Keys are given anew in each call of a step, whenever a worker has traced it; and a token has
    collectives begin in the order in which the step was written, as it is on all workers. Beside
    them stands what its strategy has no use for: one row for each worker.

    Both together send as many bytes as one ``all_reduce``.
    """

    def row_of_sum(self, rows: Any) -> Any:
        """Returns this worker's row of the sum of the ``rows`` of all workers, [elements].

        TensorFlow reduces and scatters at once on GPUs alone. So each worker sends the others
        their rows of its own, and adds up what it gets.

        Args:
            rows: [workers, elements], the same shape on all.
        """
        key = self._next_instance_key()
        with tf.device(self._device):
            # Made anew: a collective needs the device of what it sends.
            own_rows = collective_ops.all_to_all_v2(
                tf.identity(rows),
                self._group_size,
                self._group_key,
                key,
                communication_hint=self._options.implementation.value,
                ordering_token=self._get_ordering_token(),
            )
            return tf.reduce_sum(own_rows, axis=0)

    def all_rows(self, row: Any) -> Any:
        """Returns the rows of all workers, [workers, elements].

        Args:
            row: [elements], the same shape on all, of which nobody has to tell the others.
        """
        with tf.device(self._device):
            rows = self._all_gather(tf.identity(row)[None], None)
        rows.set_shape([self._group_size, *row.shape])
        return rows


@functools.cache
def launcher(group: int, place: Topology, kind: str) -> Launcher:
    """Returns the one of this program: TensorFlow takes no key a second time.

    Args:
        group: its number.
        place: of this worker.
        kind: "CPU" or "GPU", of which the workers meet on their first.
    """
    device = f"/job:worker/replica:0/task:{place.rank}/device:{kind}:0"
    keys = CollectiveKeys(group_key_start=group)
    options = tf.distribute.experimental.CommunicationOptions()
    return Launcher(keys.get_group_key([device]), place.world_size, keys, device, options)
