"""A model whose variables live on the devices of their stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.errors import ModelError
from tfdist.keras.settings import uncounted_names
from tfdist.keras.tensors import uncast


class _Creator:
    """Counts variables as they are made, and puts each on its device.

    Args:
        devices: number of a variable -> device; others go where TensorFlow puts them.
    """

    def __init__(self, devices: dict[int, str]):
        self._devices = devices
        self.numbers: dict[Any, int] = {}
        self.count = 0

    def __call__(self, make: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
        with tf.device(self._devices.get(self.count)):
            variable = make(**options)
        self.numbers[variable.ref()] = self.count
        self.count += 1
        return variable


def place(
    make_model: Callable[[], tf.keras.Model],
    devices_of: Callable[[tf.keras.Model], dict[Any, str]],
) -> tf.keras.Model:
    """Makes a model twice: once to see what it consists of, once on its devices.

    Args:
        make_model: returns the same model whenever it is called.
        devices_of: model -> ``variable.ref()`` -> device.

    Raises:
        ModelError: two calls made different models.
    """
    seen = _Creator({})
    # The second is the user's: its names, of metrics too, are to be those of a model made once.
    with tf.variable_creator_scope(seen), uncounted_names():
        probe = make_model()
    devices = {}
    for ref, device in devices_of(probe).items():
        variable = uncast(ref.deref())
        if variable.ref() not in seen.numbers:
            raise _not_the_same(f"variable '{variable.name}', made before model_fn was called")
        devices[seen.numbers[variable.ref()]] = device
    weights = probe.get_weights()
    placed = _Creator(devices)
    with tf.variable_creator_scope(placed):
        model = make_model()
    if placed.count != seen.count or [w.shape for w in weights] != [
        w.shape for w in model.get_weights()
    ]:
        raise _not_the_same(f"{seen.count} variables, then {placed.count}")
    model.set_weights(weights)
    return model


def _not_the_same(received: str) -> ModelError:
    return ModelError(
        "model_fn, which a pipeline calls twice, must return the same model each time",
        received=received,
        mend="Make all layers inside model_fn, each time anew",
    )
