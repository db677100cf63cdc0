"""A training written down for a process that takes the place of this one: a NumPy archive."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

_NOTES = "notes"


def write(path: Path, notes: Any, variables: Sequence[tf.Tensor]) -> None:
    """Writes notes and variables, whole or not at all.

    Args:
        notes: what JSON knows, and bytes and NumPy arrays of numbers.
        variables: of any types.
    """
    text = json.dumps(notes, default=_encode)
    arrays = {_NOTES: np.frombuffer(text.encode(), np.uint8)}
    for index, variable in enumerate(variables):
        arrays[str(index)] = np.frombuffer(tf.io.serialize_tensor(variable).numpy(), np.uint8)
    half = path.with_suffix(".half")
    with open(half, "wb") as file:
        np.savez(file, **arrays)
    os.replace(half, path)


def read(path: Path, dtypes: Sequence[tf.DType]) -> tuple[Any, list[tf.Tensor]]:
    """Returns what ``write`` was given.

    Args:
        dtypes: of the variables.
    """
    with np.load(path, allow_pickle=False) as archive:
        notes = json.loads(archive[_NOTES].tobytes(), object_hook=_decode)
        parts = [archive[str(index)].tobytes() for index in range(len(archive.files) - 1)]
    return notes, [
        tf.io.parse_tensor(part, dtype) for part, dtype in zip(parts, dtypes, strict=False)
    ]


def _encode(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray):
        return {"float64": value.astype(np.float64).tolist()}
    return value.item()  # One of NumPy's numbers.


def _decode(fields: dict[str, Any]) -> Any:
    if set(fields) == {"bytes"}:
        return base64.b64decode(fields["bytes"])
    if set(fields) == {"float64"}:
        return np.asarray(fields["float64"], np.float64)
    return fields
