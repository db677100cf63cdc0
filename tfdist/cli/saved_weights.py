"""The weights in a file of Keras, read without Keras: TensorFlow takes seconds to import."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

# What metrics hold is what their own process has seen last.
_METRICS, _OPTIMIZER = "metrics/", "optimizer/"


def read(path: Path, leave_out: tuple[str, ...] = (_METRICS,)) -> dict[str, np.ndarray]:
    """Returns name -> array of model and optimizer.

    Args:
        path: a ``.keras`` file.
        leave_out: how names begin that are not read.
    """
    import h5py

    found: dict[str, np.ndarray] = {}

    def keep(name: str, item: h5py.Dataset | h5py.Group) -> None:
        if isinstance(item, h5py.Dataset) and not name.startswith(leave_out):
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
    import numpy as np

    ours, theirs = (read(path, leave_out=(_METRICS, _OPTIMIZER)) for path in (a, b))
    differences = [
        np.max(np.abs(np.subtract(ours[name], theirs[name], dtype=np.float64)), initial=0.0)
        for name in ours
    ]
    return float(np.max(differences, initial=0.0))  # Of weights that are NaN it is NaN.
