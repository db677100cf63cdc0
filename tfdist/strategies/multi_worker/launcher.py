"""TensorFlow's collectives among the workers of a cluster, as its own strategy calls them.

Keys are given anew in each call of a step, whenever a worker has traced it; and a token has
collectives begin in the order in which the step was written, as it is on all workers.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.cross_device_utils import (
    CollectiveKeys,
    CollectiveReplicaLauncher,
)
from tensorflow.python.ops import collective_ops

from tfdist.topology import Topology

# Numbers of groups, far above those of TensorFlow's own strategy on the same connection.
OF_STEPS, BETWEEN_STEPS, OF_PARTS = 1_000, 1_001, 1_002


class Launcher(CollectiveReplicaLauncher):
    """Those of TensorFlow, and what its strategy has no use for: one row for each worker.

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
