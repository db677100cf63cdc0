"""Which operations took the most time, and of which layer they are."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from tfdist.traces.rank import RankTrace

# What called the function that an operation stands in.
_CALLS = re.compile(r"^((Stateful)?PartitionedCall(_\d+)?/)+")
# Keras 3 and nested models number a scope that comes a second time.
_NUMBERED = re.compile(r"(.+)_\d+")


@dataclass(frozen=True)
class Longest:
    """An operation of the steps.

    Attributes:
        name: as TensorFlow calls it in its function.
        kind: such as "MatMul".
        layer: of the model, whose name is a part of that of the operation; None where none is.
        backward: whether it makes gradients.
        ms: of a step, on a rank at the mean of all.
    """

    name: str
    kind: str
    layer: str | None
    backward: bool
    ms: float


def longest(traces: list[RankTrace], count: int = 5) -> list[Longest]:
    """Returns the operations of the most time, the longest first."""
    totals: dict[tuple[str, str], float] = defaultdict(float)
    for trace in traces:
        made = trace.compute
        if not len(made.times):
            continue
        times = np.clip(made.times, trace.begun, trace.ended)
        sums = np.bincount(made.which, times[:, 1] - times[:, 0]) / trace.num_steps
        for number in np.flatnonzero(sums):
            totals[made.labels[number]] += float(sums[number])
    layers = {layer for trace in traces for layer in trace.notes["layers"]}
    order = sorted(totals, key=lambda key: (-totals[key], key))[:count]
    return [
        Longest(
            name=_CALLS.sub("", name),
            kind=kind,
            layer=layer_of(name, layers),
            backward=name.startswith("gradient") or "/gradient" in name or "Grad" in kind,
            ms=totals[name, kind] / len(traces) / 1e6,
        )
        for name, kind in order
    ]


def layer_of(name: str, layers: set[str]) -> str | None:
    """Returns the innermost layer in the name of an operation, such as "dense" of
    "gradient_tape/model/dense/MatMul/MatMul_1"."""
    for part in reversed(name.split("/")[:-1]):
        if part in layers:
            return part
        numbered = _NUMBERED.fullmatch(part)
        if numbered and numbered[1] in layers:
            return numbered[1]
    return None
