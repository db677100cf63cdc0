"""Quantization-aware training: the model trains on while it is rounded as an int8 file rounds it.

Quantization and training of neural networks, Jacob et al. 2017, arXiv:1712.05877, section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfdist.errors import ModelError, in_one_line
from tfdist.export.smaller import tuning
from tfdist.export.smaller.measuring import Comparison
from tfdist.keras.layers import take_trainable
from tfdist.training.model.lookup_vocabularies import follow_variables

if TYPE_CHECKING:
    import tensorflow as tf


def quantize_aware(
    model: tf.keras.Model,
    data: Any,
    *,
    epochs: int = 2,
    global_batch_size: int = 64,
    seed: int = 0,
) -> tuple[tf.keras.Model, Comparison]:
    """Trains on with kernels, and what comes out of their layers, rounded to 8 bits.

    Kernels and outputs of dense and convolutional layers are rounded, whatever their activation.
    The given model is left as it is. Export the result with ``quantize="int8"``.

    Args:
        model, data, epochs, global_batch_size, seed: as in ``prune``.

    Returns:
        An ordinary compiled Keras model, and size and quality of its int8 file before and after.

    Raises:
        ModelError, EngineMissingError: as ``prune``.
    """
    how = {"global_batch_size": global_batch_size, "seed": seed}
    tfmot, copy, scale, feed = tuning.begun(model, data, epochs, "int8", **how)
    keras = tfmot.quantization.keras
    config = _config_class(keras)
    others = [layer for layer in copy.layers if not tuning.is_heavy(layer)]
    for layer in others:  # tfmot copies weights in an order that frozen layers within would change.
        layer.trainable = True
    annotated = tuning.wrapped(
        copy, lambda layer: keras.quantize_annotate_layer(layer, quantize_config=config())
    )
    try:
        with keras.quantize_scope({config.__name__: config}):
            rounded = keras.quantize_apply(annotated)
        follow_variables(rounded)  # It sets variables, as of a Normalization that adapted.
    except (ValueError, RuntimeError) as error:
        raise ModelError(
            "quantization-aware training must have a flat Functional or Sequential model",
            received=f"an error: {in_one_line(error)}",
            mend="Write nested models as layers of one",
        ) from error
    # Other wrappers, such as TimeDistributed, are layers like any.
    named = {
        (layer.layer if isinstance(layer, keras.QuantizeWrapper) else layer).name: layer
        for layer in rounded.layers
    }
    for layer in others:
        if not isinstance(named[layer.name], keras.QuantizeWrapper):
            take_trainable(named[layer.name], model.get_layer(layer.name))
    tuning.fit(rounded, model, feed, epochs)
    result = tuning.plain_copy(model)
    _copy_weights(named, result)
    tuning.compile_like(result, model)
    return result, scale.compare("trained on while rounded to int8", model, result)


def _config_class(keras: Any) -> type:
    """tfmot's own configurations refuse activations that they do not know, such as gelu."""
    import tensorflow as tf

    class KernelAndOutput(keras.QuantizeConfig):
        def get_weights_and_quantizers(self, layer: Any) -> list:
            per_channel = not isinstance(layer, tf.keras.layers.Dense)
            quantizer = keras.quantizers.LastValueQuantizer(
                num_bits=8, per_axis=per_channel, symmetric=True, narrow_range=True
            )
            return [(layer.kernel, quantizer)]

        def set_quantize_weights(self, layer: Any, quantize_weights: list) -> None:
            (layer.kernel,) = quantize_weights

        def get_activations_and_quantizers(self, layer: Any) -> list:
            return []

        def set_quantize_activations(self, layer: Any, quantize_activations: list) -> None:
            pass

        def get_output_quantizers(self, layer: Any) -> list:
            return [
                keras.quantizers.MovingAverageQuantizer(
                    num_bits=8, per_axis=False, symmetric=False, narrow_range=False
                )
            ]

        def get_config(self) -> dict:
            return {}

    return KernelAndOutput


def _copy_weights(named: dict[str, tf.keras.layers.Layer], plain: tf.keras.Model) -> None:
    """Copies the trained weights to the layers of the same names.

    Args:
        named: the layers; those that tfmot has wrapped have variables of its own, too.
    """
    for layer in plain.layers:
        trained = named[layer.name]
        if trained.name == layer.name:
            layer.set_weights(trained.get_weights())
            continue
        found = {_name(variable): variable for variable in trained.weights}
        for variable in layer.weights:
            variable.assign(found[_name(variable)])


def _name(variable: tf.Variable) -> str:
    return variable.name.rpartition("/")[2]
