"""Steps of two models in one process, taken in turns, and the row that compares two figures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any


def row(work: str, baseline: float, ours: float, target: float | None) -> dict[str, Any]:
    """Returns what a benchmark tells of ``work``, of which less is better."""
    return {
        "work": work,
        "baseline": round(baseline, 3),
        "ours": round(ours, 3),
        "ratio": round(baseline / ours, 3),
        "target": target,
    }


def median_seconds(models: Sequence[Any], x: Any, steps: int) -> list[float]:
    """Returns the median seconds of a step of each model, without its first two.

    Args:
        x: a batch, which is its own label, too.
    """
    import tensorflow as tf

    batches = [iter(tf.data.Dataset.from_tensors((x, x)).repeat()) for _ in models]
    train = [model.make_train_function() for model in models]
    times: list[list[float]] = [[] for _ in models]
    for number in range(steps + 2):
        for step, batch, of_model in zip(train, batches, times, strict=True):
            start = time.perf_counter()
            step(batch)["loss"].numpy()
            if number >= 2:
                of_model.append(time.perf_counter() - start)
    return [statistics.median(each) for each in times]
