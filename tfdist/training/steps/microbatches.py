"""A replica's share of a global batch, divided into microbatches whose rows differ by one."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.training.feed.division import piece


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
    return [piece(batch, share, count, number) for number in range(count)]
