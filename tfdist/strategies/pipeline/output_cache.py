"""What is kept of each record, as arrays in memory or in a folder. Nothing here knows TensorFlow.

A folder is written under another name and renamed when it is complete, so one that stands under
its name is whole.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from tfdist.errors import OptionError
from tfdist.records.writing.shard_files import staging_folder

KINDS = ("memory", "disk")
_DESCRIPTION = "table.json"
# The rest is for the model, its activations, and everybody else.
_MOST_OF_FREE_MEMORY = 0.5
_MOST_OF_FREE_DISK = 0.9


@dataclass(frozen=True)
class Column:
    """One array [records, *shape]."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def record_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Columns:
    """What a table consists of."""

    num_records: int
    columns: tuple[Column, ...]

    @property
    def record_bytes(self) -> int:
        return sum(column.record_bytes for column in self.columns)

    @property
    def total_bytes(self) -> int:
        return self.num_records * self.record_bytes

    def description(self) -> dict:
        return {
            "num_records": self.num_records,
            "columns": [[list(column.shape), column.dtype] for column in self.columns],
        }


def check_fits(columns: Columns, folder: Path | None) -> None:
    """Raises:
    OptionError: memory, or the disk of ``folder``, has no room for the table.
    """
    if folder is None:
        free, most = psutil.virtual_memory().available, _MOST_OF_FREE_MEMORY
        mend = "Choose frozen_cache='disk' with a frozen_cache_dir, or leave frozen_cache out"
    else:
        free, most = shutil.disk_usage(folder).free, _MOST_OF_FREE_DISK
        mend = "Choose another frozen_cache_dir, or leave frozen_cache out"
    if columns.total_bytes > most * free:
        raise OptionError(
            f"the outputs of frozen layers must fit into {most:.0%} of the free "
            f"{'memory' if folder is None else 'disk'}, here {free / 1e6:,.0f} MB",
            received=f"{columns.num_records} records of {columns.record_bytes / 1e3:,.1f} kB, "
            f"{columns.total_bytes / 1e6:,.0f} MB",
            mend=mend,
        )


def in_memory(columns: Columns) -> list[np.ndarray]:
    """Returns arrays to be filled."""
    return [np.empty((columns.num_records, *c.shape), c.dtype) for c in columns.columns]


def opened(folder: Path, columns: Columns) -> list[np.ndarray] | None:
    """Returns the arrays of a folder, read as they are needed; None when it does not hold them."""
    try:
        if json.loads((folder / _DESCRIPTION).read_text()) != columns.description():
            return None
        arrays = [
            np.load(folder / f"{number}.npy", mmap_mode="r", allow_pickle=False)
            for number in range(len(columns.columns))
        ]
    except (OSError, ValueError, EOFError):
        return None
    expected = [((columns.num_records, *c.shape), np.dtype(c.dtype)) for c in columns.columns]
    return arrays if [(a.shape, a.dtype) for a in arrays] == expected else None


@contextlib.contextmanager
def written(folder: Path, columns: Columns) -> Iterator[list[np.ndarray]]:
    """Gives arrays to be filled; they stand in ``folder`` when the block has ended well."""
    try:
        with staging_folder(folder) as partial:
            arrays = [
                np.lib.format.open_memmap(
                    partial / f"{number}.npy",
                    mode="w+",
                    dtype=np.dtype(column.dtype),
                    shape=(columns.num_records, *column.shape),
                )
                for number, column in enumerate(columns.columns)
            ]
            yield arrays
            for array in arrays:
                array.flush()
            (partial / _DESCRIPTION).write_text(json.dumps(columns.description()))
            if opened(folder, columns) is None:
                shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        if opened(folder, columns) is None:  # Else another process was faster.
            raise
