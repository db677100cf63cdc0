"""Models that a pipeline would train wrongly, and says so instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

from tfdist.errors import ModelError
from tfdist.keras.layers import keeps_unbiased_variance, layers_in
from tfdist.keras.tensors import mask_of
from tfdist.training.layers.batch_norm import masked_norm_error
from tfdist.training.layers.randomness import drawing_layers
from tfdist.training.model.layer_calls import Call, normalizes
from tfdist.training.model.refusals import (
    refuse_float8,
    refuse_nadam,
    refuse_own_loss,
    refuse_own_steps,
    refuse_undense_inputs,
    refuse_xla,
)

_ADDED = ("AddLoss", "AddMetric")


def check_model(model: tf.keras.Model, calls: Sequence[Call], batch_norm: str) -> None:
    """Raises:
    ModelError: a stage cannot run a part of ``model`` by itself as one device would.
    """
    refuse_own_steps(model, "pipeline")
    refuse_own_loss(model, "pipeline")
    refuse_float8(model)
    refuse_undense_inputs(model, "pipeline")
    check_compiled(model)
    for call in calls:
        masked = mask_of(call.inputs[0]) is not None if call.inputs else False
        if normalizes(call) and masked and not keeps_unbiased_variance(call.layer):
            raise masked_norm_error(call.layer)
    layers = {call.layer: None for call in calls}
    for layer in layers:
        _check_layer(layer)
        if batch_norm == "synchronized":
            _check_nested_norm(layer, [call for call in calls if call.layer is layer])
    if any(type(layer).__name__ in _ADDED for layer in [*model.layers, *layers]):
        raise ModelError(
            "losses and metrics of a pipeline must come from compile() or from layers",
            received=f"model '{model.name}' with model.add_loss or model.add_metric",
            mend="Give them to compile(), or add the loss inside a layer",
        )
    if any(mask_of(output) is not None for output in model.outputs):
        raise ModelError(
            "an output of a pipeline must carry no mask, since Keras divides a masked loss by the "
            "unmasked positions of the microbatch that it sees",
            received=f"model '{model.name}' whose output carries a mask",
            mend="End the mask before the output (pool, flatten or slice), or give sample weights",
        )


def check_compiled(model: tf.keras.Model) -> None:
    """Raises:
    ModelError: what ``model`` is compiled with cannot run on several devices as on one.
    """
    refuse_xla(model)
    refuse_nadam(model.optimizer, "pipeline")


def _check_layer(layer: tf.keras.layers.Layer) -> None:
    if getattr(layer, "stateful", False):
        raise ModelError(
            "a layer of a pipeline must keep no state from batch to batch, since a pipeline "
            "divides the rows of a batch",
            received=f"stateful layer '{layer.name}'",
            mend="Make it with stateful=False, or use strategy 'single'",
        )
    for part in layers_in(layer):
        if type(part).__name__ == "SpectralNormalization":
            raise ModelError(
                "a layer must not change its weights in each forward pass, since there is one for "
                "each microbatch",
                received=f"SpectralNormalization '{part.name}'",
                mend="Leave it out, or use strategy 'single'",
            )
    if getattr(layer, "metrics", None):  # An operation of Keras 3 has none.
        raise ModelError(
            "metrics of a pipeline must come from compile()",
            received=f"layer '{layer.name}' with a metric of its own",
            mend="Give the metric to compile()",
        )


def _check_nested_norm(layer: tf.keras.layers.Layer, calls: list[Call]) -> None:
    kind = tf.keras.layers.BatchNormalization
    if isinstance(layer, kind) or all(call.infers for call in calls):
        return
    inner = [part for part in layers_in(layer) if isinstance(part, kind) and part.trainable]
    if inner:
        raise ModelError(
            "a BatchNormalization that a pipeline synchronizes must be in the graph of the model, "
            "not inside of a layer",
            received=f"'{inner[0].name}' inside '{layer.name}'",
            mend=f"Make '{layer.name}' a Functional model, freeze it, or choose "
            "batch_norm='per_microbatch' (not exact)",
        )


def random_layers(
    calls: Iterable[Call], but: Callable[[tf.keras.layers.Layer], bool] = lambda layer: False
) -> list[str]:
    """Returns the names of layers that draw random numbers in training, except ``but`` some."""
    drawing = (layer for call in calls if not call.infers for layer in drawing_layers(call.layer))
    return list(dict.fromkeys(layer.name for layer in drawing if not but(layer)))
