"""The update of a step whose slots lie in parts: ``shard="optimizer"``.

Gradients are added up in buckets, of which each replica gets its parts. It updates its parts of the
weights as the user's optimizer does, and all gather the parts of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist import keras
from tfdist.training.engine.binding import Binding
from tfdist.training.layers import clipping
from tfdist.training.layers.clipping import not_added_up
from tfdist.training.layers.gradients import changed
from tfdist.training.layers.losses import uncounted
from tfdist.training.memory.flat_parts import Bucket, buckets
from tfdist.training.memory.sharded_slots import Parts, ShardedSlots


class ShardedUpdate:
    """Takes the place of ``Collective.apply`` in the steps that all data-parallel engines share."""

    def __init__(self, binding: Binding, slots: ShardedSlots):
        self._model = binding.model
        self._collective = binding.collective
        self._option = binding.options.dividing_option
        self._slots = slots

    def apply(self, gradients: Sequence[Any]) -> None:
        """Updates the trainable weights of the model, on each replica.

        Args:
            gradients: of the replica's part of the loss, one for each weight or None; of a weight
                that is divided itself, its part of that of the global batch.
        """
        parts = self._slots.parts
        assert parts is not None, "slots are divided before the first step"
        gradients = keras.loss_scale.unscaled(self._model.optimizer, gradients)
        known = [index for index, gradient in enumerate(gradients) if gradient is not None]
        if not known:
            return
        num_local = self._collective.num_replicas // self._collective.num_processes
        local = _local_replica(num_local)
        # The gradients of the last layers are there first.
        apart = [index for index in known if parts.is_divided(index)]
        travelling = buckets(parts.divisions, [i for i in known[::-1] if not parts.is_divided(i)])
        own = {index: parts.variables[index][local] for index in known}
        places = {i: parts.components(parts.weights[i])[local].device for i in known}
        found = {index: gradients[index] for index in apart}
        found |= self._reduced(parts, gradients, travelling, places)
        squares, is_finite = self._told_by_all(parts, gradients, found)
        found = _clipped(parts.given, gradients, found, squares)
        for index, part in own.items():  # Whatever has changed the weights since the last step.
            if parts.is_divided(index):
                continue
            weight = parts.components(parts.weights[index])[local]
            with tf.device(places[index]):  # Its part alone leaves the device.
                now = parts.divisions[index].part(weight.read_value(), parts.number_of(local))
            part.assign(now)
        keras.rates.evaluate_schedule(parts.given)

        def update() -> tf.Tensor:
            for index, part in own.items():
                with tf.device(part.device):
                    _update(parts, index, found[index], part)
            if parts.given.use_ema:
                for index in range(len(parts.weights)):
                    _average(parts, index, local)
            return tf.constant(True)

        def counts(counter: Any) -> bool:
            # One that was made outside of the strategy's scope is there once for all replicas, and
            # the last one, which others read nothing after, counts for all.
            return len(parts.components(counter)) == num_local or local == num_local - 1

        if is_finite is None:
            update()
        else:
            if all(map(counts, keras.loss_scale.loss_scale_state(self._model.optimizer))):
                keras.loss_scale.update_loss_scale(
                    self._model.optimizer, is_finite, lambda one: parts.components(one)[local]
                )
            tf.cond(is_finite, update, lambda: tf.constant(False))
        if counts(parts.given.iterations):
            parts.given.iterations.assign_add(keras.loss_scale.counts_step(is_finite))
        self._gather(parts, own, travelling, places, local)

    # Gradients ----------------------------------------------------------------------------------

    def _reduced(
        self,
        parts: Parts,
        gradients: Sequence[Any],
        travelling: Sequence[Bucket],
        places: Mapping[int, str],
    ) -> dict[int, Any]:
        """Returns this replica's part of each gradient of the global batch: index -> part.

        Args:
            places: index of a weight -> the device that this replica has it on.
        """
        found = {}
        last: list[Any] = []
        for number, bucket in enumerate(travelling):
            # One after the other: TensorFlow's collectives must begin in one order everywhere.
            with tf.control_dependencies(last), tf.device(places[bucket.indices[0]]):
                rows = bucket.rows([self._dense(parts, i, gradients[i]) for i in bucket.indices])
            row = self._collective.reduce_scatter(rows, f"shard.{number}")
            last = [row]
            with tf.device(places[bucket.indices[0]]):
                found |= dict(zip(bucket.indices, bucket.split(row), strict=True))
        return found

    def _dense(self, parts: Parts, index: int, gradient: Any) -> Any:
        if isinstance(gradient, tf.IndexedSlices) and keras.optimizers.squares_look_ups(
            parts.given
        ):
            table = keras.tensors.path_of(parts.weights[index])
            raise not_added_up(self._option, table, parts.given)
        limit = clipping.limit_of_values(parts.given)
        if isinstance(gradient, tf.IndexedSlices) and limit is not None:
            # Keras clips each row that was looked up, before it adds up those of the same word.
            limit *= uncounted(self._collective)
            gradient = changed(gradient, lambda rows: tf.clip_by_value(rows, -limit, limit))
        return tf.convert_to_tensor(gradient)

    def _told_by_all(
        self, parts: Parts, gradients: Sequence[Any], found: dict[int, Any]
    ) -> tuple[list[Any], Any]:
        """Returns what replicas know of gradients together, in one message.

        The squared norms of whole gradients, where the optimizer clips by them; and whether all
        gradients are finite, bool [], where a loss scale asks for it, else None.
        """
        asks = keras.loss_scale.asks_whether_finite(self._model.optimizer)
        dtype = tf.float64 if tf.float64 in {part.dtype for part in found.values()} else tf.float32
        told = []
        if clipping.clips_by_norm(parts.given):
            told = [self._own_square(gradients[i], part) for i, part in found.items()]
        num_squares = len(told)
        if asks:
            finite = [tf.reduce_all(tf.math.is_finite(part)) for part in found.values()]
            told.append(tf.logical_not(tf.reduce_all(finite)))
        if not told:
            return [], None
        one = tf.stack([tf.cast(number, dtype) for number in told])
        of_all = tf.unstack(self._collective.sum(one, "shard.told"))
        return of_all[:num_squares], of_all[-1] == 0 if asks else None

    def _own_square(self, gradient: Any, part: Any) -> Any:
        """Returns what this replica adds to the squared norm of a gradient, []."""
        if isinstance(gradient, tf.IndexedSlices):  # Keras takes the norm of rows looked up, too.
            part = gradient.values / tf.cast(uncounted(self._collective), gradient.values.dtype)
        return tf.reduce_sum(tf.square(part))

    # Weights ------------------------------------------------------------------------------------

    def _gather(
        self,
        parts: Parts,
        own: dict[int, Any],
        travelling: Sequence[Bucket],
        places: Mapping[int, str],
        local: int,
    ) -> None:
        """Gives the weights of this replica the parts that all replicas have updated."""
        last: list[Any] = []
        for number, bucket in enumerate(travelling):
            first = bucket.indices[0]
            with tf.control_dependencies(last), tf.device(own[first].device):
                row = tf.concat([own[index].read_value() for index in bucket.indices], 0)
            rows = self._collective.all_gather(row, f"shard.weights.{number}")
            last = [rows]
            with tf.device(places[first]):
                wholes = bucket.wholes(rows)
            for index, whole in zip(bucket.indices, wholes, strict=True):
                weight = parts.weights[index]
                constraint = weight.constraint
                if constraint is not None:
                    whole = constraint(whole)
                parts.components(weight)[local].assign(whole)


def _clipped(
    optimizer: Any, gradients: Sequence[Any], found: dict[int, Any], squares: Sequence[Any]
) -> dict[int, Any]:
    """Returns this replica's part of each gradient as ``optimizer`` clips it."""
    if clipping.limit_of_values(optimizer) is None:
        parts = clipping.clipped(optimizer, list(found.values()), squares)
        return dict(zip(found, parts, strict=True))
    # Rows that were looked up have been clipped before they were added up.
    dense = [i for i in found if not isinstance(gradients[i], tf.IndexedSlices)]
    parts = clipping.clipped(optimizer, [found[i] for i in dense], squares)
    return found | dict(zip(dense, parts, strict=True))


def _update(parts: Parts, index: int, gradient: Any, variable: tf.Variable) -> None:
    """Updates the part of one weight as ``apply_gradients`` of Keras' optimizers does."""
    given, twin = parts.given, parts.twin
    decay = keras.optimizers.decay_of(given, parts.weights[index])
    if decay is not None:
        rate = tf.cast(given.learning_rate, variable.dtype)
        variable.assign_sub(variable * tf.cast(decay, variable.dtype) * rate)
    keras.optimizers.update_step(given, twin, gradient, variable)


def _average(parts: Parts, index: int, local: int) -> None:
    """Moves the average of a weight's part; one without a gradient has one, too."""
    given, variable = parts.given, parts.variables[index][local]
    average = parts.slots[index, "average"][local]
    average.assign(keras.optimizers.moved_average(given, average, variable))
    if given.ema_overwrite_frequency:
        is_due = (given.iterations + 1) % given.ema_overwrite_frequency == 0
        variable.assign(tf.where(is_due, average, variable))


def _local_replica(num_local: int) -> int:
    """Returns which of this process's replicas runs."""
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    number = tf.get_static_value(tf.convert_to_tensor(replica))
    assert number is not None, "a replica that TensorFlow does not know by its number"
    return int(number) % num_local
