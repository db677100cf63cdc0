"""The rows that a process has of a global batch, in microbatches that differ by at most one row.

A rank that the uneven tail leaves without a row has a batch of one row of padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.strategies.pipeline.schedule import WHOLE
from tfdist.training.engine.collective import Collective
from tfdist.training.feed.division import even_share, or_padding
from tfdist.training.layers import losses
from tfdist.training.model.logits import changed


@dataclass(frozen=True)
class Microbatch:
    """Some rows of a batch, or all of them.

    A microbatch that the uneven tail leaves without a row has one row of padding as inputs, and
    labels of zero rows.

    Attributes:
        labels: ``(y, sample_weight)``, of the true rows.
        rows: int or int [], the true rows.
        of: int or int [], those of the batch.
        held: int or int [], its rows as they stand in the batch, which may be all padding.
        is_real: bool or bool [], False when all is padding.
        span: its first row and the one after its last, padding included; None: the whole batch.
    """

    labels: tuple[Any, Any]
    rows: Any
    of: Any
    held: Any
    is_real: Any
    span: tuple[Any, Any] | None

    def share(self, dtype: tf.DType) -> tf.Tensor:
        """Returns the part of the batch that this is."""
        return tf.math.divide_no_nan(tf.cast(self.rows, dtype), tf.cast(self.of, dtype))

    def cut(self, whole: tf.Tensor) -> tf.Tensor:
        """Returns its rows of a whole batch, at least one."""
        return whole if self.span is None else whole[self.span[0] : self.span[1]]

    def true_rows(self, part: tf.Tensor) -> tf.Tensor:
        """Returns what ``cut`` gave without any padding."""
        return part if self.span is None and self.is_real is True else part[: self.rows]

    def held_rows(self, part: tf.Tensor) -> tf.Tensor:
        """Returns what ``cut`` gave without padding that is not in the batch."""
        return part if self.span is None else part[: self.held]


def divide(
    size: Any, y: Any, sample_weight: Any, count: int, *, is_real: Any = True
) -> dict[int, Microbatch]:
    """Returns ``count`` microbatches by number, the larger ones first, and the ``WHOLE`` batch.

    Args:
        size: int or int [], the rows of the batch as it is.
        is_real: bool [], False when the batch is a row of padding.
    """

    def true(rows: Any) -> Any:
        return rows if is_real is True else tf.where(is_real, rows, 0)

    def microbatch(start: Any, held: Any, span: tuple[Any, Any] | None) -> Microbatch:
        rows, labels = true(held), (y, sample_weight)
        if span is not None or is_real is not True:
            labels = tf.nest.map_structure(
                lambda tensor: None if tensor is None else tensor[start : start + rows], labels
            )
        is_own = is_real if span is None else rows > 0
        return Microbatch(labels, rows, true(size), held, is_own, span)

    parts = {}
    for number in range(count):
        # Of a size that is an int all are ints, so that shapes stay static.
        start, held = even_share(size, count, number)
        parts[number] = microbatch(start, held, or_padding(start, held))
    return parts | {WHOLE: microbatch(0, size, None)}


@dataclass(frozen=True)
class Share:
    """The rows of one rank of a global batch, or of one process that is all.

    Microbatches divide a rank's own rows. A loss is that of these rows, so its gradient counts by
    the rank's part of the global batch, and the ranks' gradients add up to those of one device.

    Attributes:
        is_real: bool or bool [], False when the batch is a row of padding.
        of_mean: float or float []: what the gradient of a mean over the rows is multiplied by.
        of_sum: float: the same of a sum over them.
        told: int64 [2], what the feed says: the true rows, and those of the global batch; None
            where one process has all.
    """

    is_real: Any = True
    of_mean: Any = 1.0
    of_sum: float = 1.0
    told: Any = None

    def true_rows(self, structure: Any) -> Any:
        """Returns tensors without padding, with the logits that a loss looks for."""
        if self.told is None:
            return structure
        rows = self.told[0]
        return tf.nest.map_structure(
            lambda tensor: None if tensor is None else changed(lambda t: t[:rows], tensor),
            structure,
        )

    def weights_of_sum(self, model: tf.keras.Model, y_pred: Any, sample_weight: Any) -> Any:
        """Returns weights with which the sum over the rows is shown as part of that of all."""
        if self.told is None:
            return sample_weight
        return losses.weights_of_sum(model, y_pred, sample_weight, self.told)


def share_of(data: Any, ranks: Collective) -> tuple[Any, Share]:
    """Returns the batch in what a feed has given, and the share that it is."""
    if not ranks.shares_batches:
        return data, Share()
    batch, told = data
    factor = losses.uncounted(ranks)
    part = losses.part_of(told)
    return batch, Share(told[0] > 0, part * factor, factor, told)
