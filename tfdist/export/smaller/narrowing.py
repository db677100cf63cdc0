"""A chain of layers with fewer channels: whole units and filters are cut out, with their weights.

Unlike single weights at zero, that makes the layers themselves smaller and quicker everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import ModelError

_L = tf.keras.layers
_PRODUCERS = (_L.Dense, _L.Conv1D, _L.Conv2D)
_OF_CHANNELS = (_L.BatchNormalization, _L.LayerNormalization)
_WITHOUT_WEIGHTS = (
    *(_L.InputLayer, _L.Activation, _L.ReLU, _L.LeakyReLU, _L.ELU, _L.Softmax),
    *(_L.Dropout, _L.SpatialDropout1D, _L.SpatialDropout2D, _L.GaussianNoise),
    *(_L.MaxPooling1D, _L.MaxPooling2D, _L.AveragePooling1D, _L.AveragePooling2D),
    *(_L.GlobalMaxPooling1D, _L.GlobalMaxPooling2D),
    *(_L.GlobalAveragePooling1D, _L.GlobalAveragePooling2D),
    *(_L.ZeroPadding1D, _L.ZeroPadding2D, _L.Flatten),
)


def chain_of(model: tf.keras.Model) -> list[tf.keras.layers.Layer]:
    """Returns the layers of a model in which each takes what the one before it gives.

    Raises:
        ModelError: a branch, or a layer of which nobody knows how it loses a channel; it is named.
    """
    chain = [layer for layer in model.layers if not isinstance(layer, _L.InputLayer)]
    given = model.inputs[0]
    first = next((n for n, layer in enumerate(chain) if isinstance(layer, _PRODUCERS)), len(chain))
    for number, layer in enumerate(chain):
        if len(model.inputs) > 1 or layer.input is not given:
            raise ModelError(
                "a model whose layers lose channels must be one chain of layers",
                received=f"layer '{layer.name}' of '{model.name}', which stands at a branch",
                mend="Write it as keras.Sequential",
            )
        given = layer.output
        if number >= first and not _is_known(layer):
            raise ModelError(
                "layers that lose channels must be Dense, Conv1D, Conv2D or DepthwiseConv2D with "
                "normalization, activations, pooling and dropout between them",
                received=f"layer '{layer.name}' ({type(layer).__name__})",
                mend="Choose a model without it",
            )
    return chain


def _is_known(layer: Any) -> bool:
    if isinstance(layer, (_L.Conv1DTranspose, _L.Conv2DTranspose)):
        return False  # Convolutions as well, to Keras, whose kernels lie the other way.
    if getattr(layer, "data_format", None) == "channels_first" or getattr(layer, "groups", 1) != 1:
        return False
    if isinstance(layer, _L.DepthwiseConv2D):  # A Conv2D as well, to Keras.
        return layer.depth_multiplier == 1
    if isinstance(layer, _OF_CHANNELS):
        axis = layer.axis if isinstance(layer.axis, int) else next(iter(layer.axis))
        return axis in (-1, len(layer.input.shape) - 1)
    return isinstance(layer, (*_PRODUCERS, *_WITHOUT_WEIGHTS))


def producers_of(chain: Sequence[tf.keras.layers.Layer]) -> list[tf.keras.layers.Layer]:
    """Returns the layers of a chain that make channels: the last one makes the outputs."""
    return [layer for layer in chain if _makes_channels(layer)]


def _makes_channels(layer: tf.keras.layers.Layer) -> bool:
    return isinstance(layer, _PRODUCERS) and not isinstance(layer, _L.DepthwiseConv2D)


def importance(
    model: tf.keras.Model, chain: Sequence[tf.keras.layers.Layer], x: Any
) -> dict[str, np.ndarray]:
    """Returns what each channel gives to the next layer: layer -> its mean size, [channels].

    Args:
        x: the records that it is looked at for.
    """
    probes: dict[str, Any] = {}
    name = None
    for layer in chain:
        if _makes_channels(layer):
            name = layer.name
        elif name is None or isinstance(layer, _L.Flatten):
            name = None  # Behind it a channel has several places.
            continue
        probes[name] = layer.output
    last = producers_of(chain)[-1].name
    probes.pop(last)
    found = tf.keras.Model(model.inputs, list(probes.values())).predict(x, verbose=0)
    found = found if isinstance(found, list) else [found]
    return {
        layer: np.abs(values).reshape(-1, values.shape[-1]).mean(0)
        for layer, values in zip(probes, found, strict=True)
    }


def narrowed(
    model: tf.keras.Model,
    chain: Sequence[tf.keras.layers.Layer],
    kept: Mapping[str, np.ndarray],
    name: str,
) -> tf.keras.Model:
    """Returns the model with some of its channels.

    Args:
        kept: layer that makes channels -> numbers of those that stay, in their order. Others keep
            all of theirs.
        name: of the new model.
    """
    inputs = tf.keras.Input(model.inputs[0].shape[1:], dtype=model.inputs[0].dtype)
    x, channels, weights = inputs, None, []
    for layer in chain:
        config = layer.get_config()
        arrays = layer.get_weights()
        if _makes_channels(layer):
            size = "units" if isinstance(layer, _L.Dense) else "filters"
            out = kept.get(layer.name, np.arange(config[size]))
            if channels is not None:
                arrays[0] = np.take(arrays[0], channels, axis=-2)
            arrays = [array[..., out] for array in arrays]
            config[size], channels = len(out), out
        elif channels is not None and isinstance(layer, _L.DepthwiseConv2D):
            arrays[0] = np.take(arrays[0], channels, axis=-2)
            arrays[1:] = [bias[channels] for bias in arrays[1:]]
        elif channels is not None and isinstance(layer, _L.Flatten):
            size = layer.input.shape[-1]
            places = int(np.prod(layer.input.shape[1:-1]))
            channels = (np.arange(places)[:, None] * size + channels).ravel()
        elif channels is not None:
            arrays = [array[channels] for array in arrays]
        config.pop("batch_input_shape", None)
        new = type(layer).from_config(config)
        x = new(x)
        weights.append((new, arrays))
    made = tf.keras.Model(inputs, x, name=name)
    for layer, arrays in weights:
        layer.set_weights(arrays)
    return made
