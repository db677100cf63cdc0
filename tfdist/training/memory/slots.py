"""Slots of Keras' optimizers for parts of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.keras.optimizers import slots_added_by
from tfdist.keras.tensors import raw

Slot = tuple[Any, str, Any]


def build_on(optimizer: Any, variables: Sequence[Any]) -> list[Slot]:
    """Builds ``optimizer`` on ``variables``.

    Returns:
        Its slots, as (variable, name of the slot, slot); each lies on its variable's device.
    """
    slots: list[Slot] = []

    def add_and_record(make: Callable[[], Any], model_variable: Any, name: str) -> Any:
        with tf.device(raw(model_variable).device):
            slot = make()
        assert slot.shape == model_variable.shape, (name, slot.shape)
        slots.append((model_variable, name, raw(slot)))
        return slot

    optimizer.jit_compile = False  # XLA does not compile across logical devices.
    _build(optimizer, variables, add_and_record)
    return slots


def build_empty(optimizer: Any, variables: Sequence[Any]) -> list[tf.Variable]:
    """Builds ``optimizer`` on ``variables``; returns its slots, each emptied before the next.

    To be called in the scope of the variables' strategy.
    """
    slots: list[tf.Variable] = []

    def add_and_free(make: Callable[[], Any], *_: Any) -> Any:
        slot = make()
        for own in tf.distribute.get_strategy().experimental_local_results(raw(slot)):
            set_value(own, tf.zeros([0], own.dtype))
        slots.append(raw(slot))
        return slot

    _build(optimizer, variables, add_and_free)
    return slots


def _build(optimizer: Any, variables: Sequence[Any], add: Callable[..., Any]) -> None:
    """Builds ``optimizer``, which makes each of its slots by ``add``."""
    with slots_added_by(optimizer, add):
        optimizer.build(list(variables))


def set_value(variable: tf.Variable, value: Any) -> None:
    """Gives ``variable`` a value of any shape: none at all, to free its memory, or one again.

    A variable's own assign insists on its shape.
    """
    value = tf.convert_to_tensor(value, variable.dtype)
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)
