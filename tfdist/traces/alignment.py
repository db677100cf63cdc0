"""Puts the times of all ranks on the clock of rank 0, by what they did together, and who was late.

A collective ends on all ranks at once: for what travels in it after the last rank has come is the
same for all. So the n-th collective of a name ends at one time, whatever the clocks say.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from tfdist.traces.rank import RankTrace

# Kinds in which every rank takes part; those of a sender and a receiver have other ends.
_OF_ALL = re.compile(r"Horovod\w+|Collective\w+|Nccl\w+")


@dataclass
class Meetings:
    """The collectives that all ranks took part in.

    Attributes:
        arrivals: float64 [meetings, ranks], when each rank called for it, on the clock of rank 0.
        ends: float64 [meetings, ranks], when it was done on each rank.
        execution: int [meetings], of which execution each was.
        shifts: float64 [ranks], ns to add to a rank's times for those of rank 0.
        uncertainty_ns: how far shifts that one collective alone gives are from these, at the
            median; None where ranks did nothing together.
    """

    arrivals: np.ndarray
    ends: np.ndarray
    execution: np.ndarray
    shifts: np.ndarray
    uncertainty_ns: float | None


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


def met(traces: list[RankTrace]) -> Meetings:
    """Returns what ranks did together, on one clock."""
    of_ranks = [_by_name(trace) for trace in traces]
    shared = set(of_ranks[0]).intersection(*of_ranks[1:]) if len(traces) > 1 else set()
    # By the system's clocks, until more is known.
    shifts = np.array([float(trace.clock_ns - traces[0].clock_ns) for trace in traces])
    rows = [[calls[key] for calls in of_ranks] for key in sorted(shared)]
    if not rows:
        nothing = np.empty((0, len(traces)))
        return Meetings(nothing, nothing, np.empty(0, int), shifts, None)
    times = np.array(rows) + shifts[:, None]
    late = times[..., 1] - times[:, :1, 1]
    off = np.median(late, axis=0)
    times -= off[:, None]
    return Meetings(
        arrivals=times[..., 0],
        ends=times[..., 1],
        execution=np.array([key[0] for key in sorted(shared)]),
        shifts=shifts - off,
        uncertainty_ns=float(np.median(np.abs(late - off)[:, 1:])),
    )


def _by_name(trace: RankTrace) -> dict[tuple[int, str, int], tuple[float, float]]:
    """Returns begin and end of each collective, by execution, name, and the how-manieth it is."""
    made = trace.communication
    found: dict[tuple[int, str, int], tuple[float, float]] = {}
    times = defaultdict(int)
    begun = trace.executions[:, 0]
    for name, kind, (at, end) in zip(made.names, made.kinds, made.times, strict=True):
        execution = int(np.searchsorted(begun, at, side="right")) - 1
        # One that a rank has come to before the first mark may be after it on another.
        if execution < 0 or not _OF_ALL.fullmatch(kind):
            continue
        number = times[execution, name]
        times[execution, name] += 1
        found[execution, name, number] = (at, end)
    return found


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
    own = [ns for who, ns in zip(last, late, strict=True) if who == rank]
    late_ms = float(np.median(own)) / 1e6
    times = int(counts[rank])
    return Straggler(
        rank=rank,
        late_ms=late_ms,
        times=times,
        executions=len(last),
        is_clear=3 * times > 2 * len(last) and late_ms * 1e6 > 2 * (meetings.uncertainty_ns or 0),
    )
