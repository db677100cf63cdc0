"""Learning rates of optimizers, given as numbers or as schedules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.keras.optimizers import has_parts, inner_of, parts_of, steps_of, variables_of
from tfdist.keras.tensors import raw
from tfdist.keras.trackables import optimizers_of
from tfdist.keras.version import IS_KERAS_3

_SCHEDULE = tf.keras.optimizers.schedules.LearningRateSchedule


def is_fixed(optimizer: Any) -> bool:
    """Whether the learning rate is one number: no schedule, no function as Keras 3 takes one, and
    not those of a MultiOptimizer."""
    if has_parts(optimizer):
        return False
    rate = given_learning_rate(optimizer)
    return isinstance(rate, tf.Variable) or not callable(rate)


def more_than_one_rate(model: tf.keras.Model) -> str | None:
    """Returns what ``model`` has, for people, but one optimizer of a fixed learning rate."""
    if len(optimizers_of(model)) > 1:
        return f"{len(optimizers_of(model))} optimizers"
    if has_parts(model.optimizer):
        return f"a {type(model.optimizer).__name__}"
    return None if is_fixed(model.optimizer) else "a schedule"


def rate_of_last_step(optimizer: Any) -> Any:
    """Returns the learning rate that the last step was taken with: a number or a tensor.

    None where there are several.
    """
    if has_parts(optimizer):
        return None
    rate = optimizer.learning_rate
    schedule = given_learning_rate(optimizer)
    if IS_KERAS_3 and isinstance(schedule, _SCHEDULE):  # Keras 3 tells that of the next step.
        return schedule(tf.maximum(tf.convert_to_tensor(steps_of(optimizer)) - 1, 0))
    # Legacy optimizers give the schedule itself.
    return rate(optimizer.iterations) if callable(rate) else rate


def given_learning_rate(optimizer: Any) -> Any:
    """Returns the learning rate as it was given: a variable or a schedule.

    ``optimizer.learning_rate`` is the current value of a schedule.
    """
    inner = inner_of(optimizer)
    rate = getattr(inner, "_learning_rate", None)
    return inner.learning_rate if rate is None else rate  # Legacy optimizers give what they have.


def rate_variables_of(optimizer: Any) -> list[tf.Variable]:
    """Returns the variable of its learning rate where ``variables_of`` does not have it: tf_keras
    does not count it."""
    rate = given_learning_rate(optimizer)
    return [rate] if isinstance(rate, tf.Variable) else []


def variables_but_rates(optimizer: Any) -> list[tf.Variable]:
    """Returns what ``variables_of`` does without learning rates, which Keras 3 has among them."""
    rates = {id(raw(given_learning_rate(part))) for part in parts_of(optimizer)}
    return [variable for variable in variables_of(optimizer) if id(variable) not in rates]


def fixed_rates_of(model: tf.keras.Model) -> list[tuple[Any, float]]:
    """Returns the optimizers of ``model`` that have no schedule, each with its learning rate."""
    parts = [part for one in optimizers_of(model) for part in parts_of(one)]
    rates = [(one, given_learning_rate(one)) for one in parts]
    return [(one, float(tf.convert_to_tensor(r))) for one, r in rates if not callable(r)]


def put_rates(rates: Sequence[tuple[Any, float]]) -> None:
    """Gives optimizers the learning rates that ``fixed_rates_of`` has returned."""
    for optimizer, rate in rates:
        given = given_learning_rate(optimizer)
        if callable(given) and not hasattr(given, "assign"):
            continue  # A callback has given it a schedule since.
        if hasattr(given, "assign"):
            given.assign(rate)  # Keras 3's MultiOptimizer refuses to be given one.
        else:
            optimizer.learning_rate = rate


def evaluate_schedule(optimizer: Any) -> None:
    """Brings ``optimizer.learning_rate`` to the value of its schedule at its present iteration."""
    if not IS_KERAS_3:  # It evaluates it whenever it is read.
        optimizer._compute_current_learning_rate()
