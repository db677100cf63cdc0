"""BatchNormalization whose statistics cover the global batch, not one replica's share of it.

The layer itself stays the user's own: only its ``call`` is replaced on the instance, so the model
keeps its class, its weights and its file format.

Ioffe and Szegedy 2015, arXiv:1502.03167, Algorithm 1, with the mini-batch of all replicas.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.errors import ModelError
from tfdist.training.collective import Collective

# The step that is being traced. Replicas of one process are traced in threads of their own, which
# take turns.
_step = threading.local()


@contextlib.contextmanager
def shared_step(*, is_real: tf.Tensor) -> Iterator[None]:
    """Encloses the forward pass of one step on one replica.

    Args:
        is_real: bool [], False when the rows of this replica are padding, which the statistics
            leave out.
    """
    _step.is_real = is_real
    _step.num_calls = 0
    try:
        yield
    finally:
        del _step.is_real, _step.num_calls


def layers_of(model: tf.keras.Model) -> list[tf.keras.layers.BatchNormalization]:
    """Returns the BatchNormalization layers of ``model``, those of nested models included."""
    kind = tf.keras.layers.BatchNormalization
    return [layer for layer in model.submodules if isinstance(layer, kind)]


def synchronize(model: tf.keras.Model, collective: Collective) -> None:
    """Makes every BatchNormalization layer of ``model`` use the statistics of the global batch."""
    for layer in layers_of(model):
        layer.call = _Synchronized(layer, collective).as_method()


class _Synchronized:
    """Replaces ``layer.call``: in a shared train step it reduces, anywhere else nothing changes."""

    def __init__(self, layer: tf.keras.layers.BatchNormalization, collective: Collective):
        self._layer = layer
        self._collective = collective
        self._call_alone = layer.call

    def as_method(self) -> Callable:
        """Returns a method of the layer: Keras' writer of SavedModels traces nothing else."""

        def call(_layer: Any, inputs: tf.Tensor, training: Any = None, mask: Any = None) -> Any:
            if not self._layer.trainable:
                training = False
            if training is True and hasattr(_step, "is_real"):
                if mask is not None and not self._layer.fused:  # Keras' fused code ignores it too.
                    raise ModelError(
                        "BatchNormalization after a mask cannot be shared by several replicas",
                        received=f"layer '{self._layer.name}' with a mask",
                        mend="Use LayerNormalization, or strategy 'single'",
                    )
                return self._train(inputs)
            return self._call_alone(inputs, training=training, mask=mask)

        return types.MethodType(call, self._layer)

    def _train(self, inputs: tf.Tensor) -> tf.Tensor:
        layer = self._layer
        axes = [layer.axis] if isinstance(layer.axis, int) else list(layer.axis)
        rank = inputs.shape.rank
        kept = [axis % rank for axis in axes]
        reduced = [axis for axis in range(rank) if axis not in kept]
        shape = [inputs.shape[axis] if axis in kept else 1 for axis in range(rank)]

        # The sums are taken around the moving mean: E[d^2] - E[d]^2 then cancels little.
        x = tf.cast(inputs, layer.moving_mean.dtype)
        center = tf.reshape(tf.stop_gradient(tf.convert_to_tensor(layer.moving_mean)), shape)
        deviation = x - center
        size = tf.size(layer.moving_mean)
        count = tf.cast(tf.size(x) // size, x.dtype)
        local = tf.concat(
            [
                tf.reshape(tf.reduce_sum(deviation, reduced), [-1]),
                tf.reshape(tf.reduce_sum(tf.square(deviation), reduced), [-1]),
                tf.reshape(count, [1]),
            ],
            axis=0,
        )
        local = tf.where(_step.is_real, local, tf.zeros_like(local))
        # One reduction for all three: latency is what costs.
        total = self._collective.sum(local, f"batch_norm.{_step.num_calls}")
        _step.num_calls += 1
        count = tf.stop_gradient(total[-1])
        mean_deviation = total[:size] / count
        variance = tf.nn.relu(total[size : 2 * size] / count - tf.square(mean_deviation))

        mean = tf.reshape(mean_deviation, shape) + center
        output = tf.nn.batch_normalization(
            x,
            mean,
            tf.reshape(variance, shape),
            tf.reshape(layer.beta, shape) if layer.center else None,
            tf.reshape(layer.gamma, shape) if layer.scale else None,
            layer.epsilon,
        )
        # Keras' fused kernel keeps the unbiased variance; its unfused code the biased one.
        kept_variance = variance * count / tf.maximum(count - 1, 1) if layer.fused else variance
        self._move(layer.moving_mean, tf.reshape(mean, layer.moving_mean.shape))
        self._move(layer.moving_variance, tf.reshape(kept_variance, layer.moving_variance.shape))
        return tf.cast(output, inputs.dtype)

    def _move(self, moving: tf.Variable, value: tf.Tensor) -> None:
        moving.assign_sub((moving - tf.stop_gradient(value)) * (1.0 - self._layer.momentum))
