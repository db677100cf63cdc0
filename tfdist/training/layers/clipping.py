"""Clipping of gradients that lie in parts, as Keras clips whole ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import ModelError


def clips_by_norm(optimizer: Any) -> bool:
    """Whether ``optimizer`` asks for the norms of whole gradients."""
    return bool(_positive(optimizer.clipnorm) or _positive(optimizer.global_clipnorm))


def limit_of_values(optimizer: Any) -> float | None:
    """Returns what ``optimizer`` clips each element to, None where it does not."""
    return None if clips_by_norm(optimizer) else _positive(optimizer.clipvalue)


def clipped(optimizer: Any, parts: Sequence[Any], squares: Sequence[Any]) -> list[Any]:
    """Returns the parts of one replica as ``optimizer`` clips the gradients that they are of.

    Args:
        parts: one for each gradient, of any shapes.
        squares: the squared norm of each whole gradient; not read where values are clipped.
    """
    if limit := _positive(optimizer.clipnorm):
        return [
            part * limit / tf.maximum(tf.sqrt(square), limit)
            for part, square in zip(parts, squares, strict=True)
        ]
    if limit := _positive(optimizer.global_clipnorm):
        norm = tf.sqrt(tf.add_n(list(squares)))
        return list(tf.clip_by_global_norm(list(parts), limit, use_norm=norm)[0])
    if limit := limit_of_values(optimizer):
        return [tf.clip_by_value(part, -limit, limit) for part in parts]
    return list(parts)


def not_added_up(option: str, table: str, optimizer: Any) -> ModelError:
    """Returns what is wrong with an optimizer that would square the look-ups of a divided table."""
    return ModelError(
        f"a table whose slots are divided ({option}) must have an optimizer that adds up the "
        "gradients of equal look-ups, as with Keras 3 SGD alone does",
        received=f"'{table}' and {type(optimizer).__name__}",
        mend="Use SGD, or import tf_keras in place of keras, or leave the option out",
    )


def _positive(limit: float | None) -> float | None:
    return limit if limit and limit > 0 else None
