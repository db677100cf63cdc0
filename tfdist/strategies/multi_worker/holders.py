"""Workers that each hold a model which another strategy has divided among their devices.

Neither is such a model made in the scope of a MultiWorkerMirroredStrategy, nor do its steps run in
one. So they call TensorFlow's collectives themselves: see ``launcher``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import ModelError
from tfdist.keras.tensors import raw
from tfdist.strategies.multi_worker.cluster import (
    BETWEEN_STEPS,
    OF_STEPS,
    Cluster,
    launcher,
    words_of,
)
from tfdist.strategies.replica_sum import flat_sum
from tfdist.topology import Topology
from tfdist.training.layers.gradients import with_gradient
from tfdist.training.memory.flat_parts import Division, buckets


class Holders(Cluster):
    """One replica in each process; steps meet on the first of its devices.

    Args:
        place: of this worker, which is connected with the others.
        deadlines: see ``Cluster``.
    """

    steps_await_batches = True

    def __init__(self, place: Topology, **deadlines: float):
        super().__init__(place, **deadlines)
        self.num_replicas = place.world_size
        kind = "GPU" if tf.config.get_visible_devices("GPU") else "CPU"
        self._launcher = launcher(OF_STEPS, place, kind)
        self._between_steps = launcher(BETWEEN_STEPS, place, "CPU")
        self._scatters = kind == "CPU"
        self._gather_words = tf.function(self._between_steps.all_gather, reduce_retracing=True)

    # Inside a step ------------------------------------------------------------------------------

    def sum(self, tensor: Any, name: str) -> Any:
        total = self._launcher.all_reduce(tf.stop_gradient(tensor))
        return with_gradient(total, of=tensor, back=self._launcher.all_reduce)

    def reduced(self, gradients: Sequence[Any], variables: Sequence[Any], name: str) -> list[Any]:
        means: list[Any] = [None] * len(gradients)
        dense = []
        for index, gradient in enumerate(gradients):
            if isinstance(gradient, tf.IndexedSlices):
                means[index] = self._mean_of_slices(gradient)
            elif gradient is not None:
                dense.append(index)
        divisions = [
            # Undivided: a bucket has one row.
            Division(tuple(variables[i].shape), 1, gradients[i].dtype, raw(variables[i]).device)
            for i in dense
        ]
        # The gradients of the last layers are there first.
        for bucket in buckets(divisions, range(len(dense))[::-1]):
            of_bucket = [dense[number] for number in bucket.indices]
            with tf.device(bucket.divisions[0].device):
                rows = bucket.rows([gradients[index] for index in of_bucket])
            mean = self._mean(rows)
            with tf.device(bucket.divisions[0].device):
                wholes = bucket.wholes(mean)
            for index, whole in zip(of_bucket, wholes, strict=True):
                means[index] = whole
        return means

    def _mean(self, tensor: Any) -> Any:
        return self._launcher.all_reduce(tensor) / self.num_replicas

    def _mean_of_slices(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        """Returns the mean of an embedding's gradients, which are the rows that were looked up.

        Raises:
            ModelError: several steps run at a time, in a loop.
        """
        if _is_in_control_flow():
            raise ModelError(
                "looked-up rows must be exchanged step by step with replicas='multi_worker', since "
                "TensorFlow takes one shape for all rounds of a loop",
                received="a loop of steps around an Embedding: steps_per_execution",
                mend="Leave it out of compile(), use replicas='horovod', or shard='optimizer'",
            )
        total = self._launcher.all_reduce_indexed_slices(slices)
        values = total.values / self.num_replicas
        return tf.IndexedSlices(values, total.indices, slices.dense_shape)

    def reduce_scatter(self, rows: Any, name: str) -> Any:
        if self._scatters:
            return self._launcher.row_of_sum(rows) / self.num_replicas
        return self._mean(rows)[self.process]

    def all_gather(self, row: Any, name: str) -> Any:
        return self._launcher.all_rows(row)

    # Between steps ------------------------------------------------------------------------------

    def merge(self, values: list[Any]) -> list[Any]:
        return flat_sum(values, self._total_of)

    def _total_of(self, array: np.ndarray) -> np.ndarray:
        return self._between_steps.all_reduce(tf.constant(array)).numpy()

    def _rows_of_all(self, rows: np.ndarray) -> list[np.ndarray]:
        sizes = self._gather_words(tf.constant([rows.size]), 0).numpy()
        return np.split(self._gather_words(tf.constant(rows), 0).numpy(), np.cumsum(sizes)[:-1])

    def broadcast(self, variables: Sequence[Any]) -> None:
        # One after the other: a model that is divided may be large. As words: of any dtype, exact.
        for variable in variables:
            own = variable.numpy()
            if own.size == 0:  # There is nothing to send.
                continue
            words = words_of(own.tobytes())
            words = self._total_of(words if self.is_chief else np.zeros_like(words))
            chiefs = np.frombuffer(words.tobytes()[: own.nbytes], own.dtype)
            variable.assign(chiefs.reshape(own.shape))


def _is_in_control_flow() -> bool:
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        if getattr(graph, "is_control_flow_graph", False):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False
