"""How many replicas a load wants: a rule of numbers alone, which knows no clock and no process."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

LOOK_BACK_S = 2.0
#: Requests that are read, wait or are being answered: beyond, a client does better to ask later.
MOST_INSIDE = 1024


@dataclass(frozen=True)
class Scaling:
    """The bounds of the rule, and how soon it is followed.

    Attributes:
        least: replicas, >= 0.
        most: replicas, >= max(1, least).
        target: requests at a time for each replica, > 0.
        up_delay_s: how long more must be wanted before there are more.
        down_delay_s: how long fewer must be wanted before there are fewer.
        is_scaled: whether there are bounds, and a lost one is started again; else their number is
            fixed.
    """

    least: int
    most: int
    target: float
    up_delay_s: float
    down_delay_s: float
    is_scaled: bool = True

    @property
    def first(self) -> int:
        """How many a server begins with: one at least, which shows that the model loads."""
        return max(1, self.least)

    def wanted(self, ongoing: float) -> int:
        """Returns how many replicas these requests at a time want."""
        return min(max(math.ceil(ongoing / self.target), self.least), self.most)


class Rule:
    """Ray Serve's: requests at a time, averaged over ``LOOK_BACK_S``, over those of a replica.

    More are started when more have been wanted for a while, fewer left likewise. Without any the
    first request waits for one, so that there is no such while.
    Source: Ray 2.40, ``serve/autoscaling_policy.py``.
    """

    def __init__(self, how: Scaling):
        self._how = how
        self._samples: deque[tuple[float, int]] = deque()
        self._more_since: float | None = None
        self._fewer_since: float | None = None
        self.replicas = how.first
        #: Requests at a time, on average.
        self.ongoing = 0.0

    def observe(self, now: float, ongoing: int) -> int:
        """Returns how many replicas there are to be.

        Args:
            now: in seconds, no earlier than that of the last call.
            ongoing: requests that wait or are being answered.
        """
        self._samples.append((now, ongoing))
        while self._samples[0][0] <= now - LOOK_BACK_S:
            self._samples.popleft()
        self.ongoing = sum(count for _, count in self._samples) / len(self._samples)
        wanted = self._how.wanted(self.ongoing)
        self._more_since = _since(self._more_since, now, wanted > self.replicas)
        self._fewer_since = _since(self._fewer_since, now, wanted < self.replicas)
        up_delay_s = self._how.up_delay_s if self.replicas else 0.0
        is_due = (self._more_since is not None and now - self._more_since >= up_delay_s) or (
            self._fewer_since is not None and now - self._fewer_since >= self._how.down_delay_s
        )
        if is_due:
            self.replicas = wanted
            self._more_since = self._fewer_since = None
        return self.replicas


def _since(earlier: float | None, now: float, holds: bool) -> float | None:
    """Returns since when something holds; None where it does not."""
    if not holds:
        return None
    return now if earlier is None else earlier
