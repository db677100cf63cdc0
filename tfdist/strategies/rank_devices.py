"""What a rank computes on, beside the others of its host: GPUs, and how many threads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from tfdist.errors import OptionError, first_line
from tfdist.topology import Topology


@contextlib.contextmanager
def before_tensorflow(strategy: str) -> Iterator[None]:
    """Encloses what takes devices and threads for a strategy.

    Raises:
        OptionError: TensorFlow was used already.
    """
    try:
        yield
    except RuntimeError as error:
        raise OptionError(
            f"strategy '{strategy}' must be entered before TensorFlow is first used",
            received=f"an error: {first_line(error)}",
            mend="Enter the strategy at the start of the program",
        ) from error


def choose_gpus(gpus: Sequence[Any], local_rank: int, each: int = 1) -> Sequence[Any]:
    """Returns the GPUs that a rank pins, none where there are none.

    Args:
        each: GPUs that a rank needs.

    Raises:
        OptionError: there are GPUs, but too few for the ranks on this host.
    """
    mine = gpus[local_rank * each : (local_rank + 1) * each]
    if gpus and len(mine) < each:
        raise OptionError(
            f"each rank of a host must have {'a GPU' if each == 1 else f'{each} GPUs'} of its own",
            received=f"local rank {local_rank} with {len(gpus)} visible GPUs",
            mend=f"Start at most {len(gpus) // each} workers on this host, or hide the GPUs: "
            "CUDA_VISIBLE_DEVICES=-1",
        )
    return mine


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


def own_devices() -> dict[str, str]:
    """Returns this process's logical devices: "CPU:0" -> the full name.

    In a cluster, TensorFlow lists those of the other processes, too.
    """
    import tensorflow as tf

    with tf.device("CPU:0"):
        host = tf.constant(0).device.rpartition("/device:")[0]
    found = {}
    for device in tf.config.list_logical_devices():
        of, _, name = device.name.rpartition("/device:")
        if of in ("", host):  # Without a cluster they have short names.
            found[name] = f"{host}/device:{name}"
    return found
