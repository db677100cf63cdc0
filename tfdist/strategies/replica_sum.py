"""Sums over the replicas of one of TensorFlow's own strategies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.training.layers.gradients import with_gradient


def replica_sum(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the sum of ``tensor`` over all replicas; differentiable, to be called on each."""
    # Not ``all_reduce``: its custom gradient begins before the replicas meet, so that TensorFlow
    # walks back through all that the others have computed, in each call.
    context = tf.distribute.get_replica_context()
    total = context.merge_call(_reduced, args=(tf.stop_gradient(tensor),))
    return with_gradient(total, of=tensor, back=replica_sum)


def replica_row(rows: tf.Tensor) -> tf.Tensor:
    """Returns this replica's row of the sum of ``rows`` over all replicas; to be called on each.

    All replicas get the whole sum: TensorFlow scatters on GPUs alone.

    Args:
        rows: [replicas, ...].
    """
    return replica_sum(rows)[tf.distribute.get_replica_context().replica_id_in_sync_group]


def all_rows(row: tf.Tensor) -> tf.Tensor:
    """Returns the rows of all replicas, [replicas, ...]; to be called on each."""
    return tf.distribute.get_replica_context().all_gather(row[None], axis=0)


@tf.autograph.experimental.do_not_convert
def _reduced(strategy: Any, values: Any) -> Any:
    # In a batch: ``reduce_to`` alone takes one replica's tensor for the sum.
    add = tf.distribute.ReduceOp.SUM
    return strategy.extended.batch_reduce_to(add, [(values, values)])[0]


def flat_sum(
    values: Sequence[np.ndarray], total_of: Callable[[np.ndarray], np.ndarray]
) -> list[np.ndarray]:
    """Returns the sums over processes of ``values``, each as it was in shape and dtype.

    Args:
        total_of: sends float64 [elements]; returns the sum of what all processes send.
    """
    if not values:
        return []
    flat = np.concatenate([np.ravel(value).astype(np.float64) for value in values])
    pieces = np.split(total_of(flat), np.cumsum([value.size for value in values])[:-1])
    return [
        piece.reshape(value.shape).astype(value.dtype)
        for piece, value in zip(pieces, values, strict=True)
    ]
