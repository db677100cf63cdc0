"""The shards of a stream: all of them grow side by side, whatever their number.

Of a stream neither the end nor all records are known, so that there is no permutation of all: which
split and which shard a record goes to is drawn as it comes, and records are mixed on the way.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tfdist.records.format.columns import count_classes
from tfdist.records.format.manifest import ShardInfo, SplitInfo
from tfdist.records.format.splits import apportion, check_enough, empty_split
from tfdist.records.writing.shard_files import ShardFile, shard_name

# Bytes of the records that are held to be mixed.
BUFFER_BYTES = 128 << 20
# Bytes that wait in memory, in all shards, before they are written.
_WAITING_BYTES = 16 << 20
# What Python adds to each record that it holds.
_OVERHEAD_BYTES = 48
_LONGEST_PATTERN = 1000


class StreamShards:
    """Takes records as they come, and writes them into the shards of their splits.

    Args:
        folder: where the shards are written; it is there, and empty.
        shares: of the splits, for records of no split of their own.
        num_shards: of each split.
    """

    def __init__(
        self,
        folder: Path,
        shares: Mapping[str, float],
        num_shards: Mapping[str, int],
        seed: int,
        compression: str,
    ):
        self._are_counted = False
        self._pattern = SplitPattern(shares, seed)
        waiting = _WAITING_BYTES // sum(num_shards.values())
        self._splits = {
            name: _Split(folder, name, number, num_shards[name], seed, compression, waiting)
            for number, name in enumerate(shares)
        }

    def add(self, frames: list[bytes], split: str | None, class_ids: np.ndarray | None) -> None:
        """Takes framed records, of one split or of none, and their class ids, int64 [n]."""
        self._are_counted |= class_ids is not None
        if split is None:
            names, numbers = self._pattern.names, self._pattern.next(len(frames))
        else:
            names, numbers = (split,), np.zeros(len(frames), np.int64)
        for frame, number in zip(frames, numbers.tolist(), strict=True):
            self._splits[names[number]].buffer.add(frame)
        for number, name in enumerate(names if class_ids is not None else ()):
            counts = count_classes(class_ids[numbers == number])
            self._splits[name].class_counts.update(counts)
        while sum(each.buffer.bytes for each in self._splits.values()) > BUFFER_BYTES:
            fullest = max(self._splits.values(), key=lambda each: each.buffer.bytes)
            # Many at once: to compare all splits for each record would take longer than to write.
            for _ in range(max(1, len(fullest.buffer) // 100)):
                fullest.put_one()

    def finish(self, *, is_exact: bool) -> dict[str, SplitInfo]:
        """Writes what is left, and returns the splits.

        Args:
            is_exact: whether each shard of the first split must have a record.

        Raises:
            DataError: a split, or a shard that must not be, is empty.
        """
        infos = {}
        for number, (name, split) in enumerate(self._splits.items()):
            while len(split.buffer):
                split.put_one()
            shards = split.close()
            records = sum(shard.records for shard in shards)
            if not records:
                raise empty_split(name, "none")
            if is_exact and number == 0:
                check_enough(name, records, split.num_shards)
            counts = dict(sorted(split.class_counts.items())) if self._are_counted else None
            infos[name] = SplitInfo(shards=tuple(shards), class_counts=counts)
        return infos


class _Split:
    """The shards of one split, and what waits to be written into them."""

    def __init__(
        self,
        folder: Path,
        name: str,
        number: int,
        num_shards: int,
        seed: int,
        compression: str,
        waiting_bytes: int,
    ):
        self.num_shards = num_shards
        self.buffer = MixingBuffer(seed, number)
        self.class_counts: Counter[int] = Counter()
        self._name, self._folder, self._compression = name, folder, compression
        self._deal = ShardDeal(num_shards, seed, number)
        self._waiting_bytes = waiting_bytes
        self._files = [
            ShardFile(folder / f"{name}-{shard:05d}", compression, stays_open=False)
            for shard in range(num_shards)
        ]
        self._waiting: list[list[bytes]] = [[] for _ in range(num_shards)]
        self._sizes = [0] * num_shards
        self._records = [0] * num_shards

    def put_one(self) -> None:
        """Sends a random one of the records that are held to a shard."""
        record, shard = self.buffer.take(), self._deal.next()
        self._waiting[shard].append(record)
        self._records[shard] += 1
        self._sizes[shard] += len(record)
        if self._sizes[shard] > self._waiting_bytes:
            self._flush(shard)

    def close(self) -> list[ShardInfo]:
        """Returns the shards that have records, whose files get their names now."""
        for shard in range(self.num_shards):
            self._flush(shard)
            with self._files[shard]:
                pass
        full = [shard for shard in range(self.num_shards) if self._records[shard]]
        infos = []
        for number, shard in enumerate(full):
            name = shard_name(self._name, number, len(full), self._compression)
            self._files[shard].path.rename(self._folder / name)
            infos.append(self._files[shard].info(name, self._records[shard]))
        for shard in set(range(self.num_shards)) - set(full):
            self._files[shard].path.unlink()
        return infos

    def _flush(self, shard: int) -> None:
        self._files[shard].write(b"".join(self._waiting[shard]))
        self._waiting[shard] = []
        self._sizes[shard] = 0


def held_bytes(num_bytes: int, records: int) -> int:
    """Returns what a buffer counts for records of so many bytes together."""
    return num_bytes + records * _OVERHEAD_BYTES


class SplitPattern:
    """Deals records to splits by permuted blocks, in each of which the shares are exact.

    Shares of 5 and 1 make blocks of 6; shares that no block of up to 1,000 can have are owed to
    the next one.
    """

    def __init__(self, shares: Mapping[str, float], seed: int):
        self.names = tuple(shares)
        self._shares = list(shares.values())
        self._random = np.random.default_rng((seed, 1))
        self._owed = np.zeros(len(shares))
        parts = np.array(self._shares) / sum(self._shares)
        sizes = np.arange(1, _LONGEST_PATTERN + 1)
        off = np.abs(sizes[:, None] * parts - np.rint(sizes[:, None] * parts)).max(axis=1)
        exact = np.flatnonzero(off < 1e-9)
        self._is_exact = bool(len(exact))
        self._size = int(sizes[exact[0]]) if self._is_exact else _LONGEST_PATTERN
        self._left = np.empty(0, np.int64)

    def next(self, count: int) -> np.ndarray:
        """Returns the number of the split of each of the next ``count`` records, int64 [count]."""
        while len(self._left) < count:
            blocks = max(1, count // self._size)
            counts = [
                apportion(self._size, self._shares, self._owed)
                for _ in range(1 if self._is_exact else blocks)
            ]
            rows = [np.repeat(np.arange(len(count)), count) for count in counts]
            rows = np.stack(rows * blocks if self._is_exact else rows)
            dealt = self._random.permuted(rows, axis=1).reshape(-1)
            self._left = np.concatenate([self._left, dealt])
        taken, self._left = self._left[:count], self._left[count:]
        return taken


class ShardDeal:
    """Deals the records of a split to its shards in permuted rounds: as many each, or one less."""

    def __init__(self, num_shards: int, seed: int, split: int):
        self._num_shards = num_shards
        self._random = random.Random(f"{seed} {split}")
        self._round: list[int] = []

    def next(self) -> int:
        if not self._round:
            self._round = list(range(self._num_shards))
            self._random.shuffle(self._round)
        return self._round.pop()


class MixingBuffer:
    """Holds records, and gives a random one of them for each that is one too many."""

    def __init__(self, seed: int, split: int):
        self._random = random.Random(f"mix {seed} {split}")
        self._records: list[bytes] = []
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: bytes) -> None:
        self._records.append(record)
        self.bytes += len(record) + _OVERHEAD_BYTES

    def take(self) -> bytes:
        records = self._records
        at = int(self._random.random() * len(records))
        record, records[at] = records[at], records[-1]
        records.pop()
        self.bytes -= len(record) + _OVERHEAD_BYTES
        return record
