"""BatchNormalization in a pipeline: statistics of the whole batch, or of each microbatch.

With those of the whole batch a chunk of the model ends before each such layer; the next chunk
begins when the sums of all microbatches are known, and is given their total. So a microbatch is
normalized as it would be on one device.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

import tensorflow as tf

from tfdist.errors import ModelError
from tfdist.training import batch_norm, batch_statistics, step_context
from tfdist.training.binding import Binding


def microbatch(
    *,
    total: tuple[tf.keras.layers.BatchNormalization, tf.Tensor] | None,
    is_real: Any,
    moves: bool,
) -> contextlib.AbstractContextManager:
    """Returns what encloses the forward pass of one microbatch through one chunk, in training.

    Args:
        total: the layer that the chunk begins with, and the sums of all microbatches.
        is_real: bool, False when the microbatch is padding.
        moves: whether layers with statistics of their own microbatch move their moving ones; a
            forward pass that is computed once more must not.
    """
    return step_context.within(microbatch_norms=(total, is_real, moves))


def put_on(binding: Binding) -> None:
    """Lets every BatchNormalization of a model follow ``microbatch``."""
    for layer in batch_norm.layers_of(binding.model):
        # A method of the layer: Keras' writer of SavedModels traces nothing else.
        call = types.MethodType(_of_layer(_MicrobatchCall(layer)), layer)
        binding.put(layer, "call", call)


def _of_layer(replacement: Any) -> Any:
    def call(_layer: Any, inputs: tf.Tensor, training: Any = None, mask: Any = None) -> Any:
        return replacement(inputs, training=training, mask=mask)

    return call


def masked_norm_error(layer: tf.keras.layers.BatchNormalization) -> ModelError:
    return ModelError(
        "BatchNormalization must not follow a mask where a batch is divided into microbatches",
        received=f"layer '{layer.name}' with a mask",
        mend="Use LayerNormalization, or end the mask before it",
    )


class _MicrobatchCall:
    """Replaces ``layer.call``; outside of ``microbatch`` nothing changes."""

    def __init__(self, layer: tf.keras.layers.BatchNormalization):
        self._layer = layer
        self._call_alone = layer.call

    def __call__(self, inputs: tf.Tensor, training: Any = None, mask: Any = None) -> tf.Tensor:
        layer = self._layer
        if not layer.trainable:
            training = False
        now = step_context.current().microbatch_norms
        if training is not True or now is None:
            return self._call_alone(inputs, training=training, mask=mask)
        if mask is not None and not layer.fused:  # Keras' fused code ignores it too.
            raise masked_norm_error(layer)
        given, is_real, moves = now
        if given is not None and given[0] is layer:
            return batch_statistics.normalized(layer, inputs, given[1])
        own = batch_statistics.local_sums(layer, inputs)
        if moves:
            tf.cond(tf.convert_to_tensor(is_real), lambda: self._move(own), lambda: False)
        return batch_statistics.normalized(layer, inputs, own)

    def _move(self, own: tf.Tensor) -> bool:
        batch_statistics.move_statistics(self._layer, own)
        return True
