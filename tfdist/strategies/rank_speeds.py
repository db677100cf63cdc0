"""Ranks of unlike speed: each takes as many rows of a global batch as it computes in one time."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from tfdist.errors import OptionError
from tfdist.training.engine.collective import Collective

#: Has tfdist find the speeds out itself.
MEASURE = "measure"
_SIZE, _SECONDS = 512, 0.5
# Ranks that are no further apart than this share a batch evenly: a measurement is no better.
_ALIKE = 1.15


def check(given: Any) -> None:
    """Raises OptionError: neither "measure" nor positive numbers."""
    if given is None or given == MEASURE:
        return
    numbers = given if isinstance(given, Sequence) and not isinstance(given, str) else ()
    kinds = (int, float)
    if not numbers or not all(
        isinstance(n, kinds) and not isinstance(n, bool) and 0 < n < math.inf for n in numbers
    ):
        raise OptionError(
            "device_speeds must be 'measure', or a number above 0 for each rank",
            received=repr(given),
            mend="Write device_speeds=[1, 2] where rank 1 is twice as fast as rank 0",
        )


def found(given: Any, collective: Collective) -> tuple[float, ...] | None:
    """Returns the speed of each rank; None where they are alike. All ranks call it.

    Raises:
        OptionError: other ranks than numbers.
    """
    if collective.num_processes == 1:
        return None
    is_measured = given == MEASURE
    speeds = tuple(collective.gather(_measured())) if is_measured else tuple(map(float, given))
    if len(speeds) != collective.num_processes:
        raise OptionError(
            "device_speeds must have a number for each rank",
            received=f"{len(speeds)} for {collective.num_processes} ranks",
            mend="Give as many, or 'measure'",
        )
    if max(speeds) <= min(speeds) * (_ALIKE if is_measured else 1):
        return None
    if collective.is_chief:
        shares = ", ".join(
            f"rank {rank} {speed / sum(speeds):.0%}" for rank, speed in enumerate(speeds)
        )
        how = "as measured" if is_measured else "as device_speeds says"
        print(f"tfdist: rows of a global batch, {how}: {shares}", flush=True)
    return speeds


def _measured() -> float:
    """Returns products of two matrices in a second, on the device that this rank computes on."""
    import tensorflow as tf

    matrix = tf.ones([_SIZE, _SIZE])
    multiply = tf.function(lambda: tf.reduce_sum(matrix @ matrix))
    multiply().numpy()
    began, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < _SECONDS:
        multiply().numpy()
        count += 1
    return count / passed
