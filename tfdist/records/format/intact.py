"""Whether the shards that TensorFlow reads are those of the manifest; looked at beside reading."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from tfdist.errors import CorruptShardError
from tfdist.records.format.checking import damage
from tfdist.records.format.files import regular_size, sums
from tfdist.records.format.manifest import Manifest, ShardInfo
from tfdist.records.format.offsets import lengths_in

# Summing a shard of this size takes less than a tenth of a second when it is in the page cache.
_AWAITED_BYTES = 256 << 20


class Intact:
    """Watches over the shards of one split while they are read.

    Each file is summed once in this process, by a thread beside the reading, and again when another
    file takes its place. No record of a small shard is given before its sum is known. Those of a
    large one are, but not the last batch of an epoch.

    Attributes:
        failures: the errors that were raised; TensorFlow hands on their text only.
    """

    def __init__(self, folder: Path, shards: Sequence[ShardInfo], manifest: Manifest):
        self._folder, self._shards, self._manifest = folder, shards, manifest
        self._files = manifest.shard_folder(folder)
        self._lock = threading.Lock()
        self._expected: dict[int, None] = {}
        self._asked: set[int] = set()
        self._opened: dict[int, None] = {}
        self.failures: list[CorruptShardError] = []

    def expect(self, numbers: Sequence[int]) -> None:
        """Tells which shards will be opened: they are summed when the first of them is."""
        with self._lock:
            self._expected |= dict.fromkeys(n for n in numbers if n not in self._asked)

    def open(self, number: int, *, by_frames: bool = False) -> None:
        """Is called before a shard is opened, in the order of reading.

        Args:
            by_frames: whether its reader compares the checksums of each length and record itself;
                it may say so again before each of its records.

        Raises:
            CorruptShardError: it is not the shard that was written.
        """
        with self._lock:
            if by_frames and number in self._opened:
                return
        self._begin()
        shard = self._shards[number]
        if shard.bytes <= _AWAITED_BYTES or self._manifest.compression != "none":
            self._check(shard)
        elif self._manifest.layout is None and not by_frames:
            # TensorFlow makes room for whatever length it reads, and dies where there is none.
            self._demand(shard, lambda path: lengths_in(path, shard) is not None)
        else:  # TensorFlow reads no length.
            self._demand(shard, lambda path: regular_size(path) == shard.bytes)
        with self._lock:
            self._opened[number] = None

    def confirm(self) -> None:
        """Returns when all shards that were opened since the last call are known to be right.

        Raises:
            CorruptShardError: one is not, or another file lies in its place.
        """
        with self._lock:
            opened, self._opened = self._opened, {}
        for number in opened:
            self._check(self._shards[number])

    def confirm_all(self) -> None:
        """As ``confirm``, of all shards, whether they were opened or not."""
        for shard in self._shards:
            self._check(shard)

    def _check(self, shard: ShardInfo) -> None:
        self._demand(shard, lambda path: sums.of(path) == shard.checksum)

    def _demand(self, shard: ShardInfo, is_right: Callable[[Path], bool]) -> None:
        with contextlib.suppress(OSError):
            if is_right(self._files / shard.file):
                return
        raise self.damaged(shard)

    def damaged(self, shard: ShardInfo) -> CorruptShardError:
        """Returns the error for a shard that was found not to be as it was written."""
        self.failures.append(damage(self._folder, shard, self._manifest))
        return self.failures[-1]

    def _begin(self) -> None:
        with self._lock:
            paths = [self._files / self._shards[number].file for number in self._expected]
            self._asked.update(self._expected)
            self._expected = {}
        if paths:
            threading.Thread(
                target=_sum_all, args=(paths, weakref.ref(self)), name="tfdist-sums", daemon=True
            ).start()


def _sum_all(paths: list[Path], wanted: weakref.ref[Intact]) -> None:
    """Sums files until all are, or nobody wants to know any more."""
    for path in paths:
        # What is wrong with a file is told where it is read.
        with contextlib.suppress(OSError):
            sums.of(path, go_on=lambda: wanted() is not None)
        if wanted() is None:
            return
