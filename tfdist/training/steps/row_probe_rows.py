"""The rows that a model is tried on, all and in two parts: the user's own, and made-up ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.training.steps.row_probe_layers import state_kept

#: Rows that are tried, in parts of 6 and 2: of equal parts a mean of means would pass.
ROWS, FIRST = 8, 6
SLICES = slice(0, FIRST), slice(FIRST, None)
TOLERANCE = 1e-4  # Another order of summation is 1e-6 of a float32.
_OF_16_BITS = 0.05
_UNKNOWN_SIZE = 4
DRAWS = 4  # Of rows: of some, parts may make up the whole by chance, as where a mask is even.
_PADDINGS = (-1, -100)  # Labels that a loss may leave out.
_DRAWS_PADDED = 4
OTHER_ROWS = 1000  # Added to a seed: labels that are the outputs have no loss.


def filled_up(rows: Any) -> Any:
    """Returns ROWS rows, of fewer some again, as tensors; None of none."""
    if rows is None or not len(tf.nest.flatten(rows)[0]):
        return None
    numbers = np.arange(ROWS) % len(tf.nest.flatten(rows)[0])
    return tf.nest.map_structure(lambda rows: tf.gather(rows, numbers), rows)


def with_sizes_of(rows: Any, spec: Any) -> Any:
    """Returns the specs of inputs with the sizes of ``rows`` where they tell none.

    What Python makes is of any size in each dimension, and made-up rows of another fit no model.
    Of labels Keras, too, knows no more, and chooses metrics by that.
    """

    def sized(spec: Any, row: Any) -> Any:
        if not isinstance(spec, tf.TensorSpec) or spec.shape.rank != len(row.shape):
            return spec
        pairs = zip(spec.shape[1:], row.shape[1:], strict=True)
        return tf.TensorSpec([*spec.shape[:1], *(size or own for size, own in pairs)], spec.dtype)

    return tf.nest.map_structure(sized, spec, rows)


def with_outputs(model: tf.keras.Model, rows: Any) -> tuple[Any, Any, Any] | None:
    """Returns inputs and labels of rows with what ``model`` makes of them, where it can be had."""
    # A model may have its weights elsewhere.
    with contextlib.suppress(Exception), state_kept(model):
        return rows and (rows[0], rows[1], model(rows[0], training=False))
    return None


def tried(
    outputs: Any, element_spec: tuple[Any, ...], given: tuple[Any, Any, Any] | None
) -> Iterator[tuple[Any, Any, Any]]:
    """Yields inputs, labels and outputs: of the user's own rows, and made-up ones.

    Args:
        outputs: real or symbolic ones of a model; of None nothing is tried.
        given: of ``with_outputs``.
    """
    if outputs is None:
        return
    for seed in range(DRAWS) if given else ():
        # Parts of one order may make up the whole by chance.
        order = np.random.default_rng(seed).permutation(ROWS)
        yield tf.nest.map_structure(lambda tensor, order=order: tf.gather(tensor, order), given)
    for seed in range(DRAWS + _DRAWS_PADDED):
        yield made_up(element_spec[0], seed=seed), *_made_up_results(outputs, element_spec, seed)


def couples(function: Callable, *tensors: Any) -> bool:
    values = [function(*part) for part in parts_of(*tensors)]
    sizes = [leaf.dtype.size for leaf in tf.nest.flatten(tensors) if leaf.dtype.is_floating]
    if not differ(values, _OF_16_BITS if 2 in sizes else TOLERANCE):
        return False
    # A loss that draws random numbers has another value each time.
    again = function(*next(iter(parts_of(*tensors))))
    return not differ([values[0], again, again])


def parts_of(*tensors: Any) -> Iterator[list[Any]]:
    """Yields all rows, then those of the two parts."""
    for rows in (slice(None), *SLICES):
        yield [tf.nest.map_structure(lambda t, rows=rows: t[rows], item) for item in tensors]


def differ(values: list[Any], most: float = TOLERANCE) -> bool:
    """Whether a value of all rows is another one than the mean of those of the parts.

    Args:
        most: what they may differ by, as a part of the larger.
    """
    whole, first, second = (float(tf.reduce_mean(value)) for value in values)
    joined = (FIRST * first + (ROWS - FIRST) * second) / ROWS
    if not np.isfinite([whole, joined]).all():
        return False
    return abs(whole - joined) > most * max(abs(whole), abs(joined), 1e-6)


def _made_up_results(outputs: Any, element_spec: tuple[Any, ...], seed: int) -> tuple[Any, Any]:
    """Returns labels and outputs; ``outputs``: real or symbolic ones of a model."""
    outputs = made_up(outputs, probabilities=True, seed=seed)
    labels = made_up(element_spec[1], seed=seed + OTHER_ROWS)
    if seed >= DRAWS:
        padding = _PADDINGS[seed % len(_PADDINGS)]
        labels = tf.nest.map_structure(
            lambda leaf: tf.where(leaf == 0, padding, leaf) if _is_signed(leaf) else leaf, labels
        )
    return labels, outputs


def _is_signed(leaf: Any) -> bool:
    return leaf.dtype.is_integer and not leaf.dtype.is_unsigned and leaf.dtype.size > 1


def made_up(spec: Any, *, probabilities: bool = False, spread: bool = False, seed: int = 0) -> Any:
    """Returns rows of any values of a structure of specs [batch, ...].

    Args:
        probabilities: whether the last dimension adds up to 1.
        spread: whether rows are unlike, of both signs: a router sends all others to one expert.
    """
    rng = np.random.default_rng(seed)

    def rows(leaf: Any) -> tf.Tensor:
        shape = [ROWS, *(size or _UNKNOWN_SIZE for size in leaf.shape[1:])]
        dtype = tf.as_dtype(leaf.dtype)
        if not dtype.is_floating:
            numbers = rng.integers(0, 2, shape)
            return tf.strings.as_string(numbers) if dtype == tf.string else tf.cast(numbers, dtype)
        # What counts by a threshold looks the same on values that are all on one side of it.
        values = rng.choice([0.05, 0.95], shape) if seed % 2 else rng.uniform(0.1, 0.9, shape)
        if spread:
            values = rng.normal(size=shape)
        if probabilities and len(shape) > 1 and shape[-1] > 1:
            values /= values.sum(-1, keepdims=True)
        return tf.cast(values, leaf.dtype)

    return tf.nest.map_structure(rows, spec)
