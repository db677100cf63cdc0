"""Whether records in memory are still those that they were."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from crc32c import crc32c

from tfdist.records.format.columns import Columns
from tfdist.records.writing.shard_sizes import frame_bytes

_CHUNK_BYTES = 16 << 20


def content_of(columns: Columns) -> str:
    """Returns a text that is another one where a value of any record is another one.

    All values are read once, some at a time. What they are called, and of which dtype they are,
    tells the schema. Raises DataError for values that cannot be written.
    """
    rows = max(1, int(_CHUNK_BYTES // max(1, frame_bytes(columns))))
    sums = dict.fromkeys(columns.columns, 0)
    for start in range(0, columns.num_records, rows):
        chunk = np.arange(start, min(start + rows, columns.num_records))
        for name, values in columns.block(chunk).items():
            for part in _parts(values):
                sums[name] = crc32c(part, sums[name])
    return repr(sums)


def _parts(values: Any) -> Iterator[memoryview | bytes]:
    """Yields the bytes of values, those of different lengths each with its own."""
    if isinstance(values, np.ndarray) and values.dtype != object:
        yield memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        return
    if isinstance(values, bytes):
        yield values
        return
    for value in values:
        yield b"%d " % len(value)
        yield from _parts(value)
