"""A ``record_fn`` over all records of a client, with random numbers of its own for each."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.records.reading.record_fn import PerRecord, RecordFn, seeds_of
from tfdist.records.reading.source import order_seed

# Records of a client are counted from a number of the client's: nobody has so many.
_APART = 1 << 32


class OneByOne:
    """Changes the records of clients one by one: the same in each try of the same round.

    Attributes:
        spec: of all records of a client, after the change.

    Raises:
        DataError: what the function returns makes no batch.
    """

    def __init__(self, record_fn: RecordFn, spec: Any, seed: int):
        self._per_record = PerRecord(record_fn, spec)
        self._seed = seed
        self.spec = self._per_record.spec
        of_one = tf.nest.map_structure(
            lambda leaf: tf.TensorSpec(leaf.shape[1:], leaf.dtype), self.spec
        )

        def changed(records: Any, seeds: tf.Tensor) -> Any:
            return tf.map_fn(
                lambda one: self._per_record(*one), (records, seeds), fn_output_signature=of_one
            )

        signature = (tuple(spec), tf.TensorSpec([None, 2], tf.int32))
        traced = tf.function(changed, input_signature=signature, autograph=False)
        self._changed = traced.get_concrete_function()

    def __call__(self, records: Any, client: int, epoch: int) -> Any:
        """Returns the records of a client as they are in one epoch.

        Args:
            client: its number.
            epoch: on which the random numbers depend.
        """
        tensors = tf.nest.map_structure(tf.convert_to_tensor, tuple(records))
        rows = len(tf.nest.flatten(tensors)[0])
        numbers = tf.range(client * _APART, client * _APART + rows, dtype=tf.int64)
        seeds = seeds_of(numbers, order_seed(self._seed, epoch))
        leaves = (*tf.nest.flatten(tensors), seeds)
        return tf.nest.pack_sequence_as(self.spec, tf.nest.flatten(self._changed(*leaves)))
