"""Prometheus' text format: https://prometheus.io/docs/instrumenting/exposition_formats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

Rows = Iterable[tuple[Mapping[str, object], float]]


def head(name: str, kind: str, meaning: str) -> Iterator[str]:
    """Yields the lines before the numbers of a metric."""
    yield f"# HELP {name} {meaning}"
    yield f"# TYPE {name} {kind}"


def numbers(name: str, rows: Rows) -> Iterator[str]:
    """Yields a line for each (labels, value)."""
    for labels, value in rows:
        told = ",".join(f'{label}="{_escaped(str(of))}"' for label, of in labels.items())
        yield f"{name}{f'{{{told}}}' if told else ''} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
