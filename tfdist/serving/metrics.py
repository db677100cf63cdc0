"""What is counted of a server, in the text format of Prometheus (version 0.0.4)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

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
        yield f"# HELP {self._name} {self._text}"
        yield f"# TYPE {self._name} histogram"
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{self._name}_bucket{{le="{bound}"}} {total}'
        yield f"{self._name}_sum {self._sum}"
        yield f"{self._name}_count {total}"


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
        lines += ["# HELP tfdist_requests_total Answers to predict requests, by status."]
        lines += ["# TYPE tfdist_requests_total counter"]
        lines += [
            f'tfdist_requests_total{{code="{code}"}} {n}'
            for code, n in sorted(self.answers.items())
        ]
        for name, kind, text, value in (
            ("retried_total", "counter", "Requests given to another replica.", self.retried),
            ("queue_length", "gauge", "Requests that no replica has taken yet.", waiting),
            ("replicas", "gauge", "Processes that answer.", replicas),
        ):
            lines += [f"# HELP tfdist_{name} {text}", f"# TYPE tfdist_{name} {kind}"]
            lines += [f"tfdist_{name} {value}"]
        return "\n".join(lines) + "\n"
