"""What parameter servers would get wrong without a word, and so is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist import keras
from tfdist.errors import ModelError
from tfdist.keras.layers import layers_in, variables_in
from tfdist.keras.optimizers import key_of, without_decay
from tfdist.keras.tensors import raw
from tfdist.training.model.refusals import (
    ELEMENTWISE_NAMES,
    is_elementwise,
    refuse_eager,
    refuse_nadam,
    refuse_xla,
)

_K = tf.keras.optimizers
# Sums over elements, and what is done to each element.
_RIGHT_ON_SHARDS = {
    "regularizer": (
        tf.keras.regularizers.L1,
        tf.keras.regularizers.L2,
        tf.keras.regularizers.L1L2,
    ),
    "constraint": (tf.keras.constraints.NonNeg,),
}
_WHOLE = "Leave variables whole with min_shard_bytes=None"


def refuse_model(model: tf.keras.Model) -> None:
    """Raises:
    ModelError: the model is compiled with what workers cannot do, or holds a second optimizer.
    """
    name = f"model '{model.name}'"
    refuse_xla(model)
    refuse_eager(model, "parameter_server")
    optimizer = model.optimizer
    if isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer):
        raise ModelError(
            "a loss on parameter servers must not be scaled",
            received=f"{name} with a LossScaleOptimizer (mixed_float16)",
            mend="Use mixed_bfloat16, which needs no scale",
        )
    if not isinstance(optimizer, tf.keras.optimizers.Optimizer):
        raise ModelError(
            "strategy 'parameter_server' must have an optimizer of tf.keras.optimizers",
            received=f"{name} with {type(optimizer).__name__} of tf.keras.optimizers.legacy",
            mend=f"Use tf.keras.optimizers.{type(optimizer).__name__}",
        )
    refuse_nadam(optimizer, "parameter_server")
    if keras.optimizers.has_parts(optimizer):
        raise ModelError(
            "a model of strategy 'parameter_server' must have one optimizer for all weights",
            received=f"{name} with {type(optimizer).__name__}",
            mend="Compile it with one of its optimizers, or use strategy 'single'",
        )
    waits = keras.optimizers.asks_whether_to_update(optimizer)
    if waits is not None:
        raise ModelError(
            "an optimizer of Keras 3 on parameter servers must do the same in each step",
            received=f"{name} with {waits}={getattr(optimizer, waits)}",
            mend="Leave it out, or use strategy 'single'",
        )
    others = [v for v in vars(model).values() if isinstance(v, _K.Optimizer) and v is not optimizer]
    if others:
        raise ModelError(
            "a model of strategy 'parameter_server' must have one optimizer, that of compile",
            received=f"{name} with a second one, {type(others[0]).__name__}",
            mend="Train it on strategy 'single'",
        )


@contextlib.contextmanager
def made_on_servers(name: str) -> Iterator[None]:
    """Encloses the making of a model that could be made on the chief.

    Args:
        name: of that one.

    Raises:
        ModelError: it cannot be made with its variables on the parameter servers.
    """
    try:
        yield
    except (TypeError, ValueError, AttributeError, NotImplementedError) as error:
        reason = (str(error).strip().splitlines() or [""])[-1].strip()
        raise ModelError(
            "strategy 'parameter_server' must be able to make the model a second time, with its "
            "variables on the parameter servers",
            received=f"model '{name}', which Keras cannot make there: "
            f"{type(error).__name__}: {reason}",
            mend=f"{_WHOLE}; or use another strategy",
        ) from error


@contextlib.contextmanager
def whole_in_mixed_precision() -> Iterator[None]:
    """Raises:
    ModelError: the twin that is made within is of mixed precision, and has divided variables.
    """
    try:
        yield
    except ValueError as error:
        if "ShardedVariable" not in str(error):
            raise
        raise ModelError(
            "variables of mixed precision must not be divided among parameter servers",
            received="a model of mixed precision with large variables",
            mend=_WHOLE,
        ) from error


def refuse_on_shards(model: tf.keras.Model, divided: Sequence[tf.Variable]) -> None:
    """Raises:
    ModelError: something needs one of the ``divided`` variables as a whole.
    """
    if not divided:
        return
    optimizer = model.optimizer
    name = divided[0].name
    if not is_elementwise(optimizer):
        raise ModelError(
            "an optimizer must update each element by itself where weights are divided among "
            "parameter servers",
            received=f"{type(optimizer).__name__}, and '{name}' divided",
            mend=f"{_WHOLE}, or choose one of tf.keras.optimizers: {ELEMENTWISE_NAMES}",
        )
    if optimizer.clipnorm:
        raise ModelError(
            "gradients that clipnorm clips must be whole",
            received=f"clipnorm={optimizer.clipnorm}, and '{name}' divided among parameter servers",
            mend=f"{_WHOLE}, or give global_clipnorm",
        )
    kept = without_decay(optimizer)
    if any(key_of(optimizer, variable) in kept for variable in divided):
        raise ModelError(
            "weights that do not decay must be named where they are divided among parameter "
            "servers",
            received="exclude_from_weight_decay(var_list=...)",
            mend=f"Give var_names instead, or: {_WHOLE}",
        )
    for layer in reversed(
        layers_in(model)
    ):  # The inner ones first: a model has the weights of all.
        for kind, rule in _rules_of(layer, divided):
            raise ModelError(
                f"a {kind} of weights that are divided among parameter servers must be one of "
                "Keras' own that looks at each element by itself",
                received=f"{type(rule).__name__} of layer '{layer.name}'",
                mend=_WHOLE,
            )


def _rules_of(layer: Any, divided: Sequence[tf.Variable]) -> list[tuple[str, Any]]:
    """Returns the constraints and regularizers of a layer's divided weights that need the whole."""
    ids = {id(variable) for variable in divided}
    if not any(id(variable) in ids for variable in variables_in(layer)):
        return []
    given = {name: value for name, value in vars(layer).items() if callable(value)}
    found = [
        (kind, value)
        for kind in _RIGHT_ON_SHARDS
        for name, value in given.items()
        if name.endswith(f"_{kind}") and name != "activity_regularizer"
    ]
    # Keras 3 tells of each weight those that a layer gives it where it is made.
    weights = [weight for weight in layer.weights if id(raw(weight)) in ids]
    found += [(kind, getattr(one, kind, None)) for kind in _RIGHT_ON_SHARDS for one in weights]
    return [
        (kind, rule)
        for kind, rule in found
        if rule is not None and type(rule) not in _RIGHT_ON_SHARDS[kind]
    ]
