"""Who works in an elastic job, as its driver (``launch.elastic_driver``) tells in events."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from tfdist.errors import LaunchError
from tfdist.launch.failure import Failure, ending

_EVENTS = ("world", "lost", "unfit", "waiting", "anew", "no discovery")


@dataclass(frozen=True, kw_only=True)
class Elasticity:
    """How a job may change.

    Attributes:
        min_workers: with fewer it cannot go on.
        is_fixed: whether a lost worker has no successor.
    """

    min_workers: int
    is_fixed: bool


class Membership:
    """Follows the workers of one job.

    Args:
        elasticity: of the job.
        timeout_s: within which those that go on must have met again.
    """

    def __init__(self, elasticity: Elasticity, timeout_s: float):
        self._elasticity = elasticity
        self._timeout_s = timeout_s
        self._ranks: dict[int, int] = {}
        self._lost: list[dict[str, Any]] = []
        self._waiting_since: float | None = None
        self._places: dict[int, str] = {}

    def concerns(self, event: dict) -> bool:
        """Whether an event is the driver's."""
        return event["event"] in _EVENTS

    def rank_of(self, number: int) -> int:
        """Returns the present rank of a worker."""
        return self._ranks.get(number, number)

    def is_member(self, number: int) -> bool:
        """Whether a worker belongs to the present world."""
        return not self._ranks or number in self._ranks

    def note_step(self, number: int, event: dict) -> None:
        """Takes a worker's report of a step: where it was last heard of."""
        if event["event"] == "step" and event["step"] is not None:
            # A prediction has no epochs.
            epoch = f" of epoch {event['epoch'] + 1}" if "epoch" in event else ""
            self._places[number] = f"step {event['step']}{epoch}"

    @property
    def first_failure(self) -> Failure | None:
        """The first loss that nobody has gone on from."""
        if not self._lost:
            return None
        return Failure(self._lost[0]["number"], self._lost[0]["code"])

    @property
    def losses(self) -> str:
        """Those that nobody has gone on from, in words; empty when there are none."""
        told = []
        for event in self._lost:
            place = self._places.get(event["number"])
            heard = f", last heard of at {place}" if place else ""
            name = f"rank {event['rank']} on {event['host']}"
            told.append(f"{name} was lost ({ending(event['code'])}{heard})")
        return "; ".join(told)

    def take(self, event: dict) -> str | None:
        """Takes an event of the driver's; returns what a user should hear of it.

        Raises:
            LaunchError: too few workers are left, and none can come.
        """
        if event["event"] == "world":
            return self._begin_world(
                {int(n): rank for n, rank in event["ranks"].items()}, event["given_up"]
            )
        if event["event"] == "no discovery":
            return event["text"]
        if event["event"] == "anew":
            return (
                "a worker was lost while all met; the others start anew and go on from their last "
                "commit"
            )
        if event["event"] == "unfit":
            how = ending(event["code"])
            return f"a worker on {event['host']} ended before it could join ({how})"
        if event["event"] == "lost":
            self._lost.append(event)
            # Where all have failed, their own words say why.
            if self._elasticity.is_fixed and 0 < self._left < self._elasticity.min_workers:
                raise self._too_few()
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()
        return None

    def forgive(self, seconds: float) -> None:
        """Does not count time in which those that are to meet could not run."""
        if self._waiting_since is not None:
            self._waiting_since += seconds

    def check_deadline(self) -> None:
        """Raises:
        LaunchError: those that go on have not met within the deadline.
        """
        since = self._waiting_since
        if since is None or time.monotonic() - since < self._timeout_s:
            return
        if self._left < self._elasticity.min_workers:
            raise self._too_few()
        met = f"no meeting of {_workers(self._left)}"
        raise LaunchError(
            f"the workers of an elastic job must meet again within {self._timeout_s:g} s",
            received="; ".join(filter(None, [met, self.losses])),
            mend="Look for a worker that hangs, or raise --start-timeout",
        )

    def _begin_world(self, ranks: dict[int, int], given_up: int) -> str | None:
        before, self._ranks = self._ranks, ranks
        told = self.losses
        joined = len(ranks.keys() - before.keys()) if before else 0
        self._lost, self._waiting_since = [], None
        news = [told] if told else []
        if given_up:
            news.append(f"{_workers(given_up)} no longer offered")
        if joined:
            news.append(f"{_workers(joined)} joined")
        return f"{'; '.join(news)}; going on with {_workers(len(ranks))}" if news else None

    @property
    def _left(self) -> int:
        return len(self._ranks) - len(self._lost)

    def _too_few(self) -> LaunchError:
        least, left = self._elasticity.min_workers, self._left
        return LaunchError(
            f"an elastic job must have at least {_workers(least)} to go on",
            received=": ".join(filter(None, [f"{left or 'none'} left", self.losses])),
            mend=f"Give --min-workers {max(1, left)}, slots for new workers by --host-discovery, "
            "or --max-restarts",
        )


def _workers(count: int) -> str:
    return f"{count} worker" + ("" if count == 1 else "s")
