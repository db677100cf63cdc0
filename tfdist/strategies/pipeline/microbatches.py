"""A global batch, divided into microbatches whose rows differ by at most one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tensorflow as tf

from tfdist.strategies.pipeline.schedule import WHOLE


@dataclass(frozen=True)
class Microbatch:
    """Some rows of a global batch, or all of them.

    A microbatch that the uneven tail leaves without a row has one row of padding as inputs, and
    labels of zero rows.

    Attributes:
        labels: ``(y, sample_weight)``, of the true rows.
        rows: int or int [], the true rows.
        of: int or int [], those of the global batch.
        span: its first row and the one after its last, padding included; None: the whole batch.
    """

    labels: tuple[Any, Any]
    rows: Any
    of: Any
    span: tuple[Any, Any] | None

    @cached_property
    def is_real(self) -> Any:
        """Bool or bool [], False when all is padding."""
        return True if self.span is None else self.rows > 0

    def share(self, dtype: tf.DType) -> tf.Tensor:
        """Returns the part of the global batch that this is."""
        return tf.cast(self.rows, dtype) / tf.cast(self.of, dtype)

    def cut(self, whole: tf.Tensor) -> tf.Tensor:
        """Returns its rows of a whole batch, at least one."""
        return whole if self.span is None else whole[self.span[0] : self.span[1]]

    def true_rows(self, part: tf.Tensor) -> tf.Tensor:
        """Returns what ``cut`` gave without the padding."""
        return part if self.span is None else part[: self.rows]


def divide(of: Any, y: Any, sample_weight: Any, count: int) -> dict[int, Microbatch]:
    """Returns ``count`` microbatches by number, the larger ones first, and the ``WHOLE`` batch.

    Args:
        of: int or int [], the rows of the batch.
    """
    parts = {number: _part((y, sample_weight), number, count, of) for number in range(count)}
    parts[WHOLE] = Microbatch((y, sample_weight), rows=of, of=of, span=None)
    return parts


def _part(labels: Any, number: int, count: int, of: Any) -> Microbatch:
    if isinstance(of, int):  # Shapes stay static.
        rows = of // count + (number < of % count)
        start = number * (of // count) + min(number, of % count)
        span = (start, start + rows) if rows else (0, 1)
    else:
        rows = of // count + tf.cast(number < of % count, of.dtype)
        start = number * (of // count) + tf.minimum(number, of % count)
        span = (tf.where(rows > 0, start, 0), tf.where(rows > 0, start + rows, 1))
    return Microbatch(
        labels=tf.nest.map_structure(
            lambda tensor: None if tensor is None else tensor[start : start + rows], labels
        ),
        rows=rows,
        of=of,
        span=span,
    )
