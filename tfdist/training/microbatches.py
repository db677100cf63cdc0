"""A replica's share of a global batch, divided into microbatches whose rows differ by one."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def divide(batch: Any, share: tf.Tensor, count: int) -> list[tuple[Any, tf.Tensor]]:
    """Returns ``count`` microbatches, the larger ones first: each with its share.

    A microbatch that the uneven tail leaves without a row has one of padding, and a share of zero
    rows: all replicas take as many microbatches, for they may wait for each other in each.

    Args:
        batch: a structure of tensors [rows, ...]; None stands for what is not there.
        share: int64 [2], the true rows of the batch, and those of the global batch.
    """
    if count == 1:
        return [(batch, share)]
    each, more = share[0] // count, share[0] % count
    return [_part(batch, share[1], number, each, more) for number in range(count)]


def _part(
    batch: Any, of: tf.Tensor, number: int, each: tf.Tensor, more: tf.Tensor
) -> tuple[Any, tf.Tensor]:
    rows = each + tf.cast(number < more, tf.int64)
    start = number * each + tf.minimum(tf.constant(number, tf.int64), more)
    first = tf.where(rows > 0, start, 0)
    last = tf.where(rows > 0, start + rows, 1)
    part = tf.nest.map_structure(
        lambda tensor: None if tensor is None else tensor[first:last], batch
    )
    return part, tf.stack([rows, of])
