"""The records of one split of shards, in ordered batches."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import CorruptShardError
from tfdist.records.decode import batch_spec, make_decoder
from tfdist.records.manifest import Manifest, ShardInfo
from tfdist.records.streams import Source, buffer_records, shuffled_by

_READ_BUFFER_BYTES = 1 << 20
# Local files of this size are not all in the page cache, so reading several at once pays.
_INTERLEAVE_BYTES = 2 << 30
_MAX_INTERLEAVED = 4


class ShardSource(Source):
    """One split of shards, all in one folder.

    Args:
        manifest: lists the shards of the split that are there.
        is_apart: whether the manifest lies elsewhere.
    """

    def __init__(self, folder: Path, split: str, manifest: Manifest, *, is_apart: bool = False):
        if is_apart:
            self.apart = (folder, split, manifest)
        else:
            self.place = (folder, split)
        self._folder = folder
        self._shards = manifest.splits[split].shards
        self._compression = {"none": "", "gzip": "GZIP"}[manifest.compression]
        self._ends = np.cumsum([shard.records for shard in self._shards])
        self._decode = make_decoder(manifest.schema, manifest.layout)
        # Of one serialised record; images hardly shrink when their shard is compressed.
        self._stored_bytes = (
            manifest.layout.record_bytes
            if manifest.layout
            else math.ceil(manifest.splits[split].bytes / self._ends[-1])
        )
        self.num_records = int(self._ends[-1])
        self.spec = batch_spec(manifest.schema)
        self._check_present()

    def _check_present(self) -> None:
        for shard in self._shards:
            _check_present(self._folder, shard)

    def stream(
        self, start: int, stop: int, batch_size: int, order: tf.Tensor | None, skip_records: Any
    ) -> tf.data.Dataset:
        ranges = self._ranges(start, stop)
        total = stop - start
        serialized = self._open(ranges, order)
        if order is not None:
            serialized = shuffled_by(serialized, order, buffer_records(self._stored_bytes, total))
        batches = serialized.skip(skip_records).batch(batch_size)
        return batches.map(self._decode, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    def numbers(self, start: int, stop: int, order: tf.Tensor | None) -> tf.data.Dataset:
        if order is None:
            return tf.data.Dataset.range(start, stop)
        ranges = self._ranges(start, stop)
        before = [0, *self._ends.tolist()]
        firsts = tf.constant([before[shard] + first for shard, first, _ in ranges], tf.int64)
        counts = tf.constant([count for _, _, count in ranges], tf.int64)
        numbers = self._in_shuffled_shards(
            ranges,
            (firsts, counts),
            order,
            lambda first, n: tf.data.Dataset.range(first, first + n),
        )
        return shuffled_by(numbers, order, buffer_records(self._stored_bytes, stop - start))

    def _ranges(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Returns (shard, first record in it, number of records) of the shards that are needed."""
        ranges = []
        begin = 0
        for number, end in enumerate(self._ends.tolist()):
            low, high = max(start, begin), min(stop, end)
            if low < high:
                ranges.append((number, low - begin, high - low))
            begin = end
        return ranges

    def _open(self, ranges: list[tuple[int, int, int]], order: tf.Tensor | None) -> tf.data.Dataset:
        """Returns the serialised records; with an order, of shards in shuffled order."""
        files = [os.fspath(self._folder / self._shards[number].file) for number, _, _ in ranges]
        if order is None:
            records = tf.data.TFRecordDataset(files, self._compression, _READ_BUFFER_BYTES)
            total = sum(count for _, _, count in ranges)
            return records.skip(ranges[0][1]).take(total)
        columns = (
            tf.constant(files),
            tf.constant([first for _, first, _ in ranges], tf.int64),
            tf.constant([count for _, _, count in ranges], tf.int64),
        )

        def read(file: tf.Tensor, first: tf.Tensor, count: tf.Tensor) -> tf.data.Dataset:
            records = tf.data.TFRecordDataset(file, self._compression, _READ_BUFFER_BYTES)
            return records.skip(first).take(count)

        return self._in_shuffled_shards(ranges, columns, order, read)

    def _in_shuffled_shards(
        self, ranges: list, columns: tuple[tf.Tensor, ...], order: tf.Tensor, read: Callable
    ) -> tf.data.Dataset:
        """Returns what ``read`` makes of the columns of each shard, as one dataset."""
        shuffled = tf.random.experimental.stateless_shuffle(tf.range(len(ranges)), seed=order)
        shards = tf.data.Dataset.from_tensor_slices(
            tuple(tf.gather(column, shuffled) for column in columns)
        )
        cycle = self._interleaved(ranges)
        if cycle == 1:
            return shards.flat_map(read)
        return shards.interleave(
            read, cycle_length=cycle, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
        )

    def _interleaved(self, ranges: list[tuple[int, int, int]]) -> int:
        """Returns how many shards to read at once: few local cached files are faster one by one."""
        stored = sum(self._shards[number].bytes for number, _, _ in ranges)
        pays = self._compression or stored > _INTERLEAVE_BYTES
        # Never a function of this machine: the order must be the same on every other.
        return min(len(ranges), _MAX_INTERLEAVED) if pays else 1


def _check_present(folder: Path, shard: ShardInfo) -> None:
    path = folder / shard.file
    mend = f"See all faults with `tfdist inspect {folder} --check`"
    if not path.is_file():
        raise CorruptShardError(
            "every shard of the manifest must exist", received=f"no {path}", mend=mend
        )
    size = path.stat().st_size
    if size != shard.bytes:
        raise CorruptShardError(
            f"{path} must have {shard.bytes} bytes", received=f"{size} bytes", mend=mend
        )
