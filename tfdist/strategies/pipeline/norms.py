"""BatchNormalization in a pipeline: statistics of the whole batch, or of each microbatch.

With those of the whole batch each such layer stands in a chunk that takes the batch whole, so it is
called as on one device; where ranks share a batch, the sums of all of them are added up. This is
about both, about layers of microbatches, and about forward passes that run once more.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.errors import ModelError
from tfdist.keras import step_context
from tfdist.training.engine.binding import Binding
from tfdist.training.layers import batch_norm, batch_statistics


def of_part(*, is_real: Any, moves: bool) -> contextlib.AbstractContextManager:
    """Returns what encloses a forward pass in training that is not the only one of its batch.

    Args:
        is_real: bool, False when the microbatch is padding.
        moves: whether layers move their moving statistics; a forward pass that is computed once
            more must not.
    """
    return step_context.within(microbatch_norms=(is_real, moves))


class OverRanks:
    """The BatchNormalizations of a chunk that takes whole batches, which ranks share.

    Args:
        number: of the chunk, the same on all ranks.
    """

    def __init__(self, number: int):
        self._number = number
        self._statistics = batch_norm.Repeatable()

    @contextlib.contextmanager
    def first(self, is_real: Any) -> Iterator[None]:
        """Encloses the forward pass of a step; ``is_real``: as for ``of_part``."""
        step = batch_norm.shared_step(is_real=is_real, microbatch=self._number)
        with step, self._statistics.first():
            yield

    def again(self) -> contextlib.AbstractContextManager:
        """Returns what encloses the same pass, computed once more."""
        return self._statistics.again()


def put_on(binding: Binding) -> None:
    """Lets every BatchNormalization of a model follow ``of_part``, or ``OverRanks``."""
    if binding.collective.shares_batches:
        batch_norm.put_on(binding, synchronized=True)
        return
    for layer in batch_norm.layers_of(binding.model):
        # A method of the layer: Keras' writer of SavedModels traces nothing else.
        call = types.MethodType(_of_layer(_PartCall(layer)), layer)
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


class _PartCall:
    """Replaces ``layer.call``; outside of ``of_part`` nothing changes."""

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
        is_real, moves = now
        own = batch_statistics.local_sums(layer, inputs)
        output = batch_statistics.normalized(layer, inputs, own)
        if moves:  # Last: sums and output are around the moving mean.
            tf.cond(tf.convert_to_tensor(is_real), lambda: self._move(own), lambda: False)
        return output

    def _move(self, own: tf.Tensor) -> bool:
        batch_statistics.move_statistics(self._layer, own)
        return True
