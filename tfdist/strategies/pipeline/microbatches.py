"""The rows that a process has of a global batch, in microbatches that differ by at most one row.

A rank that the uneven tail leaves without a row has a batch of one row of padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.strategies.pipeline.schedule import WHOLE
from tfdist.training.feed.division import even_share, or_padding


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
    batch = _Batch((y, sample_weight), size, is_real)
    parts = {number: batch.part(number, count) for number in range(count)}
    return parts | {WHOLE: batch.whole()}


@dataclass(frozen=True)
class _Batch:
    labels: tuple[Any, Any]
    size: Any
    is_real: Any

    def part(self, number: int, count: int) -> Microbatch:
        # Of a size that is an int all are ints, so that shapes stay static.
        start, held = even_share(self.size, count, number)
        return self._microbatch(start, held, or_padding(start, held))

    def whole(self) -> Microbatch:
        return self._microbatch(0, self.size, None)

    def _microbatch(self, start: Any, held: Any, span: tuple[Any, Any] | None) -> Microbatch:
        rows = self._true(held)
        labels = self.labels
        if span is not None or self.is_real is not True:
            labels = tf.nest.map_structure(
                lambda tensor: None if tensor is None else tensor[start : start + rows], labels
            )
        return Microbatch(
            labels=labels,
            rows=rows,
            of=self._true(self.size),
            held=held,
            is_real=self.is_real if span is None else rows > 0,
            span=span,
        )

    def _true(self, rows: Any) -> Any:
        return rows if self.is_real is True else tf.where(self.is_real, rows, 0)
