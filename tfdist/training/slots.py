"""Slots of Keras' optimizers for parts of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

Slot = tuple[Any, str, Any]


def build_on(optimizer: Any, variables: Sequence[Any]) -> list[Slot]:
    """Builds ``optimizer`` on ``variables``.

    Returns:
        Its slots, as (variable, name of the slot, slot); each lies on its variable's device.
    """
    slots: list[Slot] = []
    add = optimizer.add_variable_from_reference

    def add_and_record(model_variable: Any, variable_name: str, *args: Any, **options: Any) -> Any:
        with tf.device(model_variable.device):
            slot = add(model_variable, variable_name, *args, **options)
        assert slot.shape == model_variable.shape, (variable_name, slot.shape)
        slots.append((model_variable, variable_name, slot))
        return slot

    optimizer.jit_compile = False  # XLA does not compile across logical devices.
    _build(optimizer, variables, add_and_record)
    return slots


def build_empty(optimizer: Any, variables: Sequence[Any]) -> list[tf.Variable]:
    """Builds ``optimizer`` on ``variables``; returns its slots, each emptied before the next.

    To be called in the scope of the variables' strategy.
    """
    slots: list[tf.Variable] = []
    add = optimizer.add_variable_from_reference

    def add_and_free(*args: Any, **options: Any) -> Any:
        slot = add(*args, **options)
        for own in tf.distribute.get_strategy().experimental_local_results(slot):
            set_value(own, tf.zeros([0], own.dtype))
        slots.append(slot)
        return slot

    _build(optimizer, variables, add_and_free)
    return slots


def _build(optimizer: Any, variables: Sequence[Any], add: Callable[..., Any]) -> None:
    """Builds ``optimizer``, which makes each of its slots by ``add``."""
    optimizer.add_variable_from_reference = add
    try:
        optimizer.build(list(variables))
    finally:
        del optimizer.add_variable_from_reference


def set_value(variable: tf.Variable, value: Any) -> None:
    """Gives ``variable`` a value of any shape: none at all, to free its memory, or one again.

    A variable's own assign insists on its shape.
    """
    value = tf.convert_to_tensor(value, variable.dtype)
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)
