"""The replicas of one of TensorFlow's own strategies, and sums over replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.keras.optimizers import apply_sum
from tfdist.training.engine.collective import Collective, OneProcess
from tfdist.training.layers.gradients import with_gradient


class TfReplicas(Collective):
    """Replicas that a strategy of TensorFlow's has made.

    Args:
        strategy: it.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        self.strategy = strategy
        self.num_replicas = strategy.num_replicas_in_sync

    def sum(self, tensor: Any, name: str) -> Any:
        return replica_sum(tensor)

    def apply(
        self,
        optimizer: Any,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        name: str = "gradient",
    ) -> None:
        apply_sum(optimizer, gradients, variables)

    def reduce_scatter(self, rows: Any, name: str) -> Any:
        # All replicas get the whole sum: TensorFlow scatters on GPUs alone.
        return replica_sum(rows)[tf.distribute.get_replica_context().replica_id_in_sync_group]

    def all_gather(self, row: Any, name: str) -> Any:
        return tf.distribute.get_replica_context().all_gather(row[None], axis=0)

    def distribute(self, dataset_fn: Callable[[], Any]) -> Any:
        # One element for each replica in turn: the feed has divided the global batch already.
        return self.strategy.distribute_datasets_from_function(lambda _: dataset_fn())


class Mirrors(TfReplicas, OneProcess):
    """The replicas of a MirroredStrategy."""

    fetches_ahead = True


def replica_sum(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the sum of ``tensor`` over all replicas; differentiable, to be called on each."""
    # Not ``all_reduce``: its custom gradient begins before the replicas meet, so that TensorFlow
    # walks back through all that the others have computed, in each call.
    context = tf.distribute.get_replica_context()
    total = context.merge_call(_reduced, args=(tf.stop_gradient(tensor),))
    return with_gradient(total, of=tensor, back=replica_sum)


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
