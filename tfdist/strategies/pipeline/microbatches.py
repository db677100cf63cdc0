"""A global batch, divided into microbatches whose rows differ by at most one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf


@dataclass(frozen=True)
class Microbatch:
    """Some rows of a global batch.

    A microbatch that the uneven tail leaves without a row has one row of padding as inputs, and
    labels of zero rows.

    Attributes:
        inputs: one tensor for each input of the model; at least one row.
        labels: ``(y, sample_weight)``, of the true rows.
        rows: int or int [], the true rows.
        of: int or int [], those of the global batch.
    """

    inputs: list[tf.Tensor]
    labels: tuple[Any, Any]
    rows: Any
    of: Any

    @property
    def is_real(self) -> Any:
        return self.rows > 0

    def share(self, dtype: tf.DType) -> tf.Tensor:
        """Returns the part of the global batch that this is."""
        return tf.cast(self.rows, dtype) / tf.cast(self.of, dtype)


def divide(inputs: list[tf.Tensor], y: Any, sample_weight: Any, count: int) -> list[Microbatch]:
    """Returns ``count`` microbatches, the larger ones first."""
    of = inputs[0].shape[0]
    if of is None:
        of = tf.shape(inputs[0])[0]
    return [_part(inputs, (y, sample_weight), number, count, of) for number in range(count)]


def _part(inputs: list[tf.Tensor], labels: Any, number: int, count: int, of: Any) -> Microbatch:
    if isinstance(of, int):  # Shapes stay static.
        rows = of // count + (number < of % count)
        start = number * (of // count) + min(number, of % count)
        first, last = (start, start + rows) if rows else (0, 1)
    else:
        rows = of // count + tf.cast(number < of % count, of.dtype)
        start = number * (of // count) + tf.minimum(number, of % count)
        first = tf.where(rows > 0, start, 0)
        last = tf.where(rows > 0, start + rows, 1)
    return Microbatch(
        inputs=[tensor[first:last] for tensor in inputs],
        labels=tf.nest.map_structure(
            lambda tensor: None if tensor is None else tensor[start : start + rows], labels
        ),
        rows=rows,
        of=of,
    )
