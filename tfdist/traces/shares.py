"""What a rank's time went into: each moment counts once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tfdist.traces import intervals
from tfdist.traces.alignment import Meetings
from tfdist.traces.rank import RankTrace


@dataclass(frozen=True)
class Shares:
    """Milliseconds of a step of a rank, at the mean of the traced steps.

    ``step`` is ``compute`` + ``exposed`` + ``for_data`` + ``for_rank`` + ``for_host``.

    Attributes:
        compute: some operation computes.
        exposed: nothing does, and a collective is under way that all ranks have come to.
        for_rank: nothing does, and a collective waits for another rank.
        for_data: nothing does, and the next batch is not there.
        for_host: none of these: Python, callbacks, and what starts operations.
        communication: from the call of a collective until it was done, whatever else went on.
        input: from the call for a batch until it was there, whatever else went on.
    """

    step: float
    compute: float
    exposed: float
    for_data: float
    for_rank: float
    for_host: float
    communication: float
    input: float

    @property
    def overlap(self) -> float | None:
        """The share of the communication that something was computed in; None without any."""
        hidden = self.communication - self.exposed - self.for_rank
        return hidden / self.communication if self.communication else None


#: In which order a moment is counted, and what each is called.
PARTS = {
    "compute": "compute",
    "exposed": "exposed communication",
    "for_rank": "waits for another rank",
    "for_data": "waits for data",
    "for_host": "waits for the host",
}


def parts_of(trace: RankTrace, meetings: Meetings) -> dict[str, np.ndarray]:
    """Returns the times of each of ``PARTS``, in ns of the rank's clock; they make up all steps."""
    left = np.array([[trace.begun, trace.ended]])
    shift = meetings.shifts[trace.rank]
    last = meetings.arrivals.max(axis=1) - shift if len(meetings.arrivals) else np.empty(0)
    own, ends = (each[:, trace.rank] - shift for each in (meetings.arrivals, meetings.ends))
    travelling = intervals.union(np.stack([last, ends], axis=1))
    waiting = intervals.subtract(intervals.union(np.stack([own, last], axis=1)), travelling)
    communicating = intervals.union(trace.communication.times)
    found = {}
    for name, times in (
        ("compute", intervals.union(trace.compute.times)),
        ("exposed", intervals.subtract(communicating, waiting)),
        ("for_rank", intervals.intersect(communicating, waiting)),
        ("for_data", intervals.union(trace.inputs.times)),
    ):
        found[name] = intervals.intersect(left, times)
        left = intervals.subtract(left, times)
    return found | {"for_host": left}


def shares_of(trace: RankTrace, meetings: Meetings) -> Shares:
    """Returns what went into a step of a rank, in milliseconds."""
    per_step = 1e6 * trace.num_steps
    whole = np.array([[trace.begun, trace.ended]])

    def mean_ms(times: np.ndarray) -> float:
        return intervals.length(intervals.intersect(whole, times)) / per_step

    return Shares(
        step=mean_ms(whole),
        communication=mean_ms(intervals.union(trace.communication.times)),
        input=mean_ms(intervals.union(trace.inputs.times)),
        **{name: mean_ms(times) for name, times in parts_of(trace, meetings).items()},
    )
