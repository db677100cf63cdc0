"""BatchNormalization whose statistics cover the global batch, not one replica's share of it.

The layer itself stays the user's own: only its ``call`` is asked elsewhere, so the model keeps its
class, its weights and its file format. How it normalizes in a step that is divided, the step says:
``StepContext.norms`` has ``normalized(norm, inputs)``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.errors import ModelError
from tfdist.keras import step_context
from tfdist.keras.layers import keeps_unbiased_variance, layers_in, replaced
from tfdist.keras.tensors import all_raw
from tfdist.training.engine.binding import Binding
from tfdist.training.engine.collective import Collective
from tfdist.training.layers.batch_statistics import local_sums, move_statistics, normalized
from tfdist.training.layers.gradients import with_gradient
from tfdist.training.layers.replica_step import running_step


@dataclass(frozen=True)
class _Used:
    """What a layer has normalized with: the moving mean of then, and the sums around it."""

    name: str
    center: tf.Tensor
    total: tf.Tensor


class _Pass:
    """A forward pass of a train step.

    Attributes:
        is_real: bool [], False when the rows are padding.
        name: of this pass; the same on all replicas.
        kept: what the layers have used, in the order of their calls, if it is needed once more.
        known: that, in a pass that repeats the first; else None.
    """

    def __init__(self, is_real: tf.Tensor, name: str, known: Iterator[Any] | None = None):
        self.is_real, self.name, self.known = is_real, name, known
        self.num_calls = 0
        self.kept: list[_Used] | None = None

    def normalized(self, norm: Norm, inputs: tf.Tensor) -> tf.Tensor:
        layer = norm.layer
        used = None if self.known is None else next(self.known)
        center = tf.identity(layer.moving_mean) if used is None else used.center
        local = local_sums(layer, inputs, center, self.is_real)
        if used is not None:
            return normalized(layer, inputs, norm.as_known(local, used), center)
        name = f"{self.name}.{self.num_calls}"
        self.num_calls += 1
        # One reduction for all three: latency is what costs.
        total = norm.sum(local, name) if norm.is_synchronized else local
        if self.kept is not None:
            self.kept.append(_Used(name, center, total))
        output = normalized(layer, inputs, total, center)
        move_statistics(layer, total)
        return output


def shared_step(*, is_real: tf.Tensor, microbatch: int = 0) -> contextlib.AbstractContextManager:
    """Returns what encloses the forward pass of one microbatch on one replica.

    Args:
        is_real: bool [], False when the rows of this replica are padding, which the statistics
            leave out.
        microbatch: its number in the step.
    """
    return step_context.within(norms=_Pass(is_real, f"batch_norm.{microbatch}"))


class Repeatable:
    """A part of a forward pass that is computed once more, with the statistics of the first time.

    They are then neither summed over replicas nor moved into the moving ones a second time.
    """

    def __init__(self) -> None:
        self._first: _Pass | None = None
        self._kept: list[_Used] = []

    def first(self) -> contextlib.AbstractContextManager[None]:
        now = self._first = step_context.current().norms
        return contextlib.nullcontext() if now is None else replaced(now, kept=self._kept)

    def again(self) -> contextlib.AbstractContextManager[None]:
        if self._first is None:
            return contextlib.nullcontext()
        again = _Pass(self._first.is_real, self._first.name, iter(self._kept))
        return step_context.within(norms=again)


def layers_of(model: tf.keras.Model) -> list[tf.keras.layers.BatchNormalization]:
    """Returns the BatchNormalization layers of ``model``, those of nested models included."""
    kind = tf.keras.layers.BatchNormalization
    return [layer for layer in layers_in(model) if isinstance(layer, kind)]


def explained(model: tf.keras.Model, accumulate_steps: int) -> list[str]:
    """Returns a clause if layers normalize microbatches, of which a step has so many on a replica.

    One device takes their statistics from the global batch.
    """
    names = [layer.name for layer in layers_of(model) if layer.trainable]
    if accumulate_steps == 1 or not names:
        return []
    more = f" and {len(names) - 1} more" if names[1:] else ""
    return [
        f"accumulate_steps={accumulate_steps} has BatchNormalization take its statistics from each "
        f"microbatch, not from the global batch: layer '{names[0]}'{more}"
    ]


def put_on(binding: Binding, *, synchronized: bool) -> None:
    """Makes every BatchNormalization layer of a model follow the shared train step.

    Args:
        synchronized: whether the statistics are those of the microbatches of all replicas
            together. Otherwise each replica has its own; layers made with ``synchronized=True``
            have those of all even then.
    """
    for layer in layers_of(binding.model):
        follow(binding, layer, synchronized=synchronized or _asks_for_all(layer))


def follow(binding: Binding, layer: tf.keras.layers.Layer, *, synchronized: bool) -> None:
    """Has a BatchNormalization normalize as the step says that it is called in."""
    if getattr(layer, "renorm", False):  # Of Keras 3.
        raise ModelError(
            "BatchNormalization must normalize with the statistics of the batch where that is "
            "divided among replicas or microbatches",
            received=f"layer '{layer.name}' with renorm=True",
            mend="Leave renorm out, or use strategy 'single'",
        )
    binding.call_by(layer, Norm(layer, binding.collective, synchronized))


def _asks_for_all(layer: tf.keras.layers.BatchNormalization) -> bool:
    return bool(getattr(layer, "synchronized", False))


def masked_norm_error(layer: tf.keras.layers.BatchNormalization) -> ModelError:
    return ModelError(
        "BatchNormalization must not follow a mask where a batch is divided among replicas or "
        "microbatches",
        received=f"layer '{layer.name}' with a mask",
        mend="Use LayerNormalization, end the mask before it, or use strategy 'single'",
    )


@dataclass(frozen=True)
class Norm:
    """A BatchNormalization, called in the place of ``layer.call``; ``is_synchronized``: of all."""

    layer: tf.keras.layers.BatchNormalization
    collective: Collective
    is_synchronized: bool

    def __call__(self, alone: Callable[..., Any], inputs: Any, training: Any, mask: Any) -> Any:
        now, layer = step_context.current().norms, self.layer
        training = training if layer.trainable else False
        if training is not True or now is None:
            return alone(inputs, training=training, mask=mask)
        if mask is not None and not keeps_unbiased_variance(layer):  # Keras' fused code ignores it.
            raise masked_norm_error(layer)
        return now.normalized(self, inputs)

    def sum(self, local: tf.Tensor, name: str) -> tf.Tensor:
        step = running_step()
        return self.collective.sum(local, name) if step is None else step.sum(local, name)

    def as_known(self, local: tf.Tensor, used: _Used) -> tf.Tensor:
        """Returns the total, differentiable as the sum of all replicas' ``local`` that it is."""

        def back(gradient: tf.Tensor) -> tf.Tensor:
            if not self.is_synchronized:
                return gradient
            return self.collective.sum(gradient, f"{used.name}.again")

        return with_gradient(used.total, of=local, back=back)


def average_statistics(model: tf.keras.Model, collective: Collective) -> None:
    """Gives all replicas the mean of the moving statistics that each has moved by itself."""
    moving = all_raw(
        variable
        for layer in layers_of(model)
        if layer.trainable and not _asks_for_all(layer)
        for variable in (layer.moving_mean, layer.moving_variance)
    )
    if not moving:
        return
    dtype = moving[0].dtype
    flat = [tf.reshape(tf.cast(tf.convert_to_tensor(v), dtype), [-1]) for v in moving]
    mean = collective.sum(tf.concat(flat, 0), "batch_norm.moving") / collective.num_replicas
    pieces = tf.split(mean, [v.shape.num_elements() for v in moving])
    for variable, piece in zip(moving, pieces, strict=True):
        variable.assign(tf.cast(tf.reshape(piece, variable.shape), variable.dtype))
