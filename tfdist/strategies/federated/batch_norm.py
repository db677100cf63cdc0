"""BatchNormalization in federated learning: refused, averaged, or replaced.

Each client would normalize by the statistics of its own records, which differ from those of all.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.errors import ModelError, first_line
from tfdist.keras.layers import take_trainable, variables_in
from tfdist.keras.optimizer_copies import compile_config_of, go_on
from tfdist.keras.tensors import all_raw
from tfdist.training.layers.batch_norm import layers_of
from tfdist.training.model.lookup_vocabularies import follow_variables

# Wu and He 2018, arXiv:1803.08494: 32 groups; fewer where a group would hardly have channels.
_MOST_GROUPS = 32
_CHANNELS_IN_GROUP = 4


def check(model: tf.keras.Model) -> None:
    """Raises ModelError for a model with BatchNormalization."""
    names = [layer.name for layer in layers_of(model)]
    if names:
        raise ModelError(
            "a model of strategy 'federated' must not take statistics from one client's records, "
            "which are not like those of the others",
            received=f"BatchNormalization in layer '{names[0]}'"
            + (f" and {len(names) - 1} more" if names[1:] else ""),
            mend="Give batch_norm='group_norm' to replace it (best when labels are skewed), "
            "batch_norm='average' to average its moving statistics, or use GroupNormalization",
        )


def moving_statistics(model: tf.keras.Model) -> tuple[tf.Variable, ...]:
    """Returns the moving statistics, in the order of ``model.non_trainable_variables``."""
    moving = {
        id(variable)
        for layer in layers_of(model)
        for variable in (layer.moving_mean, layer.moving_variance)
    }
    return tuple(all_raw(v for v in model.non_trainable_variables if id(v) in moving))


def with_group_norm(model: tf.keras.Model) -> tf.keras.Model:
    """Returns a compiled copy of the model, each BatchNormalization a GroupNormalization.

    Weights of all other layers are kept; gamma and beta too, where the layer had both.

    Raises:
        ModelError: the model cannot be copied, or a layer has no single axis of channels.
    """
    if not layers_of(model):
        return model
    try:
        copy = tf.keras.models.clone_model(model, clone_function=_replaced)
        take_trainable(copy, model)
        copy.compile_from_config(compile_config_of(model))
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ModelError(
            "a model for batch_norm='group_norm' must be a Functional or Sequential one, which "
            "Keras can copy",
            received=f"model '{model.name}': {first_line(error)}",
            mend="Use GroupNormalization in the model itself",
        ) from error
    nested = [layer.name for layer in layers_of(copy)]
    if nested:
        raise ModelError(
            "a layer that batch_norm='group_norm' replaces must be one of the model itself",
            received=f"layer '{nested[0]}' within another layer",
            mend="Use GroupNormalization there",
        )
    pairs = _pairs(model, copy)
    for old, new in pairs:
        new.assign(old)
    follow_variables(copy)
    go_on(model.optimizer, copy.optimizer, pairs, copy.trainable_variables)
    return copy


def _replaced(layer: Any) -> Any:
    config = layer.get_config()
    if not isinstance(layer, tf.keras.layers.BatchNormalization):
        return type(layer).from_config(config)
    axes = [layer.axis] if isinstance(layer.axis, int) else list(layer.axis)
    if len(axes) != 1:
        raise ValueError(f"'{layer.name}' normalizes over {len(axes)} axes")
    channels = int(layer.moving_mean.shape[0])
    kept = ("name", "trainable", "dtype", "epsilon", "center", "scale")
    kinds = ("initializer", "regularizer", "constraint")
    also = tuple(f"{name}_{kind}" for name in ("beta", "gamma") for kind in kinds)
    options = {name: config[name] for name in (*kept, *also)}
    most = min(_MOST_GROUPS, max(1, channels // _CHANNELS_IN_GROUP))
    groups = max(number for number in range(1, most + 1) if channels % number == 0)
    return tf.keras.layers.GroupNormalization(groups=groups, axis=axes[0], **options)


def _pairs(model: tf.keras.Model, copy: tf.keras.Model) -> list[tuple[Any, Any]]:
    """Returns each weight that is kept, and the one in its place."""
    pairs: list[tuple[Any, Any]] = []
    for before, after in zip(model.layers, copy.layers, strict=True):
        if isinstance(before, tf.keras.layers.BatchNormalization):
            scales = [(getattr(before, name), getattr(after, name)) for name in ("gamma", "beta")]
            pairs += [(old, new) for old, new in scales if old is not None]
        else:
            pairs += zip(variables_in(before), variables_in(after), strict=True)
    return pairs
