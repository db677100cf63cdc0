"""What TFF's clients do in a round: each trains a group of simulated clients, one by one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.compat import import_tensorflow_federated
from tfdist.strategies.federated.aggregation import PrivateFactory
from tfdist.strategies.federated.model import StepCopy, TracedStep
from tfdist.strategies.federated.packing import given_to, group_spec, part_of

tff = import_tensorflow_federated()


def zero_weights(step: TracedStep) -> Any:
    """Returns the computation of a model's weights that TFF begins with: the host sets them."""

    @tff.tensorflow.computation
    def weights() -> Any:
        return tff.learning.models.ModelWeights(_zeros(step.trainable), _zeros(step.non_trainable))

    return weights


def build_client_work(
    step: TracedStep,
    *,
    weights_type: Any,
    optimizer: Any | None,
    num_slots: int,
    statistics: Sequence[int],
    by_rows: bool,
    private: PrivateFactory | None,
) -> Any:
    """Returns a ``tff.learning.templates.ClientWorkProcess`` that trains groups of clients.

    A group hands on the mean of its clients' updates by their weights, and the sum of these; and,
    as measurements, sums over its clients that finished: the state of all metrics, who they are,
    their records, and the moving statistics times the records they were taken from.

    Args:
        step: of the user's model.
        optimizer: of ``tff.learning.optimizers``; None takes no step, and an update is a gradient.
        num_slots: the most clients in a round.
        statistics: indices in ``step.non_trainable`` of moving statistics to average.
        by_rows: whether a client weighs as much as it has records, and not 1.
        private: sums up what it has clipped of each client, in place of a mean.
    """
    hparams: Any = ()
    if optimizer is not None:
        hparams = optimizer.get_hparams(optimizer.initialize(tf.TensorSpec([], tf.float32)))

    @tff.federated_computation
    def initialize() -> Any:
        return tff.federated_value(hparams, tff.SERVER)

    hparams_type = initialize.type_signature.result.member
    spec = group_spec(0 if private is None else private.num_clipping)
    data_type = tff.SequenceType(tff.types.tensorflow_to_type(spec))

    @tff.tensorflow.computation(hparams_type, weights_type, data_type)
    def train_group(hparams: Any, weights: Any, data: tf.data.Dataset) -> Any:
        model = StepCopy(step)
        given = given_to(data)

        def trained(arrays: Any, order: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
            """Returns the update and the number of records of the client that has begun."""
            zeros = _zeros(model.trainable)
            state = zeros
            if optimizer is not None:
                specs = tuple(tf.TensorSpec(v.shape, v.dtype) for v in model.trainable)
                state = optimizer.set_hparams(optimizer.initialize(specs), hparams)

            def one_step(number: tf.Tensor, rows: tf.Tensor, state: Any) -> tuple[Any, ...]:
                taken = order[number]
                count = tf.math.count_nonzero(taken >= 0, dtype=tf.int32)
                batch = tf.nest.map_structure(lambda a: tf.gather(a, taken[:count]), arrays)
                gradients = model(batch)
                weight = tf.cast(count, tf.float32)
                if optimizer is None:
                    state = [
                        total
                        if gradient is None
                        else total + weight * tf.convert_to_tensor(gradient)
                        for total, gradient in zip(state, gradients, strict=True)
                    ]
                else:
                    values = tuple(variable.read_value() for variable in model.trainable)
                    state, values = optimizer.next(state, values, gradients)
                    for variable, value in zip(model.trainable, values, strict=True):
                        variable.assign(value)
                return number + 1, rows + weight, state

            _, rows, state = tf.while_loop(
                lambda number, *_: number < tf.shape(order)[0], one_step, (0, 0.0, state)
            )
            if optimizer is None:
                return [total / rows for total in state], rows
            pairs = zip(weights.trainable, model.trainable, strict=True)
            return [before - variable for before, variable in pairs], rows

        def summand(update: list[tf.Tensor], weight: Any) -> Any:
            if private is None:
                return [weight * value for value in update]
            return private.clipped(tf.unstack(given["clipping"]), update)

        def with_client(sums: OrderedDict, arrays: Any, order: Any, slot: Any) -> OrderedDict:
            model.begin(weights, slot)
            update, rows = trained(arrays, order)
            moving = [model.non_trainable[index] for index in statistics]
            weight = rows if by_rows else 1.0
            summed = summand(update, weight)
            is_finite = tf.reduce_all(
                [
                    tf.reduce_all(tf.math.is_finite(value))
                    for value in (*update, *tf.nest.flatten(summed), *model.metric_state, *moving)
                    if value.dtype.is_floating
                ]
            )

            def kept(value: Any) -> tf.Tensor:
                return tf.where(is_finite, value, tf.zeros_like(value))

            reported = OrderedDict(
                metrics=[kept(variable) for variable in model.metric_state],
                present=kept(tf.one_hot(slot, num_slots)),
                rows=kept(rows),
                statistics=[kept(value * tf.cast(rows, value.dtype)) for value in moving],
            )
            summed = tf.nest.map_structure(kept, summed)
            client = OrderedDict(reported=reported, update=summed, weight=kept(weight))
            return tf.nest.map_structure(tf.add, sums, client)

        def with_part(sums: OrderedDict, part: Any) -> OrderedDict:
            arrays, work = part
            sizes = work["steps"] * work["widths"]
            ends = tf.cumsum(sizes)

            def body(number: tf.Tensor, sums: OrderedDict) -> tuple[Any, ...]:
                order = work["order"][ends[number] - sizes[number] : ends[number]]
                order = tf.reshape(order, [work["steps"][number], work["widths"][number]])
                return number + 1, with_client(sums, arrays, order, work["slots"][number])

            return tf.while_loop(lambda number, _: number < tf.size(ends), body, (0, sums))[1]

        @tf.function(autograph=False)
        def train() -> tuple[Any, ...]:
            nothing = summand(_zeros(step.trainable), 0.0)
            sums = OrderedDict(
                reported=OrderedDict(
                    metrics=_zeros(step.metric_state),
                    present=tf.zeros([num_slots]),
                    rows=0.0,
                    statistics=_zeros([step.non_trainable[index] for index in statistics]),
                ),
                update=tf.nest.map_structure(tf.zeros_like, nothing),
                weight=0.0,
            )
            _, sums = tf.while_loop(
                lambda number, _: number < tf.shape(given["parts"])[0],
                lambda number, sums: (
                    number + 1,
                    with_part(sums, part_of(given, number, step.batch_spec)),
                ),
                (0, sums),
            )
            update = sums["update"]
            if private is None:
                update = [tf.math.divide_no_nan(value, sums["weight"]) for value in update]
            result = tff.learning.templates.ClientResult(update, sums["weight"])
            return result, sums["reported"]

        return train()

    @tff.federated_computation(
        initialize.type_signature.result,
        tff.FederatedType(weights_type, tff.CLIENTS),
        tff.FederatedType(data_type, tff.CLIENTS),
    )
    def advance(state: Any, weights: Any, data: Any) -> Any:
        given = (tff.federated_broadcast(state), weights, data)
        result, reported = tff.federated_map(train_group, given)
        measured = tff.federated_zip(OrderedDict(train=tff.federated_sum(reported)))
        return tff.templates.MeasuredProcessOutput(state, result, measured)

    return tff.learning.templates.ClientWorkProcess(initialize, advance)


def _zeros(variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
    return [tf.zeros(variable.shape, variable.dtype) for variable in variables]
