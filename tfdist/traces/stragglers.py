"""Who comes last to what all ranks do together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tfdist.traces.alignment import Meetings


@dataclass(frozen=True)
class Straggler:
    """The rank that came last most often.

    Attributes:
        rank: its number.
        late_ms: how much later than the next to last it came to a collective where it was last, at
            the median of these executions.
        times: executions in which it was last.
        executions: there were.
        is_clear: it was last in more than two of three, by more than the clocks may be wrong.
    """

    rank: int
    late_ms: float
    times: int
    executions: int
    is_clear: bool


def straggler_of(meetings: Meetings) -> Straggler | None:
    """Returns who kept the others waiting most often; None where ranks did nothing together."""
    if not len(meetings.arrivals):
        return None
    ranks = meetings.arrivals.shape[1]
    last, late = [], []
    for execution in np.unique(meetings.execution):
        arrivals = meetings.arrivals[meetings.execution == execution]
        behind = arrivals - np.sort(arrivals, axis=1)[:, -2:-1]  # Above 0 for the last one alone.
        most = np.maximum(behind, 0).max(axis=0)
        last.append(int(np.argmax(most)))
        late.append(float(most.max()))
    counts = np.bincount(last, minlength=ranks)
    rank = int(np.argmax(counts))
    late_ms = (
        float(np.median([ns for who, ns in zip(last, late, strict=True) if who == rank])) / 1e6
    )
    times = int(counts[rank])
    return Straggler(
        rank=rank,
        late_ms=late_ms,
        times=times,
        executions=len(last),
        is_clear=3 * times > 2 * len(last) and late_ms * 1e6 > 2 * (meetings.uncertainty_ns or 0),
    )
