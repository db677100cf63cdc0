"""A ``train_step`` of the user's own whose gradients are no mean over the rows of a batch.

A sum over rows, or a loss that compares them, gives others when the batch is divided. The step runs
on a whole batch and on its parts, and what it gives to its optimizers is compared, not applied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.keras.layers import layers_in
from tfdist.keras.optimizers import optimizers_of
from tfdist.training.layers.losses import own_functions
from tfdist.training.steps import custom_steps
from tfdist.training.steps.row_probe_layers import ASKS_ALL, tolerance_of


def parted(model: tf.keras.Model, batch: Any, parts: Sequence[slice]) -> bool:
    """Whether the gradients of a batch are others than the mean of those of its parts, by rows.

    Args:
        model: built and compiled. The step runs: metrics and what it counts by itself move.
        batch: as ``train_step`` takes it, tensors [rows, ...].
        parts: of its rows, each row in one of them.
    """
    if "train_step" not in custom_steps.own_steps(model) or _sees_all_rows(model):
        return False
    whole = _gradients(model, batch)
    rows = len(tf.nest.flatten(batch)[0])
    of_parts = []
    for part in parts:
        own = tf.nest.map_structure(lambda tensor, part=part: tensor[part], batch)
        of_parts.append(_gradients(model, own) * len(range(rows)[part]) / rows)
    if np.max(np.abs(whole - _gradients(model, batch)), initial=0.0) > 0:
        return False  # It draws random numbers.
    largest = np.max(np.abs(whole), initial=0.0)
    return bool(np.max(np.abs(whole - sum(of_parts)), initial=0.0) > tolerance_of(model) * largest)


def _sees_all_rows(model: tf.keras.Model) -> bool:
    """Whether replicas exchange something within the step, which its parts alone cannot show."""
    norms = (isinstance(layer, tf.keras.layers.BatchNormalization) for layer in layers_in(model))
    used = own_functions(model, tf.keras.Model).values()
    return any(norms) or any(ASKS_ALL & names for names in used)


def _gradients(model: tf.keras.Model, batch: Any) -> np.ndarray:
    """Returns all that a step gives to its optimizers, laid flat, [elements]."""
    with _caught(optimizers_of(model)) as given:
        model.train_step(batch)
    flat = [np.ravel(tf.convert_to_tensor(gradient)) for gradient in given]
    return np.concatenate([np.zeros(0), *flat])


@contextlib.contextmanager
def _caught(optimizers: Sequence[Any]) -> Iterator[list[Any]]:
    """Yields the gradients that optimizers are given meanwhile, of which they apply none."""
    given: list[Any] = []

    def catch(gradients: Any, *_: Any, **__: Any) -> None:
        pairs = [item if isinstance(item, tuple) else (item, None) for item in gradients]
        given.extend(gradient for gradient, _ in pairs if gradient is not None)

    try:
        for optimizer in optimizers:
            setattr(optimizer, custom_steps.APPLY, catch)
        yield given
    finally:
        for optimizer in optimizers:
            delattr(optimizer, custom_steps.APPLY)
