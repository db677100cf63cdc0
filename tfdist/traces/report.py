"""A training's trace, as numbers."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tfdist.traces.alignment import Meetings, Straggler, met, straggler_of
from tfdist.traces.operations import Longest, longest
from tfdist.traces.rank import RankTrace, read
from tfdist.traces.shares import Shares, shares_of

# Strategies that compute where no trace is written.
_NOT_TRACED = {
    "parameter_server": "workers and parameter servers were",
    "federated": "clients, which TensorFlow Federated runs, were",
}


@dataclass(frozen=True)
class Report:
    """Where the time of a training's steps went.

    Attributes:
        folder: of the training.
        traces: of its ranks.
        meetings: what they did together.
        shares: of each rank.
        straggler: see ``straggler_of``.
        longest: the operations of the most time.
    """

    folder: Path
    traces: list[RankTrace]
    meetings: Meetings
    shares: list[Shares]
    straggler: Straggler | None
    longest: list[Longest]

    @property
    def step_ms(self) -> float:
        """Milliseconds of a step, at the mean of all ranks."""
        return sum(each.step for each in self.shares) / len(self.shares)

    @property
    def begun_ns(self) -> float:
        """When the first rank began its first traced step, on the clock of rank 0."""
        shifts = self.meetings.shifts
        return min(trace.begun + ns for trace, ns in zip(self.traces, shifts, strict=True))

    @property
    def unknown(self) -> list[str]:
        """What this trace cannot tell, a sentence each."""
        first = self.traces[0]
        found = []
        if elsewhere := _NOT_TRACED.get(first.notes["strategy"]):
            found.append(
                f"{elsewhere} not traced: this process waits for them, which counts as waiting "
                "for the host"
            )
        elif first.notes["devices"] > 1:
            found.append(
                f"a process computes on {first.notes['devices']} devices here, and counts as "
                "computing while any of them does: what they wait for each other is not known"
            )
        if len(self.traces) > 1 and self.meetings.uncertainty_ns is None:
            found.append(
                "ranks did nothing together that all of them take part in: their clocks are "
                "those of their hosts, and who is late is not known"
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """Returns all of it as JSON has it; times are milliseconds."""
        clocks = self.meetings.uncertainty_ns
        shifts = self.meetings.shifts
        clock = self.traces[0].clock_ns
        return {
            "folder": str(self.folder),
            "strategy": self.traces[0].notes["strategy"],
            "steps": [self.traces[0].steps[0][0], self.traces[0].steps[-1][1]],
            "step_ms": self.step_ms,
            "ranks": [
                {
                    "rank": trace.rank,
                    "host": trace.notes["host"],
                    **{f"{name}_ms": ms for name, ms in asdict(share).items()},
                    "overlap": share.overlap,
                    "clock_behind_ms": (shift - (trace.clock_ns - clock)) / 1e6,
                }
                for trace, share, shift in zip(self.traces, self.shares, shifts, strict=True)
            ],
            "clock_uncertainty_ms": None if clocks is None else clocks / 1e6,
            "straggler": self.straggler and asdict(self.straggler),
            "longest": [asdict(each) for each in self.longest],
            "unknown": self.unknown,
        }


def report(folder: str | os.PathLike) -> Report:
    """Returns where the time of a training's steps went.

    Args:
        folder: of the training, or the one that it was asked to trace in.

    Raises:
        DataError: it has no trace, or files of it are missing or damaged.
    """
    traces = read(folder)
    meetings = met(traces)
    return Report(
        folder=Path(folder),
        traces=traces,
        meetings=meetings,
        shares=[shares_of(trace, meetings) for trace in traces],
        straggler=straggler_of(meetings),
        longest=longest(traces),
    )
