"""How many threads a rank computes with, beside the others of its host."""

from __future__ import annotations

import os

from tfdist.topology import Topology


def choose_threads(available_cores: int, bound: bool, local_size: int) -> int:
    """Returns how many threads a rank computes with, so that ranks of a host do not fight.

    Args:
        available_cores: cores that this process may run on.
        bound: whether the launcher gave them to this rank alone.
        local_size: ranks on this host.
    """
    return max(1, available_cores if bound else available_cores // local_size)


def take_threads(wanted: int | None, place: Topology) -> int:
    """Has TensorFlow compute with ``wanted`` threads, or this rank's part of the cores.

    Returns the number.

    Raises:
        RuntimeError: TensorFlow was used already.
    """
    import tensorflow as tf

    cores = len(os.sched_getaffinity(0))
    bound = cores < (os.cpu_count() or 1)
    threads = wanted or choose_threads(cores, bound, place.local_size)
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    return threads
