"""Optimizers that are made of the config of another one, which does not tell all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import ModelError, notice
from tfdist.keras.layers import written_anew
from tfdist.keras.loss_scale import loss_scale_state
from tfdist.keras.optimizers import inner_of, key_of, parts_of, variables_of, without_decay
from tfdist.keras.version import IS_KERAS_3

Pairs = Sequence[tuple[Any, Any]]
# Where an optimizer keeps the words in names of variables that do not decay.
_WORDS = f"_exclude_from_weight_decay_{'pattern' if IS_KERAS_3 else 'names'}"


def compile_config_of(model: tf.keras.Model) -> dict[str, Any]:
    """Returns what a copy of a model is compiled with."""
    config = model.get_compile_config()
    is_keras_own = not written_anew(model, "compile")
    if IS_KERAS_3 and is_keras_own and inner_of(model.optimizer) is model.optimizer:
        config |= {"auto_scale_loss": False}  # Which Keras 3 does not keep.
    return config


def decay_alike(given: Any, copy: Any, pairs: Pairs) -> None:
    """Has ``copy`` leave out of weight decay what ``given`` does.

    Args:
        pairs: a variable that ``given`` trains, and the one that ``copy`` does in its place.
    """
    if len(parts_of(given)) != len(parts_of(copy)):
        raise ModelError(
            "each of several optimizers must be given once, for Keras to copy them",
            received=f"{type(given).__name__} with one of them for several patterns",
            mend="Make another one for each pattern",
        )
    for one, other in zip(parts_of(given), parts_of(copy), strict=True):
        _decay_alike(one, other, pairs)


def _decay_alike(given: Any, copy: Any, pairs: Pairs) -> None:
    if kept := without_decay(given):
        # Keras 2 counts vocabularies among the weights: tables, which have no shape.
        known = [(old, new) for old, new in pairs if hasattr(old, "shape")]
        keys = [key_of(copy, new) for old, new in known if key_of(given, old) in kept]
        # Its own method takes no variables once it is built.
        copy._exclude_from_weight_decay = set(keys) if IS_KERAS_3 else keys
    if words := getattr(given, _WORDS, None):
        setattr(copy, _WORDS, words)
    if IS_KERAS_3:
        copy._exclude_from_weight_decay_cache = {}


def leaves_out_of_decay(optimizer: Any) -> bool:
    """Whether ``optimizer`` has weights that do not decay, where it has weight decay."""
    return bool(without_decay(optimizer) or getattr(optimizer, _WORDS, None))


def go_on(given: Any, copy: Any, pairs: Pairs, trained: list[Any]) -> None:
    """Has ``copy`` decay as ``given`` does, and go on from its moments and its count of steps.

    Args:
        pairs: as for ``decay_alike``.
        trained: the variables that ``copy`` trains.
    """
    decay_alike(given, copy, pairs)
    if not _has_state(given):
        return
    if isinstance(copy, tf.keras.optimizers.legacy.Optimizer):
        make_old_slots(copy, trained)
    old, new = ([*variables_of(each), *loss_scale_state(each)] for each in (given, copy))
    if [variable.shape for variable in old] != [variable.shape for variable in new]:
        notice(
            f"warning: {type(given).__name__} begins anew, as it was built for other "
            "weights than the model trains now",
        )
        return
    for value, variable in zip(old, new, strict=True):
        variable.assign(tf.convert_to_tensor(value))


def make_old_slots(optimizer: Any, trained: list[Any]) -> None:
    """Makes the slots of an optimizer of Keras' old kind, which else its first step does."""
    optimizer._create_all_weights(trained)


def _has_state(optimizer: Any) -> bool:
    if IS_KERAS_3:
        return optimizer.built
    if isinstance(optimizer, tf.keras.optimizers.legacy.Optimizer):
        return bool(variables_of(optimizer))
    return getattr(inner_of(optimizer), "_built", False)
