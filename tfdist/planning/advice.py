"""What to take of a plan's rows, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tfdist.planning.devices import Cluster
from tfdist.planning.needs import Needs
from tfdist.planning.plan import Row

# The simplest of those that are nearly as fast as the fastest: numbers of a plan are no better.
_NEARLY = 0.95
#: Its steps are those of workers that do not wait for each other: not one device's result.
_NOT_EXACT = "parameter_server"


@dataclass(frozen=True)
class Advice:
    """A recommendation.

    Attributes:
        row: what to take; None: nothing fits.
        reason: one sentence.
    """

    row: Row | None
    reason: str


def advise(rows: Sequence[Row], batch: int) -> Advice:
    """Returns what to take: the simplest of the fastest rows that fit.

    Args:
        rows: the simplest first; the first one is one device without options.
        batch: rows of a global batch.
    """
    known = [row for row in rows if row.needs is not None]
    exact = [row for row in known if row.candidate.strategy != _NOT_EXACT]
    fitting = [row for row in exact if row.fits]
    if not fitting:
        return Advice(None, _nothing_fits(exact, batch))
    fastest = min(row.step_s for row in fitting)
    chosen = next(row for row in fitting if _NEARLY * row.step_s <= fastest)
    if chosen.needs is not None and not chosen.needs.computes:
        chosen = fitting[0]
    return Advice(chosen, _reason(chosen, known[0], fitting))


def fits_on_one(needs: Needs, cluster: Cluster, rows: int) -> bool:
    """Whether replicas of a model fit on these devices, which divide the rows of a global batch.

    Args:
        needs: of its step on one device.
    """
    return needs.peak(math.ceil(rows / cluster.devices)) <= cluster.room


def _reason(chosen: Row, one: Row, fitting: Sequence[Row]) -> str:
    name = chosen.name
    if chosen.needs is not None and not chosen.needs.computes:
        return (
            f"{name}: the simplest that fits; how fast it is is not known, as it has no products."
        )
    if one.candidate.devices == 1 and not one.fits:
        return (
            f"{name}: a step does not fit on one device as it is ({gigabytes(one.peak)} of "
            f"{gigabytes(one.room)}), and of what fits this is the fastest."
        )
    if not chosen.speed_up:
        return f"{name}: one device by itself is refused, and of what fits this is the fastest."
    if chosen.candidate.devices == 1:
        others = [row for row in fitting if row.candidate.devices > 1]
        if not others:
            return f"{name}: a step fits on one device, and no other row has more that fits."
        best = max(others, key=lambda row: row.speed_up)
        return (
            f"{name}: no more devices are 5 % faster; at best they are {best.speed_up:.2f} times "
            f"as fast ({best.name})."
        )
    return (
        f"{name}: {chosen.speed_up:.2f} times as fast as one device, and nothing simpler that fits "
        "comes within 5 % of the fastest."
    )


def _nothing_fits(rows: Sequence[Row], batch: int) -> str:
    if not rows:
        return "nothing: every strategy refuses this model, for the reasons below."
    least = min(rows, key=lambda row: row.peak / row.room)
    told = (
        f"nothing fits: the least that a step of {batch:,} rows takes is {gigabytes(least.peak)} "
        f"({least.name}) of {gigabytes(least.room)}"
    )
    most = max(rows, key=lambda row: row.largest_batch or 0)
    if most.largest_batch:
        return f"{told}; {most.name} takes {most.largest_batch:,} rows at most."
    return f"{told}; take more devices, or those with more memory."


def gigabytes(size: float) -> str:
    return f"{size / 1e9:,.3g} GB"
