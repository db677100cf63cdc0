"""Reading records of shards by their numbers, in any order: nothing else of a shard is read."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import IO

import numpy as np

from tfdist.records.format.encoding import FOOTER_BYTES, HEADER_BYTES, is_summed, length_in
from tfdist.records.format.files import open_regular
from tfdist.records.format.intact import Intact
from tfdist.records.format.manifest import Manifest, ShardInfo
from tfdist.records.format.offsets import Offsets


class NumberedRecords:
    """The records of one split of uncompressed shards.

    Args:
        folder: of the manifest.
        intact: watches over the shards.
        framed: whether records are given with their frames.
    """

    def __init__(
        self,
        folder: Path,
        shards: tuple[ShardInfo, ...],
        manifest: Manifest,
        intact: Intact,
        *,
        framed: bool,
    ):
        self._files, self._shards = manifest.shard_folder(folder), shards
        self._ends = np.cumsum([shard.records for shard in shards])
        self._intact, self._framed = intact, framed
        self._offsets = Offsets(folder, manifest)

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the records of the given numbers, int64 [n], as bytes: an object array [n].

        The checksums of each are compared, and those of the files that they are of as always.

        Raises:
            CorruptShardError: a shard is not as it was written.
        """
        records = np.empty(len(numbers), object)
        of_shard = np.searchsorted(self._ends, numbers, side="right")
        # In the order of the first record of each: those that are read first are summed first.
        for number in dict.fromkeys(of_shard.tolist()):
            places = np.flatnonzero(of_shard == number)
            shard = self._shards[number]
            rows = numbers[places] - (self._ends[number] - shard.records)
            self._intact.expect([number])
            self._intact.open(number, by_frames=True)
            _, frames = self._frames(shard, rows)
            for place, frame in zip(places, frames, strict=True):
                records[place] = frame if self._framed else frame[HEADER_BYTES:-FOOTER_BYTES]
        return records

    def first_byte(self, number: int, row: int) -> int:
        """Returns where the frame of a record of a shard begins, which was looked at.

        Raises:
            CorruptShardError: no frame begins there.
        """
        (begin,), _ = self._frames(self._shards[number], np.array([row]))
        return int(begin)

    def _frames(self, shard: ShardInfo, rows: np.ndarray) -> tuple[np.ndarray, list[bytes]]:
        """Returns where the frames of records of a shard begin, and the frames.

        What the index says is looked at first, and then the frames themselves.

        Raises:
            CorruptShardError: one of them is not right either way.
        """
        for anew in (False, True):
            with contextlib.suppress(OSError):
                found = self._offsets.of(shard, rows, anew=anew)
                if found is None:
                    continue
                with open_regular(self._files / shard.file) as file:
                    frames = [_frame(file, *place) for place in zip(*found, strict=True)]
                if None not in frames:
                    return found[0], frames
        raise self._intact.damaged(shard)


def _frame(file: IO[bytes], begin: int, end: int) -> bytes | None:
    """Returns the bytes of a frame; None when its checksums are not right."""
    frame = os.pread(file.fileno(), end - begin, begin)
    if len(frame) != end - begin:
        return None
    data = memoryview(frame)[HEADER_BYTES:-FOOTER_BYTES]
    is_right = length_in(frame) == len(data) and is_summed(data, frame[-FOOTER_BYTES:])
    return frame if is_right else None
