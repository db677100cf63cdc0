"""Masks, variables, and what Keras casts of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat import keras_source
from tfdist.keras.version import IS_KERAS_3

#: Whether rows are looked up in a table as it is kept, and then cast to what the layer computes in.
CASTS_ROWS = IS_KERAS_3


def mask_of(tensor: Any) -> tf.Tensor | None:
    """Returns the mask that Keras has attached to ``tensor``, None where there is none.

    Keras reads it in the next layer, in losses and in metrics; its shape is [batch, ...].
    """
    return getattr(tensor, "_keras_mask", None)


def masks_its_outputs(model: Any) -> bool:
    """Whether an output of a model carries a mask; of a class of its own that is not known."""
    symbols = tf.nest.flatten(getattr(model, "outputs", None) or [])
    return any(mask_of(symbol) is not None for symbol in symbols)


def with_mask(tensor: Any, mask: tf.Tensor | None) -> Any:
    """Returns ``tensor``, to which ``mask`` is attached if there is one."""
    if mask is not None:
        tensor._keras_mask = mask
    return tensor


def casts(variable: Any) -> bool:
    """Whether ``variable`` is read in the precision of the layer that reads it."""
    if IS_KERAS_3:
        return variable._autocast and tf.as_dtype(variable.dtype).is_floating
    return isinstance(variable, keras_source("mixed_precision.autocast_variable").AutoCastVariable)


def uncast(variable: Any) -> tf.Variable:
    """Returns the variable of TensorFlow, where mixed precision or Keras 3 has wrapped it.

    A variable that replicas keep apart is not asked for what it has not: it would look at its value
    for that, which all workers of multi_worker must read together.
    """
    variable = raw(variable)
    return (
        vars(variable).get("_variable", variable) if isinstance(variable, tf.Variable) else variable
    )


def raw(variable: Any) -> tf.Variable:
    """Returns the variable of TensorFlow, which Keras 3 wraps into one of its own."""
    is_wrapped = IS_KERAS_3 and isinstance(variable, tf.keras.Variable)
    return variable.value if is_wrapped else variable


def all_raw(variables: Iterable[Any]) -> list[tf.Variable]:
    """Returns the variables of TensorFlow in ``variables``; see ``raw``."""
    return [raw(variable) for variable in variables]


def is_variable(value: Any) -> bool:
    """Whether ``value`` is a variable of TensorFlow, or Keras 3 has wrapped one into it."""
    return isinstance(raw(value), tf.Variable)


def shards_of(variable: Any) -> list[tf.Variable]:
    """Returns the shards of a variable that TensorFlow has divided, else the variable itself."""
    return list(getattr(variable, "variables", [variable]))


def path_of(variable: Any) -> str:
    """Returns the names of a variable and of the layers that it lies in: "dense/kernel"."""
    return variable.path if IS_KERAS_3 else variable.name


def as_numpy(value: Any) -> Any:
    """Returns the value of a tensor or a variable; what is neither as it is."""
    return value.numpy() if hasattr(value, "numpy") else value


def as_number(value: Any) -> Any:
    """Returns what Keras' loops show of a result: a number of Python, or an array."""
    value = as_numpy(value)
    return np.asarray(value).item() if np.ndim(value) == 0 else value
