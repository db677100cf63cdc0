"""``tfdist.verify``: a strategy against one device, on the user's own model and data."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tfdist.equivalence.comparison import compare_once
from tfdist.equivalence.explanation import explain_difference
from tfdist.equivalence.report import Report
from tfdist.errors import OptionError

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

    Returns:
        The report on the chief; None on other ranks.

    Raises:
        OptionError: ``steps`` is less than 1, or ``seed`` is none.
    """
    import tensorflow as tf

    from tfdist.training.engine.options import check_seed

    if steps < 1:
        raise OptionError("steps must be at least 1", received=steps)
    check_seed(seed)
    feed = strategy.dataset(data, global_batch_size=global_batch_size, seed=seed, batched=batched)
    feed = feed.limited(steps)

    def compare(data: TrainingData, epochs: int) -> Report:
        # Every rank trains the reference too: none then waits for the chief, and all know alike.
        tf.keras.utils.set_random_seed(seed)
        return compare_once(model_fn, data, strategy, epochs, tolerance)

    report = compare(feed, math.ceil(steps / len(feed)))
    if explain and report.losses is None and not strategy.from_chief(report.exact):
        with _nothing_told_twice():
            explanation = explain_difference(model_fn, feed, strategy, compare, report.steps)
        report = replace(report, explanation=explanation)
    return report if strategy.topology.is_chief else None


@contextlib.contextmanager
def _nothing_told_twice() -> Iterator[None]:
    """Encloses comparisons after the first one, which has told what there is to tell."""
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield
