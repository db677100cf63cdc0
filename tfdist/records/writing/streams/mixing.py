"""Which split and which shard a record of a stream goes to, and how records are mixed on the way.

Of a stream neither the end nor all records are known, so that there is no permutation of all.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np

from tfdist.records.format.splits import apportion

# Bytes of the records that are held to be mixed.
BUFFER_BYTES = 128 << 20
# What Python adds to each record that it holds.
_OVERHEAD_BYTES = 48
_LONGEST_PATTERN = 1000


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
            counts = [apportion(self._size, self._shares, self._owed)]
            if not self._is_exact:
                counts += [
                    apportion(self._size, self._shares, self._owed) for _ in range(blocks - 1)
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
