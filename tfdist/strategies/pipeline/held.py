"""What the optimizer of a pipeline keeps on each device."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist import keras
from tfdist.training.engine.binding import Binding


def optimizer_bytes(binding: Binding) -> dict[str, int] | None:
    """Returns the bytes of the optimizer's variables of this process, by device ("CPU:0").

    Slots, and with ``shard="optimizer"`` the parts of weights that the process updates. None before
    the first fit has made them.
    """
    held = _variables(binding)
    if not held:
        return None
    found: dict[str, int] = {}
    for variable in held:
        spec = tf.DeviceSpec.from_string(variable.device)
        device = f"{spec.device_type}:{spec.device_index}"
        size = variable.shape.num_elements() * variable.dtype.size
        found[device] = found.get(device, 0) + size
    return found


def _variables(binding: Binding) -> list[Any]:
    if binding.sharded is None:
        own = keras.optimizers.variables_of(binding.model.optimizer)
        return [variable for variable in own if variable.shape.rank]  # No counters.
    parts = binding.sharded.parts
    groups = () if parts is None else (*parts.variables, *parts.slots.values())
    return [variable for group in groups for variable in group]
