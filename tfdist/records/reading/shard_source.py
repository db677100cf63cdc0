"""The records of one split of shards, or of a section of it, in ordered batches."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import CorruptShardError, DataError, TfdistError
from tfdist.records.format.files import regular_size, unreadable
from tfdist.records.format.intact import Intact
from tfdist.records.format.manifest import Manifest, ShardInfo, find_split
from tfdist.records.format.schema import Schema
from tfdist.records.reading.batch_padding import ragged_features
from tfdist.records.reading.decode import (
    Decoder,
    batch_spec,
    entry_counts,
    make_decoder,
    make_record_decoder,
    parsed_values,
    spec_bytes,
)
from tfdist.records.reading.images import check_one_size
from tfdist.records.reading.numbered import NumberedRecords
from tfdist.records.reading.source import OrderedRecords, Wanted, shuffled_by
from tfdist.records.reading.stored import Section

_READ_BUFFER_BYTES = 1 << 20
# Read at once where records are read by their numbers: more would only make the first batch wait.
_NUMBERED_BYTES = 4 << 20
_NUMBERED_RECORDS = 256
# Local files of this size are not all in the page cache, so reading several at once pays.
_INTERLEAVE_BYTES = 2 << 30
_MAX_INTERLEAVED = 4
_COUNTED_RECORDS = 1024


class ShardSource(OrderedRecords):
    """One split of shards, all in one folder.

    Args:
        manifest: lists the shards of the split that are there.
        is_apart: whether the manifest lies elsewhere.
        any_size: whether images may be read in the sizes they have, as something else makes them
            one.
        readers: see ``OrderedRecords``.
        own: of the records of these shards, the first that is one of the source's, and the first
            behind them; None: all are.

    Raises:
        DataError: images of several sizes, which make no batch.
    """

    #: Whether serialised records of a layout come with their frames.
    _gives_frames = True

    def __init__(
        self,
        folder: Path,
        split: str,
        manifest: Manifest,
        *,
        is_apart: bool = False,
        any_size: bool = False,
        readers: tuple[int, int] | None = None,
        own: tuple[int, int] | None = None,
    ):
        if not any_size:
            check_one_size(manifest.schema)
        if is_apart:
            self.apart = (folder, split, manifest)
        else:
            self.place = (folder, split)
        self.readers = readers
        self._folder = folder
        self._files = manifest.shard_folder(folder)
        self._manifest = manifest
        self._shards = manifest.splits[split].shards
        self._compression = {"none": "", "gzip": "GZIP"}[manifest.compression]
        self._ends = np.cumsum([shard.records for shard in self._shards])
        self._decode = make_decoder(manifest.schema, manifest.layout, framed=self._gives_frames)
        self.schema = manifest.schema
        self._layout = layout = manifest.layout
        # Of one serialised record; images hardly shrink when their shard is compressed.
        self._stored_bytes = (
            layout.record_bytes
            if layout
            else math.ceil(manifest.splits[split].bytes / self._ends[-1])
        )
        self._skipped, behind = own or (0, int(self._ends[-1]))
        self.num_records = behind - self._skipped
        self.spec = batch_spec(manifest.schema)
        self._intact = self._watched(manifest)
        # To reach a record in the middle of a compressed file, all before it is unpacked.
        self._numbered = None
        if self._intact is not None and not self._compression:
            self._numbered = NumberedRecords(
                folder, self._shards, manifest, self._intact, framed=layout is not None
            )

    @property
    def record_bytes(self) -> int | None:
        """As of any source; text is taken to be as long as all that is stored of a record."""
        return spec_bytes(self.spec, None if self._compression else self._stored_bytes)

    def _watched(self, manifest: Manifest) -> Intact | None:
        """Returns what watches over the files while they are read."""
        for shard in self._shards:
            _check_present(self._folder, self._files / shard.file, shard)
        return Intact(self._folder, self._shards, manifest)

    def stream(self, wanted: Wanted) -> tf.data.Dataset:
        return self._decoded(wanted, self._decode)

    def singles(self, wanted: Wanted) -> tuple[tf.data.Dataset, Callable[[Any], Any]]:
        # What is parsed or sliced for many at once is left to batches, images are not.
        parse, finish = make_record_decoder(self.schema, self._layout, framed=self._gives_frames)
        return self._decoded(wanted, parse).unbatch(), finish

    def _decoded(self, wanted: Wanted, decode_batch: Decoder) -> tf.data.Dataset:
        batches = self._serialized(wanted).batch(wanted.batch_size)
        left = wanted.stop - wanted.start - tf.cast(wanted.skip, tf.int64)
        last = -(-left // wanted.batch_size) - 1

        def decode(number: tf.Tensor, records: tf.Tensor) -> Any:
            with tf.control_dependencies([self._confirmed(number == last)]):
                return decode_batch(tf.identity(records))

        return batches.enumerate().map(
            decode, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
        )

    def _serialized(self, wanted: Wanted) -> tf.data.Dataset:
        """Returns the serialised records of ``stream``, string []: without reading those that are
        skipped, unless they are shuffled and compressed."""
        start, stop, order = wanted.start, wanted.stop, wanted.order
        skip = tf.cast(wanted.skip, tf.int64)
        if order is None:
            return self._in_order(start, stop, skip)
        if self._numbered is None:
            return self._shuffled(start, stop, order).skip(skip)
        from_middle = tf.data.Dataset.from_tensors(skip)
        # What such a function makes is made when it is needed: no shard is expected in vain.
        whole = from_middle.filter(lambda skip: skip == 0).flat_map(
            lambda _: self._shuffled(start, stop, order)
        )
        rest = from_middle.filter(lambda skip: skip > 0).flat_map(
            lambda skip: self._by_number(self.numbers(start, stop, order).skip(skip))
        )
        known = tf.get_static_value(skip)
        if known is not None:
            return rest if known else whole
        return whole.concatenate(rest)

    def _shuffled(self, start: int, stop: int, order: tf.Tensor) -> tf.data.Dataset:
        records = self._in_shuffled_shards(self._ranges(start, stop), order, self._read)
        return shuffled_by(records, order, self._stored_bytes, stop - start)

    def _in_order(self, start: int, stop: int, skip: tf.Tensor) -> tf.data.Dataset:
        numbers, firsts, counts = _columns(self._ranges(start, stop))
        ends = tf.cumsum(counts)
        left_out = tf.clip_by_value(skip - ends + counts, 0, counts)
        is_left = left_out < counts
        shards = tuple(
            tf.boolean_mask(column, is_left)
            for column in (numbers, firsts + left_out, counts - left_out)
        )
        return self._expected(shards).flat_map(self._read)

    def _by_number(self, numbers: tf.data.Dataset) -> tf.data.Dataset:
        def read(numbers: tf.Tensor) -> tf.Tensor:
            records = tf.numpy_function(self._numbered.read, [numbers + self._skipped], tf.string)
            return tf.ensure_shape(records, [None])

        at_once = max(1, min(_NUMBERED_RECORDS, _NUMBERED_BYTES // self._stored_bytes))
        return numbers.batch(at_once).map(read).unbatch()

    def lengths(self) -> np.ndarray:
        features = ragged_features(self.schema)
        # A SequenceExample is told by its lists, which must be among what is parsed.
        needed = self.schema.features if self.schema.is_sequence_example else features
        schema = Schema(tuple(replace(feature, role="input") for feature in needed))

        def count(serialized: tf.Tensor) -> tf.Tensor:
            return entry_counts(features, parsed_values(schema, serialized))

        batches = self._decoded(Wanted(0, self.num_records, _COUNTED_RECORDS), count)
        return np.concatenate(list(batches.as_numpy_iterator()))

    def check_can_choose(self) -> None:
        if self._compression:
            raise DataError(
                "shards must not be compressed where batches hold records of similar lengths, "
                "which lie anywhere in them",
                received=f"compression {self._manifest.compression}",
                mend="Write them without compression, or leave bucket_by_length out",
            )

    def chosen(self, numbers: tf.data.Dataset) -> tf.data.Dataset:
        last = numbers.cardinality() - 1

        def decode(step: tf.Tensor, of_batch: tf.Tensor) -> Any:
            serialized = tf.numpy_function(self._read_chosen, [of_batch, step == last], tf.string)
            return self._decode(tf.ensure_shape(serialized, (None,)))

        return numbers.enumerate().map(
            decode, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
        )

    def _read_chosen(self, numbers: np.ndarray, is_last: np.bool_) -> np.ndarray:
        records = self._numbered.read(numbers + self._skipped)
        if is_last:  # Each record has been compared with its own checksum only.
            self._intact.confirm_all()
        return records

    def _confirmed(self, is_last: tf.Tensor) -> tf.Tensor:
        """Returns what the last batch waits for: then all files are known to be right."""
        if self._intact is None:
            return tf.constant(0, tf.int64)

        def confirm() -> np.int64:
            self._intact.confirm()
            return np.int64(0)

        return tf.cond(
            is_last,
            lambda: tf.numpy_function(confirm, [], tf.int64),
            lambda: tf.constant(0, tf.int64),
        )

    def confirm(self) -> None:
        if self._intact is not None:
            self._intact.confirm()

    @property
    def failures(self) -> Sequence[TfdistError]:
        return () if self._intact is None else self._intact.failures

    def numbers(self, start: int, stop: int, order: tf.Tensor | None) -> tf.data.Dataset:
        if order is None:
            return tf.data.Dataset.range(start, stop)
        before = tf.constant([0, *self._ends.tolist()], tf.int64) - self._skipped

        def of_shard(shard: tf.Tensor, first: tf.Tensor, count: tf.Tensor) -> tf.data.Dataset:
            number = before[shard] + first
            return tf.data.Dataset.range(number, number + count)

        ranges = self._ranges(start, stop)
        # One after the other is the same order, and ten times as fast where nothing is read.
        numbers = self._in_shuffled_shards(ranges, order, of_shard, in_parallel=False)
        return shuffled_by(numbers, order, self._stored_bytes, stop - start)

    def _ranges(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Returns (shard, first record in it, number of records) of the shards that are needed."""
        start, stop = start + self._skipped, stop + self._skipped
        ranges = []
        begin = 0
        for number, end in enumerate(self._ends.tolist()):
            low, high = max(start, begin), min(stop, end)
            if low < high:
                ranges.append((number, low - begin, high - low))
            begin = end
        return ranges

    def _expected(self, shards: tuple[tf.Tensor, ...]) -> tf.data.Dataset:
        """Returns shards, as ``_columns`` gives them, that will be opened in this order."""

        def expect(numbers: np.ndarray) -> np.ndarray:
            self._intact.expect(numbers.tolist())
            return numbers

        numbers = tf.numpy_function(expect, [shards[0]], tf.int64)
        numbers = tf.ensure_shape(numbers, shards[0].shape)
        return tf.data.Dataset.from_tensor_slices((numbers, *shards[1:]))

    def _read(self, number: tf.Tensor, first: tf.Tensor, count: tf.Tensor) -> tf.data.Dataset:
        """Returns some records of a shard that is looked at before."""
        file, first_byte = tf.numpy_function(self._let_in, [number, first], [tf.string, tf.int64])
        file, first_byte = tf.ensure_shape(file, ()), tf.ensure_shape(first_byte, ())
        if self._layout is not None:  # No length is read, so that none can be wrong.
            records = tf.data.FixedLengthRecordDataset(
                file,
                self._layout.frame_bytes,
                header_bytes=first * self._layout.frame_bytes,
                buffer_size=_READ_BUFFER_BYTES,
                compression_type=self._compression,
            )
        elif self._numbered is None:
            records = tf.data.TFRecordDataset(file, self._compression, _READ_BUFFER_BYTES)
            records = records.skip(first)
        else:  # The class of tf.data takes no place to begin at.
            opened = tf.raw_ops.TFRecordDatasetV2(
                filenames=[file],
                compression_type=self._compression,
                buffer_size=_READ_BUFFER_BYTES,
                byte_offsets=[first_byte],
            )
            records = tf.data.experimental.from_variant(opened, tf.TensorSpec([], tf.string))
        return records.take(count).apply(tf.data.experimental.assert_cardinality(count))

    def _let_in(self, number: np.int64, first: np.int64) -> tuple[bytes, np.int64]:
        """Returns the file of a shard, and where its record ``first`` begins; 0 where that is not
        asked for."""
        self._intact.open(int(number))
        first_byte = 0
        if first and self._layout is None and self._numbered is not None:
            first_byte = self._numbered.first_byte(int(number), int(first))
        return os.fsencode(self._files / self._shards[number].file), np.int64(first_byte)

    def _in_shuffled_shards(
        self,
        ranges: list[tuple[int, int, int]],
        order: tf.Tensor,
        read: Callable,
        *,
        in_parallel: bool = True,
    ) -> tf.data.Dataset:
        """Returns what ``read`` makes of the columns of each shard, as one dataset."""
        shuffled = tf.random.experimental.stateless_shuffle(tf.range(len(ranges)), seed=order)
        columns = tuple(tf.gather(column, shuffled) for column in _columns(ranges))
        if in_parallel:
            shards = self._expected(columns)
        else:
            shards = tf.data.Dataset.from_tensor_slices(columns)
        cycle = self._interleaved(ranges)
        if cycle == 1:
            return shards.flat_map(read)
        options = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": True}
        return shards.interleave(read, cycle_length=cycle, **(options if in_parallel else {}))

    def _interleaved(self, ranges: list[tuple[int, int, int]]) -> int:
        """Returns how many shards to read at once: few local cached files are faster one by one."""
        stored = sum(self._shards[number].bytes for number, _, _ in ranges)
        pays = self._compression or stored > _INTERLEAVE_BYTES
        # Never a function of this machine: the order must be the same on every other.
        return min(len(ranges), _MAX_INTERLEAVED) if pays else 1


