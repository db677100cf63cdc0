"""How much the gradients of parts of a batch differ: what a larger batch would still gain.

A part of r rows has the mean gradient G_r of its rows, whose square is |G|² + S / r in the mean:
|G|² of the true gradient, and S, the sum of the variances of its elements over rows. So the mean
square of the parts and that of the whole batch of B rows tell both:

    S = (mean |G_r|² - |G_B|²) / (mean 1/r - 1/B),    |G|² = |G_B|² - S / B.

For parts of one size that is McCandlish et al. 2018 (arXiv:1812.06162, appendix A.1), and what
AdaptDL (Qiao et al. 2021) computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.keras.optimizers import inner_of
from tfdist.training.engine.collective import Collective
from tfdist.training.layers import losses

_SUMS = 3


class GradientNoise:
    """Adds S and |G|² up over steps, beside the training: it changes none of its numbers.

    Attributes:
        sums: float32 [3]: of S, of |G|², and of the steps that told them; alike on all replicas.
    """

    def __init__(self, collective: Collective):
        self._collective = collective
        # Each replica adds to its own; they are read as a mean, once in an epoch.
        self.sums = tf.Variable(
            tf.zeros([_SUMS]),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.MEAN,
            name="gradient_noise",
        )

    def optimizer(
        self, own: Any, parts: Sequence[tuple[Sequence[Any], tf.Tensor]], share: tf.Tensor
    ) -> Any:
        """Returns what takes the place of a model's optimizer for one step.

        Args:
            own: that optimizer.
            parts: the gradients of each part on this replica, and its share: int64 [2], its rows
                and those of the global batch.
            share: of the replica.
        """
        scale = losses.uncounted(self._collective)
        told = tf.zeros([_SUMS])
        for gradients, rows in parts:
            part = losses.part_of(rows) * scale
            square = tf.math.divide_no_nan(squared(gradients), part**2)
            is_real = tf.cast(rows[0] > 0, tf.float32)
            inverse = tf.math.reciprocal_no_nan(tf.cast(rows[0], tf.float32))
            told += tf.stack([square, inverse, is_real])
        square, inverse, count = tf.unstack(self._collective.sum(told, "gradient_noise"))
        inverse_of_all = 1 / tf.cast(share[1], tf.float32)

        def seen(gradients: Sequence[Any]) -> None:
            of_all = squared(gradients)
            variance = (square / count - of_all) / (inverse / count - inverse_of_all)
            signal = of_all - variance * inverse_of_all
            found = tf.stack([variance, signal, 1.0])
            # One part that has all rows tells nothing; with a loss scale some are not finite.
            is_known = tf.reduce_all(tf.math.is_finite(found))
            self.sums.assign_add(tf.where(is_known, found, tf.zeros([_SUMS])))

        return _Seen(own, seen)


def squared(gradients: Sequence[Any]) -> tf.Tensor:
    """Returns the sum of the squares of all elements, float32 []; look-ups of one row are one."""
    found = tf.zeros([])
    for gradient in gradients:
        if isinstance(gradient, tf.IndexedSlices):
            rows, places = tf.unique(gradient.indices)
            values = tf.cast(gradient.values, tf.float32)
            gradient = tf.math.unsorted_segment_sum(values, places, tf.size(rows))
        if gradient is not None:
            found += tf.reduce_sum(tf.square(tf.cast(gradient, tf.float32)))
    return found


class _Seen:
    """An optimizer whose gradients are seen when they are those of the global batch."""

    def __init__(self, own: Any, seen: Any):
        self._own = own
        self._seen = seen
        self.inner_optimizer = inner_of(own)

    def apply_gradients(self, pairs: Any) -> Any:
        pairs = list(pairs)
        self._seen([gradient for gradient, _ in pairs])
        return self._own.apply_gradients(pairs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)
