"""What the cores of this machine do at once, as a part of what each does alone.

``python -m tfdist.launch.cores_at_once`` tells its supervisor. Cores share memory and a limit of
power, and those of a virtual machine may be lent to others, too: ranks on a core each are then
slower than one rank alone, whatever adds their gradients up.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from tfdist.launch import events, hosts

_SLOT_S, _GAP_S = 0.2, 0.02
_ROUNDS = 15
#: Cores that are tried alone; the others are taken to be like them.
_MOST_ALONE = 4
_START_S = 1.0


def main() -> None:
    cpus = [core[0] for core in hosts.cores_here()]
    if len(cpus) > 1:
        events.emit({"event": "cores", "count": len(cpus), "at_once": _at_once(cpus)})


def _at_once(cpus: Sequence[int]) -> float:
    """Returns the work of cores at once, over that of each alone in the slots beside these."""
    alone = cpus[:_MOST_ALONE]
    begin, slots_of_round = time.monotonic() + _START_S, len(alone) + 1
    # Of each core (its time alone, at once) in turn: a drift of the machine then counts for both.
    at_once = [slots_of_round * n + len(alone) for n in range(_ROUNDS)]
    slots = {
        cpu: sorted([*at_once, *(slots_of_round * n + place for n in range(_ROUNDS))])
        if place < len(alone)
        else at_once
        for place, cpu in enumerate(cpus)
    }
    starts = {
        cpu: [begin + slot * (_SLOT_S + _GAP_S) for slot in of_cpu] for cpu, of_cpu in slots.items()
    }
    with ProcessPoolExecutor(len(cpus), multiprocessing.get_context("fork")) as pool:
        counts = dict(zip(cpus, pool.map(_count, cpus, starts.values()), strict=True))
    tried = [counts[cpu] for cpu in alone]
    return sum(sum(of[1::2]) for of in tried) / sum(sum(of[::2]) for of in tried)


def _count(cpu: int, starts: Sequence[float]) -> list[int]:
    """Returns how often this process does a piece of work on ``cpu`` in each slot.

    A piece is as a step of a small model: products that fit the caches, and a pass over memory.
    """
    import numpy as np

    os.sched_setaffinity(0, [cpu])
    factor = np.ones((160, 160), np.float32)
    memory = np.zeros(1 << 20, np.float32)
    counts = []
    for start in starts:
        time.sleep(max(0.0, start - time.monotonic()))
        count = 0
        while time.monotonic() < start + _SLOT_S:
            for _ in range(4):
                factor @ factor
            memory += 1.0
            count += 1
        counts.append(count)
    return counts


if __name__ == "__main__":
    main()
