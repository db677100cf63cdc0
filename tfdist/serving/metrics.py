"""What is counted of a server, for Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

from tfdist.runs import prometheus

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Histogram:
    """Counts of values by upper bounds."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]):
        self._name, self._text, self._bounds = name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self) -> Iterator[str]:
        yield from prometheus.head(self._name, "histogram", self._text)
        totals = list(accumulate(self._counts))
        bounds = ({"le": bound} for bound in (*self._bounds, "+Inf"))
        yield from prometheus.numbers(f"{self._name}_bucket", zip(bounds, totals, strict=True))
        yield from prometheus.numbers(f"{self._name}_sum", [({}, self._sum)])
        yield from prometheus.numbers(f"{self._name}_count", [({}, totals[-1])])


class Metrics:
    """All of a server. The process that speaks HTTP counts, for it sees every request."""

    def __init__(self) -> None:
        self.seconds = Histogram(
            "tfdist_request_seconds", "Seconds from a predict request to its answer.", _SECONDS
        )
        self.batches = Histogram("tfdist_batch_rows", "Instances of a forward pass.", _ROWS)
        self.answers: Counter[int] = Counter()
        self.retried = 0

    def text(self, *, waiting: int, replicas: int) -> str:
        """Returns all of it.

        Args:
            waiting: requests that no replica has taken yet.
            replicas: processes that answer.
        """
        lines = [*self.seconds.lines(), *self.batches.lines()]
        answers = [({"code": code}, count) for code, count in sorted(self.answers.items())]
        retried, queued = [({}, self.retried)], [({}, waiting)]
        for name, kind, text, rows in (
            ("requests_total", "counter", "Answers to predict requests, by status.", answers),
            ("retried_total", "counter", "Requests given to another replica.", retried),
            ("queue_length", "gauge", "Requests that no replica has taken yet.", queued),
            ("serve_replicas", "gauge", "Processes that answer.", [({}, replicas)]),
        ):
            lines += prometheus.head(f"tfdist_{name}", kind, text)
            lines += prometheus.numbers(f"tfdist_{name}", rows)
        return "\n".join(lines) + "\n"
