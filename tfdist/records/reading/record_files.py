"""Records of uncompressed shards by their numbers, in any order."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from crc32c import crc32c

from tfdist.errors import DataError
from tfdist.records.format.checking import damage
from tfdist.records.format.encoding import FOOTER_BYTES, HEADER_BYTES, mask
from tfdist.records.format.files import open_regular
from tfdist.records.format.manifest import Manifest, ShardInfo


class RecordFiles:
    """The shards of one split. Where each record begins is looked up once, when one is read.

    Raises:
        DataError: the shards are compressed.
    """

    def __init__(self, folder: Path, shards: Sequence[ShardInfo], manifest: Manifest):
        if manifest.compression != "none":
            raise DataError(
                "shards must not be compressed where batches hold records of similar lengths, "
                "which lie anywhere in them",
                received=f"compression {manifest.compression}",
                mend="Write them with --compression none, or leave bucket_by_length out",
            )
        self._folder, self._shards, self._manifest = folder, shards, manifest
        self._files = manifest.shard_folder(folder)
        self._firsts = np.cumsum([0, *(shard.records for shard in shards)])
        self._places: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the serialised records, bytes [len(numbers)].

        Raises:
            CorruptShardError: a shard is not as it was written.
        """
        shard_of = np.searchsorted(self._firsts, numbers, side="right") - 1
        records = np.empty(len(numbers), object)
        for shard in np.unique(shard_of).tolist():
            wanted = np.flatnonzero(shard_of == shard)
            try:
                with open_regular(self._files / self._shards[shard].file) as file:
                    places = self._places_in(shard, file.fileno())
                    for row in wanted.tolist():
                        place, size = places[numbers[row] - self._firsts[shard]].tolist()
                        records[row] = _record(file.fileno(), place, size)
            except (OSError, ValueError, struct.error):
                raise damage(self._folder, self._shards[shard], self._manifest) from None
        return records

    def _places_in(self, shard: int, descriptor: int) -> np.ndarray:
        """Returns the place and the bytes of each frame of a shard, int64 [records, 2]."""
        with self._lock:
            if shard not in self._places:
                places, place = [], 0
                for _ in range(self._shards[shard].records):
                    size = _frame_bytes(os.pread(descriptor, HEADER_BYTES, place))
                    places.append((place, size))
                    place += size
                self._places[shard] = np.array(places, np.int64)
            return self._places[shard]


def _record(descriptor: int, place: int, size: int) -> bytes:
    """Returns the record of a frame. Raises ValueError when its checksums do not match."""
    frame = os.pread(descriptor, size, place)
    data = frame[HEADER_BYTES:-FOOTER_BYTES]
    (checksum,) = struct.unpack("<I", frame[-FOOTER_BYTES:])
    if _frame_bytes(frame[:HEADER_BYTES]) != len(frame) or checksum != mask(crc32c(data)):
        raise ValueError("checksum")
    return data


def _frame_bytes(header: bytes) -> int:
    length, checksum = struct.unpack("<QI", header)
    if checksum != mask(crc32c(header[:8])):
        raise ValueError("checksum of a length")
    return HEADER_BYTES + length + FOOTER_BYTES
