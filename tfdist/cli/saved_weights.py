"""The weights in a file of Keras, read without Keras: TensorFlow takes seconds to import."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np


def read(path: Path) -> dict[str, np.ndarray]:
    """Returns name -> array of model and optimizer.

    What metrics hold is left out: it is what their own process has seen last.

    Args:
        path: a ``.keras`` file.
    """
    import h5py

    found: dict[str, np.ndarray] = {}

    def keep(name: str, item: h5py.Dataset | h5py.Group) -> None:
        if isinstance(item, h5py.Dataset) and not name.startswith("metrics/"):
            found[name] = item[()]

    with (
        zipfile.ZipFile(path) as archive,
        archive.open("model.weights.h5") as member,
        h5py.File(member) as file,
    ):
        file.visititems(keep)
    return found


def largest_difference(a: Path, b: Path) -> float:
    """Returns the largest difference between two weights of files of one model."""
    ours, theirs = read(a), read(b)
    return max(
        float(np.max(np.abs(np.subtract(ours[name], theirs[name], dtype=np.float64)), initial=0.0))
        for name in ours
        if not name.startswith("optimizer/")
    )
