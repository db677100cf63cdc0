"""``tfdist.verify``: a strategy against one device, on the user's own model and data."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.equivalence.comparison import compare_once, independent
from tfdist.equivalence.report import Explanation, Report

if TYPE_CHECKING:
    import tensorflow as tf

    from tfdist.strategies.base import Strategy
    from tfdist.training.feed.training_data import TrainingData


def verify(
    model_fn: Callable[[], tf.keras.Model] | tf.keras.Model,
    data: Any,
    strategy: Strategy,
    *,
    steps: int = 20,
    global_batch_size: int = 64,
    seed: int = 0,
    tolerance: float = 1e-5,
    batched: bool | None = None,
    explain: bool = False,
    callbacks: Sequence[tf.keras.callbacks.Callback] = (),
) -> Report | None:
    """Trains ``steps`` steps on ``strategy`` and on one device, and compares.

    Args:
        model_fn: as in ``strategy.build``.
        data: as in ``strategy.dataset``.
        strategy: a started strategy; under a launcher every rank calls this.
        steps: steps to take, the last of each epoch on an uneven batch.
        global_batch_size: rows of one step.
        seed: of the weights and of the order of records.
        tolerance: the largest difference that counts as equal.
        batched: as in ``strategy.dataset``.
        explain: look, when the weights are others, for the first layer and the first step that
            part (``Report.explanation``). It takes some more comparisons.
        callbacks: of each training, on the strategy and on one device; they must change neither.

    Returns:
        The report on the chief; None on other ranks.

    Raises:
        OptionError: ``steps`` is less than 1, or ``seed`` is none.
    """
    import tensorflow as tf

    from tfdist.training.engine.options import check_count, check_seed

    check_count("steps", steps)
    check_seed(seed)
    feed = strategy.dataset(data, global_batch_size=global_batch_size, seed=seed, batched=batched)
    feed = feed.limited(steps)

    def compare(data: TrainingData, epochs: int) -> Report:
        # Every rank trains the reference too: none then waits for the chief, and all know alike.
        tf.keras.utils.set_random_seed(seed)
        return compare_once(model_fn, data, strategy, epochs, tolerance, callbacks)

    report = compare(feed, math.ceil(steps / len(feed)))
    if explain and report.losses is None and not strategy.from_chief(report.exact):
        # The first comparison has told what there is to tell.
        nowhere = io.StringIO()
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            explanation = explain_difference(model_fn, feed, strategy, compare, report.steps)
        report = replace(report, explanation=explanation)
    return report if strategy.topology.is_chief else None


def explain_difference(
    model_fn: Any,
    feed: TrainingData,
    strategy: Strategy,
    compared: Callable[[TrainingData, int], Report],
    steps: int,
) -> Explanation:
    """Looks for the first layer and the first step that part.

    A layer whose outputs depend on how a batch is divided is found on the first batch, each layer
    by itself. When weights part is found by comparisons of 1, 2, 4, ... steps: a fault is there
    after the first, rounding grows with the steps.

    Args:
        model_fn, strategy: as in ``verify``.
        feed: of the comparison that found a difference.
        compared: gives the report of a comparison of ``epochs`` epochs of a feed. All ranks call
            it alike.
        steps: of that comparison.
    """
    num_parts = max(2, strategy.num_replicas)
    taken, layers = [], []
    doubling = [2**power for power in range(steps.bit_length()) if 2**power < steps]
    for count in [*doubling, steps]:
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
