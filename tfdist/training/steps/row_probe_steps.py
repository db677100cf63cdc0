"""A ``train_step`` of the user's own whose gradients are no mean over the rows of a batch.

A sum over rows, a loss that compares them, and weights that move by the gradient of a batch within
the step (SAM) give others when the batch is divided. The step runs on a whole batch and on its
parts, and what it gives to its optimizers is compared, not applied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import keras
from tfdist.keras.trackables import optimizers_of
from tfdist.training.layers import losses
from tfdist.training.steps import custom_steps
from tfdist.training.steps.row_probe_layers import ASKS_ALL, Walk, state_kept, tolerance_of
from tfdist.training.steps.row_probe_model import (
    MOST_ELEMENTS,
    loud_layers,
    replaced_in,
    without_metrics,
)

#: What a step calls that counts the rows of all replicas, which its parts alone cannot show.
_COUNTS_ALL = ASKS_ALL | {"compute_average_loss", "scale_regularization_loss"}


class _Masked(Exception):
    """A loss counts positions, which replicas exchange."""


def parted(model: tf.keras.Model, batch: Any, parts: Sequence[slice]) -> bool:
    """Whether the gradients of a batch are others than the mean of those of its parts, by rows.

    Layers that draw, and BatchNormalization, run as in inference.

    Args:
        model: built and compiled; its state stays as it is.
        batch: as ``train_step`` takes it, tensors [rows, ...].
        parts: of its rows, each row in one of them.
    """
    used = losses.own_functions(model, tf.keras.Model)
    if "train_step" not in used or any(_COUNTS_ALL & names for names in used.values()):
        return False
    if any(losses.ignored_class(loss) is not None for loss in _losses(model)):
        return False
    try:
        whole = _gradients(model, batch)
        if np.max(np.abs(whole - _gradients(model, batch)), initial=0.0) > 0:
            return False  # It draws random numbers.
        rows = len(tf.nest.flatten(batch)[0])
        joined = np.zeros(0)
        for part in parts:
            own = tf.nest.map_structure(lambda tensor, part=part: tensor[part], batch)
            of_part = _gradients(model, own) * len(range(rows)[part]) / rows
            joined = joined + of_part if joined.size else of_part
    except _Masked:
        return False
    largest = np.max(np.abs(whole), initial=0.0)
    return bool(np.max(np.abs(whole - joined), initial=0.0) > tolerance_of(model) * largest)


def _losses(model: tf.keras.Model) -> list[Any]:
    return tf.nest.flatten(keras.losses.compiled_losses(model))


def _gradients(model: tf.keras.Model, batch: Any) -> np.ndarray:
    """Returns all that a step gives to its optimizers, laid flat, [elements].

    Raises:
        _Masked: a layer hands a mask on.
    """
    walk = Walk(model, loud_layers(model))
    unbuilt = [metric for metric in model.metrics if not getattr(metric, "built", True)]
    with (
        state_kept(model, trained=True),
        walk.during(_unmasked),
        without_metrics(model),
        replaced_in(unbuilt, lambda _: dict, "result"),  # Keras 3 has none of them.
        _caught(optimizers_of(model)) as given,
    ):
        type(model).train_step(model, batch)
    return np.concatenate([np.zeros(0), *(np.ravel(tf.convert_to_tensor(g)) for g in given)])


def _unmasked(layer: Any, call: int, outputs: Any) -> Any:
    if any(keras.tensors.mask_of(output) is not None for output in tf.nest.flatten(outputs)):
        raise _Masked
    return outputs


@contextlib.contextmanager
def _caught(optimizers: Sequence[Any]) -> Iterator[list[Any]]:
    """Yields the gradients that optimizers are given meanwhile, of which they apply none."""
    given: list[Any] = []

    def catching(optimizer: Any) -> Any:
        def catch(*args: Any, **options: Any) -> None:
            pairs = zip(*keras.optimizers.given_to(optimizer, args, options), strict=True)
            given.extend(
                gradient
                for gradient, variable in pairs
                if gradient is not None and variable.shape.num_elements() <= MOST_ELEMENTS
            )

        return catch

    with contextlib.ExitStack() as meanwhile:
        for optimizer in optimizers:
            instead = {custom_steps.APPLY: catching(optimizer)}
            meanwhile.enter_context(keras.layers.replaced(optimizer, **instead))
        yield given