def of_section(section: Section, *, any_size: bool = False) -> ShardSource:
    """Returns the source of a section, whose records are numbered from 0.

    Args:
        any_size: see ``ShardSource``.

    Raises:
        DataError: the shards cannot be read; CorruptShardError: one that is needed is not there.
    """
    folder, split, manifest = find_split(Path(section.path))
    info = manifest.splits[split]
    assert 0 <= section.start < section.stop <= info.records, section
    needed, first, before = [], 0, 0
    for shard in info.shards:
        if before + shard.records <= section.start:
            first = before + shard.records
        elif before < section.stop:
            needed.append(shard)
        before += shard.records
    manifest = replace(manifest, splits={split: replace(info, shards=tuple(needed))})
    own = (section.start - first, section.stop - first)
    return ShardSource(folder, split, manifest, is_apart=True, any_size=any_size, own=own)


def _columns(ranges: list[tuple[int, int, int]]) -> tuple[tf.Tensor, ...]:
    """Returns shards, first records and numbers of records, each int64 [shards]."""
    return tuple(tf.constant(column, tf.int64) for column in zip(*ranges, strict=True))


def _check_present(folder: Path, path: Path, shard: ShardInfo) -> None:
    mend = f"See all faults with `tfdist inspect {folder} --check`"
    try:
        size = regular_size(path)
    except OSError as error:
        raise CorruptShardError(
            "every shard of the manifest must be a file that can be read",
            received=f"{path}, {unreadable(error)}",
            mend=mend,
        ) from None
    if size != shard.bytes:
        raise CorruptShardError(
            f"{path} must have {shard.bytes} bytes", received=f"{size} bytes", mend=mend
        )
