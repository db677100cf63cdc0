"""Tables of which all rows of a batch look up the same rows, as those of positions.

Keras keeps one gradient for each look-up, and clips these before it adds up those of one row; Keras
3 squares them before, too. One device looks a position up once for all rows of a batch, and each
part of it once for its own: so what the parts found for such a table is added up first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from tfdist.keras.optimizers import ADDS_UP_LOOK_UPS, inner_of
from tfdist.keras.tensors import raw
from tfdist.training.layers.clipping import clips_by_norm, limit_of_values


def found(model: tf.keras.Model, x: Any, parts: Sequence[slice]) -> frozenset[Any]:
    """Returns references of the weights that are such tables; none where it makes no difference.

    Args:
        x: a batch as the model takes it, tensors [rows, ...].
        parts: of its rows, of different sizes.
    """
    optimizer = inner_of(model.optimizer)
    is_clipped = clips_by_norm(optimizer) or limit_of_values(optimizer) is not None
    if not is_clipped and ADDS_UP_LOOK_UPS:
        return frozenset()
    counts = [
        _look_ups(model, tf.nest.map_structure(lambda tensor, rows=rows: tensor[rows], x))
        for rows in parts
    ]
    return frozenset(
        raw(variable).ref()
        for variable, first, *others in zip(model.trainable_variables, *counts, strict=True)
        if first is not None and all(other == first for other in others)
    )


def _look_ups(model: tf.keras.Model, x: Any) -> list[int | None]:
    """Returns how often each weight was looked up; None where it was used as a whole."""
    strategy = model.distribute_strategy
    weights = [
        strategy.experimental_local_results(raw(variable))[0]
        for variable in model.trainable_variables
    ]
    with tf.GradientTape() as tape:
        outputs = tf.nest.flatten(model(x, training=False))
        total = tf.add_n([tf.reduce_sum(tf.cast(output, tf.float32)) for output in outputs])
    return [
        int(tf.shape(gradient.indices)[0]) if isinstance(gradient, tf.IndexedSlices) else None
        for gradient in tape.gradient(total, weights)
    ]


def added_up(
    gradients: Sequence[Any], variables: Sequence[Any], tables: Collection[Any]
) -> list[Any]:
    """Returns the gradients, those of ``tables`` whole; ``tables``: what ``found`` returned."""
    return [
        tf.convert_to_tensor(gradient)
        if isinstance(gradient, tf.IndexedSlices) and raw(variable).ref() in tables
        else gradient
        for gradient, variable in zip(gradients, variables, strict=True)
    ]
