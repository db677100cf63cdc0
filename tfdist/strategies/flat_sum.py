"""Sums of many arrays over processes in one message."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def flat_sum(
    values: Sequence[np.ndarray], total_of: Callable[[np.ndarray], np.ndarray]
) -> list[np.ndarray]:
    """Returns the sums over processes of ``values``, each as it was in shape and dtype.

    Args:
        total_of: sends float64 [elements]; returns the sum of what all processes send.
    """
    if not values:
        return []
    flat = np.concatenate([np.ravel(value).astype(np.float64) for value in values])
    pieces = np.split(total_of(flat), np.cumsum([value.size for value in values])[:-1])
    return [
        piece.reshape(value.shape).astype(value.dtype)
        for piece, value in zip(pieces, values, strict=True)
    ]
