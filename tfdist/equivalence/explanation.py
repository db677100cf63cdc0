"""Where a strategy and one device part: the first layer, and the first step.

A layer whose outputs depend on how a batch is divided is found on the first batch, each layer by
itself. When weights part is found by comparisons of 1, 2, 4, ... steps: a fault is there after the
first, rounding grows with the steps.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.equivalence.comparison import independent
from tfdist.equivalence.report import Explanation, Report

if TYPE_CHECKING:
    import tensorflow as tf

    from tfdist.strategies.base import Strategy
    from tfdist.training.feed.training_data import TrainingData


def explain_difference(
    model_fn: Any,
    feed: TrainingData,
    strategy: Strategy,
    compared: Callable[[TrainingData, int], Report],
    steps: int,
) -> Explanation:
    """Looks for the first layer and the first step that part.

    Args:
        model_fn, strategy: as in ``verify``.
        feed: of the comparison that found a difference.
        compared: gives the report of a comparison of ``epochs`` epochs of a feed. All ranks call
            it alike.
        steps: of that comparison.
    """
    num_parts = max(2, strategy.num_replicas)
    taken, layers = [], []
    for count in _doubling(steps):
        limited = feed.limited(count)
        report = compared(limited, -(-count // len(limited)))
        taken.append(count)
        layers.append(report.layers)
        if not strategy.from_chief(report.exact):
            break
    return Explanation(
        parted=_parted(model_fn, feed, strategy, num_parts),
        num_parts=num_parts,
        steps=tuple(taken),
        layers=tuple(layers),
        tolerance=report.tolerance,
    )


def _doubling(steps: int) -> Iterator[int]:
    count = 1
    while count < steps:
        yield count
        count *= 2
    yield steps


def _parted(
    model_fn: Any, feed: TrainingData, strategy: Strategy, num_parts: int
) -> tuple[tuple[str, float], ...]:
    from tfdist.training.model.deferred_build import build_now
    from tfdist.training.steps.row_probe_layers import parted

    with contextlib.suppress(Exception):  # A model without a call, a layer that refuses few rows.
        model = independent(model_fn, strategy)
        build_now(model, feed)
        x = next(iter(feed.on_one_device().epochs(0, 1)))[0]
        found = parted(model, x, _parts_of(x, num_parts), _divided(model, strategy))
        return tuple((each.name, each.difference) for each in found)
    return ()


def _parts_of(x: Any, num_parts: int) -> list[slice]:
    import tensorflow as tf

    rows = len(tf.nest.flatten(x)[0])
    bounds = np.linspace(0, rows, min(num_parts, rows) + 1).astype(int)
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]


def _divided(model: tf.keras.Model, strategy: Strategy) -> list[tf.keras.layers.Layer]:
    """Returns the layers that see only their replica's rows: not BatchNormalization, as a rule."""
    import tensorflow as tf

    from tfdist.keras.layers import layers_in
    from tfdist.training.engine.options import OfBatchNorm

    is_apart = any(isinstance(cause, OfBatchNorm) for cause in strategy.approximations)
    return [
        layer
        for layer in layers_in(model)
        if is_apart or not isinstance(layer, tf.keras.layers.BatchNormalization)
    ]
