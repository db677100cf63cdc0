"""How many shards a split gets when nobody says it: of 100 to 200 MB each, and a few at least."""

from __future__ import annotations

import numpy as np

from tfdist.errors import DataError
from tfdist.records.format.columns import Columns
from tfdist.records.format.encoding import FOOTER_BYTES, HEADER_BYTES, make_framer, make_layout

DEFAULT_NUM_SHARDS = 4
# Of a stream of unknown length: 3 GB make shards of 190 MB.
STREAM_NUM_SHARDS = 16
_SHARD_BYTES = 150_000_000
_SAMPLED_RECORDS = 16


def shards_for(num_bytes: float) -> int:
    """Returns the number of shards for the records of a split."""
    return max(DEFAULT_NUM_SHARDS, round(num_bytes / _SHARD_BYTES))


def frame_bytes(columns: Columns) -> float:
    """Returns the bytes of a record in a shard that is not compressed, on average.

    Of records that differ some are looked at.
    """
    widths = columns.varint_widths()
    layout = make_layout(columns.schema, widths)
    if layout is not None:
        return HEADER_BYTES + layout.record_bytes + FOOTER_BYTES
    some = np.unique(np.linspace(0, columns.num_records - 1, _SAMPLED_RECORDS).astype(np.int64))
    try:
        block = columns.block(some)
    except DataError:
        return 0  # Told where it is written.
    return len(make_framer(columns.schema, widths).frame(block)) / len(some)
