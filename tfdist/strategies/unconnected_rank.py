"""One rank of several, without the others: its step can be traced, and not run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.strategies.base import ModelOrFn, called
from tfdist.strategies.data_parallel import DataParallel
from tfdist.topology import Topology
from tfdist.training.engine.collective import Collective, OneProcess
from tfdist.training.layers.gradients import with_gradient


class _Unanswered(OneProcess):
    """What a rank sends and receives, as operations of the sizes that these have."""

    steps_await_batches = True

    def __init__(self, ranks: int):
        self.num_replicas = self.num_processes = ranks
        self._sums = 0

    def sum(self, tensor: Any, name: str) -> Any:
        return with_gradient(self._sum(tf.stop_gradient(tensor)), of=tensor, back=self._sum)

    def _sum(self, tensor: Any) -> Any:
        """Returns a sum over all ranks, which no optimizer of graphs takes out."""
        self._sums += 1
        return tf.raw_ops.CollectiveReduce(
            input=tensor,
            group_size=self.num_replicas,
            group_key=1,
            instance_key=self._sums,
            merge_op="Add",
            final_op="Id",
            subdiv_offsets=[0],
        )

    def reduced(self, gradients: Sequence[Any], variables: Sequence[Any], name: str) -> list[Any]:
        return [None if one is None else self._reduced(one) for one in gradients]

    def _reduced(self, gradient: Any) -> Any:
        if not isinstance(gradient, tf.IndexedSlices):
            return self._sum(gradient)
        # Those of all ranks, one after the other.
        values, indices = map(self._of_all, (gradient.values, gradient.indices))
        return tf.IndexedSlices(values, indices, gradient.dense_shape)

    def _of_all(self, tensor: Any) -> Any:
        return tf.repeat(tensor, self.num_replicas, axis=0)

    def reduce_scatter(self, rows: Any, name: str) -> Any:
        return self._sum(rows[0])

    def all_gather(self, row: Any, name: str) -> Any:
        return self._of_all(row[None])

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.num_processes


class UnconnectedRank(DataParallel):
    """The first of ``ranks`` ranks.

    Args:
        ranks: how many share a global batch.
        of: the strategy whose rank it is, by which errors call it.
        shared: the options of all data-parallel strategies; see ``DataParallel``.
    """

    slots_can_be_offloaded = True
    divides_weights = True

    def __init__(self, ranks: int, of: str, **shared: Any):
        self.name = of
        super().__init__(**shared)
        self._collective = _Unanswered(ranks)

    @property
    def topology(self) -> Topology:
        return Topology(world_size=self._collective.num_processes)

    def connect(self) -> Collective:
        return self._collective

    def make_model(self, model_fn: ModelOrFn) -> Any:
        return called(model_fn)
