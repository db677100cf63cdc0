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
from tfdist.equivalence.report import TOLERANCES, UNKNOWN, UNTRIED, Report
from tfdist.errors import OptionError

if TYPE_CHECKING:
    import tensorflow as tf

    from tfdist.strategies.base import Strategy
    from tfdist.training.training_data import TrainingData

_ROUNDING = (
    "the rounding of float32, enlarged by the model itself (an input of ReLU or of a maximum that "
    "falls on the other side of the kink, a saturated softmax or sigmoid whose crossentropy is "
    "clipped at 1e-7, or a gradient near 0 that Adam divides by itself)"
)


def verify(
    model_fn: Callable[[], tf.keras.Model] | tf.keras.Model,
    data: Any,
    strategy: Strategy,
    *,
    steps: int = 20,
    global_batch_size: int = 64,
    seed: int = 0,
    tolerance: float | None = None,
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
        tolerance: the largest difference that counts as exact. None: 1e-5 in float32, 2e-3 in
            mixed_float16, 1e-2 in mixed_bfloat16.
        batched: as in ``strategy.dataset``.
        explain: look, when the weights are others, for the first layer and the first step that
            part (``Report.explanation``). It takes some more comparisons.

    Returns:
        The report on the chief; None on other ranks.

    Raises:
        OptionError: ``steps`` is less than 1, or ``seed`` is none.
    """
    import tensorflow as tf

    from tfdist.training.options import check_seed

    if steps < 1:
        raise OptionError("steps must be at least 1", received=steps)
    check_seed(seed)
    feed = strategy.dataset(data, global_batch_size=global_batch_size, seed=seed, batched=batched)
    feed = feed.limited(steps)
    precision = strategy.precision or tf.keras.mixed_precision.global_policy().name
    if tolerance is None:
        tolerance = TOLERANCES.get(precision, TOLERANCES["float32"])

    def compare(data: TrainingData, epochs: int, tolerance: float = tolerance) -> Report:
        # Every rank trains the reference too: none then waits for the chief, and all know alike.
        tf.keras.utils.set_random_seed(seed)
        return compare_once(model_fn, data, strategy, epochs, tolerance)

    epochs = math.ceil(steps / len(feed))
    report = replace(compare(feed, epochs), precision=precision)
    is_mixed = precision.startswith("mixed")
    if report.losses is None and (is_mixed or not strategy.from_chief(report.exact)):
        if not report.causes and not isinstance(model_fn, tf.keras.Model):
            again = _in_float64(compare, feed, epochs)
            if again is not None:
                report = replace(report, float64_difference=again.difference, causes=again.causes)
        if report.exact:
            if report.difference > report.tolerance:
                report = replace(report, causes=(_ROUNDING,))
        elif not report.causes:
            report = replace(report, causes=(_unexplained(report),))
        if explain and not strategy.from_chief(report.exact):
            with _nothing_told_twice():
                explanation = explain_difference(model_fn, feed, strategy, compare, report.steps)
            report = replace(report, explanation=explanation)
    return report if strategy.topology.is_chief else None


def _in_float64(
    compare: Callable[[TrainingData, int, float], Report], feed: TrainingData, epochs: int
) -> Report | None:
    """Returns the comparison without float32's rounding; None where the model cannot take that.

    It cannot where it makes tensors of float32 itself, alike on all ranks.
    """
    import tensorflow as tf

    with _floatx("float64"), _nothing_told_twice():
        try:
            return compare(feed, epochs, 1e-6)
        except (TypeError, ValueError, tf.errors.InvalidArgumentError):
            return None


def _unexplained(report: Report) -> str:
    if report.float64_difference is None:
        return UNTRIED
    if report.precision == "float32" or not report.exact_in_float64:
        return UNKNOWN
    return f"the rounding of {report.precision}, or updates that its loss scale has skipped"


@contextlib.contextmanager
def _nothing_told_twice() -> Iterator[None]:
    """Encloses comparisons after the first one, which has told what there is to tell."""
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


@contextlib.contextmanager
def _floatx(dtype: str) -> Iterator[None]:
    import tensorflow as tf

    from tfdist.training.keras_api import set_policy

    before, policy = tf.keras.backend.floatx(), tf.keras.mixed_precision.global_policy()
    tf.keras.backend.set_floatx(dtype)
    set_policy(None)  # It follows floatx.
    try:
        yield
    finally:
        tf.keras.backend.set_floatx(before)
        set_policy(None if policy.name == before else policy)
