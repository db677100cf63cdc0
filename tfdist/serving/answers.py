"""From the rows of a model's outputs to what JSON holds. Needs no TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def encode(rows: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns the rows of outputs as plain lists, by output. JSON knows no NaN: those are None."""
    return {name: _plain(values) for name, values in rows.items()}


def _plain(values: np.ndarray) -> list[Any]:
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        values = np.where(np.isfinite(values), values, None)
    return values.tolist()


def by_row(outputs: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Returns what ``encode`` returns as a value an instance, an object of several outputs."""
    if len(outputs) == 1:
        return list(next(iter(outputs.values())))
    return [dict(zip(outputs, row, strict=True)) for row in zip(*outputs.values(), strict=True)]
