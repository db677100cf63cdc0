"""Which layers of a stage take batches whole, for the sake of BatchNormalization.

Its statistics are those of the whole batch, so microbatches would wait for each other at each such
layer: between two of them, on one device, nothing is gained by dividing a batch. Stages overlap
where one goes over into the next, from the last of the one to the first of the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tfdist.strategies.pipeline import schedule
from tfdist.strategies.pipeline.schedule import Schedule


def with_whole_batches(
    bounds: Sequence[int], norms: Sequence[int], *, microbatches: int, short_after: int | None
) -> tuple[Schedule, tuple[int, ...]]:
    """Returns a schedule, and the first call of each of its chunks but the first one.

    Args:
        bounds: the first call of each stage, and the number of calls.
        norms: calls with statistics of the whole batch.
        short_after: after this call a chunk begins at each of ``norms``, since a chunk is what
            recompute keeps at one time; None: chunks are as long as they can be.
    """
    starts: list[int] = []
    stages: list[int] = []
    whole: set[int] = set()
    last = len(bounds) - 2
    for stage, (begin, end) in enumerate(itertools.pairwise(bounds)):
        own = [number for number in norms if begin <= number < end]
        own_starts = {begin}
        if own:
            first = begin if stage == 0 else own[0]
            stop = end if stage == last else own[-1] + 1
            own_starts |= {first, stop} - {end}
            if short_after is not None:
                own_starts |= {number for number in own if number > max(first, short_after)}
            places = enumerate(sorted(own_starts), len(starts))
            whole |= {place for place, start in places if first <= start < stop}
        starts += sorted(own_starts)
        stages += [stage] * len(own_starts)
    made = schedule.gpipe(tuple(stages), microbatches, frozenset(whole))
    return made, tuple(starts[1:])
