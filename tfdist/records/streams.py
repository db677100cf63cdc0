"""What can be read: shards, arrays or a dataset. Each gives ordered batches of any part of it."""

from __future__ import annotations

import abc
import itertools
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import CorruptShardError, DataError, TfdistError
from tfdist.records.decode import batch_spec, make_decoder, spec_bytes
from tfdist.records.manifest import Manifest, ShardInfo, load_manifest
from tfdist.records.stored import Stored

_READ_BUFFER_BYTES = 1 << 20
_SHUFFLE_BUFFER_BYTES = 128 << 20
_LOAD_BATCH_SIZE = 1024
# Local files of this size are not all in the page cache, so reading several at once pays.
_INTERLEAVE_BYTES = 2 << 30
_MAX_INTERLEAVED = 4
# Enough to tell a shuffled dataset from one that is not.
_COMPARED_RECORDS = 4


def order_seed(seed: int, epoch: Any) -> tf.Tensor:
    """Returns int64 [2]: the key of all that is random in one epoch."""
    return tf.stack([tf.constant(seed, tf.int64), tf.cast(epoch, tf.int64)])


class Source(abc.ABC):
    """Records in a fixed global order.

    Attributes:
        num_records: how many there are.
        spec: of a batch, (x,), (x, y) or (x, y, sample_weight) of tf.TensorSpec.
        in_memory: whether the records are in memory already.
        is_sequential: whether each pass must be one over all records, as through a pipe.
        place: folder and split of shards with their manifest; None for anything else.
        apart: folder, split and manifest of shards that lie apart from it; likewise.
        failure: what went wrong while reading, where TensorFlow's own error does not tell.
        readers: (this reader, readers) when this host holds records that no other host has, and
            its readers share them; None when every host holds all records.
    """

    num_records: int
    spec: Any
    in_memory = False
    is_sequential = False
    place: tuple[Path, str] | None = None
    apart: tuple[Path, str, Manifest] | None = None
    failure: TfdistError | None = None
    readers: tuple[int, int] | None = None

    @property
    def record_bytes(self) -> int | None:
        """Bytes of one decoded record; None when they are not known beforehand."""
        return spec_bytes(self.spec)

    @abc.abstractmethod
    def stream(
        self, start: int, stop: int, batch_size: int, order: tf.Tensor | None, skip_records: Any
    ) -> tf.data.Dataset:
        """Returns batches of records [start, stop) without the first ``skip_records`` of them.

        Args:
            order: the key from ``order_seed``; None for the order of the records.
        """

    @abc.abstractmethod
    def numbers(self, start: int, stop: int, order: tf.Tensor | None) -> tf.data.Dataset:
        """Returns the numbers of records [start, stop), int64 [], as ``stream`` orders them.

        No record is read.
        """

    def load(self, start: int, stop: int) -> Any:
        """Returns records [start, stop) as tensors [stop - start, ...]. Called eagerly."""
        batches = iter(self.stream(start, stop, _LOAD_BATCH_SIZE, None, 0).prefetch(2))
        first = next(batches)
        # Filled in place: joining the batches at the end would need twice the memory.
        arrays = tf.nest.map_structure(
            lambda leaf: np.empty((stop - start, *leaf.shape[1:]), leaf.dtype.as_numpy_dtype), first
        )
        filled = 0
        for batch in itertools.chain([first], batches):
            rows = len(tf.nest.flatten(batch)[0])
            for array, leaf in zip(tf.nest.flatten(arrays), tf.nest.flatten(batch), strict=True):
                array[filled : filled + rows] = leaf.numpy()
            filled += rows
        if filled != stop - start:
            raise DataError(
                "data keeps its number of records",
                received=f"{filled} records where there were {stop - start}",
            )
        return tf.nest.map_structure(tf.convert_to_tensor, arrays)


class ArraySource(Source):
    """Arrays in memory: ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``.

    Attributes:
        arrays: the same as NumPy arrays.
    """

    in_memory = True

    def __init__(self, arrays: tuple[Any, ...]):
        if not 1 <= len(arrays) <= 3:
            raise DataError(
                "arrays are (x, y) or (x, y, sample_weight)", received=f"a tuple of {len(arrays)}"
            )
        arrays = tf.nest.map_structure(_to_array, tuple(_without_lists(item) for item in arrays))
        lengths = [len(array) for array in tf.nest.flatten(arrays)]
        if len(set(lengths)) != 1:
            raise DataError("all arrays have the same number of records", received=lengths)
        if lengths[0] == 0:
            raise DataError("data has at least one record", received="empty arrays")
        if len(arrays) == 3:
            arrays = (*arrays[:2], arrays[2].astype(np.float32))
            if arrays[2].ndim != 1:
                raise DataError(
                    "a sample weight is one number a record", received=f"shape {arrays[2].shape}"
                )
        self.arrays = arrays
        self.num_records = lengths[0]
        self.spec = tf.nest.map_structure(
            lambda array: tf.TensorSpec((None, *array.shape[1:]), tf.as_dtype(array.dtype)), arrays
        )

    def load(self, start: int, stop: int) -> Any:
        return tf.nest.map_structure(
            lambda array: tf.convert_to_tensor(array[start:stop]), self.arrays
        )

    def stream(
        self, start: int, stop: int, batch_size: int, order: tf.Tensor | None, skip_records: Any
    ) -> tf.data.Dataset:
        raise AssertionError("arrays are always read from memory")

    def numbers(self, start: int, stop: int, order: tf.Tensor | None) -> tf.data.Dataset:
        raise AssertionError("arrays are always read from memory")


def _without_lists(item: Any) -> Any:
    """Lists are arrays to a user and structure to tf.nest."""
    return np.asarray(item) if isinstance(item, list) else item


def _to_array(value: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.ndim == 0:
        raise DataError("an array has a first dimension of records", received=repr(value)[:80])
    if array.dtype.kind not in "biufSU":
        raise DataError("arrays hold numbers or strings", received=f"dtype {array.dtype}")
    return array


class DatasetSource(Source):
    """An unbatched tf.data.Dataset of ``(x, y)`` or ``(x, y, sample_weight)``."""

    def __init__(self, dataset: tf.data.Dataset):
        element = dataset.element_spec
        if not isinstance(element, tuple):
            element, dataset = (element,), dataset.map(lambda x: (x,))
        if not 1 <= len(element) <= 3:
            raise DataError(
                "a dataset gives (x, y) or (x, y, sample_weight)",
                received=f"tuples of {len(element)}",
            )
        if not all(isinstance(leaf, tf.TensorSpec) for leaf in tf.nest.flatten(element)):
            raise DataError("a dataset gives dense tensors", received=str(element))
        _refuse_changing(dataset)
        self._dataset = dataset
        self.num_records = _count(dataset)
        self.spec = tf.nest.map_structure(
            lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype), element
        )

    def stream(
        self, start: int, stop: int, batch_size: int, order: tf.Tensor | None, skip_records: Any
    ) -> tf.data.Dataset:
        part = self._dataset.skip(start).take(stop - start)
        return self._shuffled(part, order, stop - start).skip(skip_records).batch(batch_size)

    def numbers(self, start: int, stop: int, order: tf.Tensor | None) -> tf.data.Dataset:
        return self._shuffled(tf.data.Dataset.range(start, stop), order, stop - start)

    def _shuffled(
        self, records: tf.data.Dataset, order: tf.Tensor | None, total: int
    ) -> tf.data.Dataset:
        if order is None:
            return records
        return shuffled_by(records, order, buffer_records(self.record_bytes, total))


def _refuse_changing(dataset: tf.data.Dataset) -> None:
    """A dataset is read by ranges, by several ranks, and may be kept: it must not change."""
    passes = [list(dataset.take(_COMPARED_RECORDS).as_numpy_iterator()) for _ in range(2)]
    once, again = (map(np.asarray, tf.nest.flatten(records)) for records in passes)
    if not all(
        np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
        for a, b in zip(once, again, strict=True)
    ):
        raise DataError(
            "a dataset gives the same records in the same order each time",
            received="other records in a second pass",
            mend="Remove shuffle() and random augmentation from it: strategy.dataset shuffles, and "
            "its map_fn augments",
        )


def _count(dataset: tf.data.Dataset) -> int:
    cardinality = int(dataset.cardinality())
    if cardinality == tf.data.INFINITE_CARDINALITY:
        raise DataError(
            "a dataset is finite: tfdist repeats it each epoch",
            received="an infinite dataset",
            mend="Remove repeat() from it",
        )
    if cardinality == tf.data.UNKNOWN_CARDINALITY:
        cardinality = int(dataset.reduce(np.int64(0), lambda count, *_: count + 1))
    if cardinality == 0:
        raise DataError("data has at least one record", received="an empty dataset")
    return cardinality


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
            "every shard of the manifest exists", received=f"no {path}", mend=mend
        )
    size = path.stat().st_size
    if size != shard.bytes:
        raise CorruptShardError(
            f"{path} has {shard.bytes} bytes", received=f"{size} bytes", mend=mend
        )


def buffer_records(record_bytes: int | None, num_records: int) -> int:
    return max(1, min(num_records, _SHUFFLE_BUFFER_BYTES // max(1, record_bytes or 4096)))


def shuffled_by(records: tf.data.Dataset, order: tf.Tensor, buffer_records: int) -> tf.data.Dataset:
    """Shuffles by ``order`` alone."""
    seed = tf.random.stateless_uniform((), order, maxval=2**31 - 1, dtype=tf.int64)

    def shuffled(seed: tf.Tensor) -> tf.data.Dataset:
        # Dataset.shuffle mixes the graph's seed into its own. Inside this function the graph is
        # the function's, so fixing its seed leaves the user's tf.random.set_seed alone, and
        # independent of it.
        tf.random.set_seed(1)
        return records.shuffle(buffer_records, seed=seed, reshuffle_each_iteration=False)

    return tf.data.Dataset.from_tensors(seed).flat_map(shuffled)


def open_source(source: Any) -> Source:
    """Returns the source of what ``reader.open_records`` takes."""
    if isinstance(source, Stored):
        from tfdist.records.apart import open_stored  # It makes sources of its own of these.

        return open_stored(source)
    if isinstance(source, (str, Path)):
        return _open_folder(Path(source))
    if isinstance(source, tf.data.Dataset):
        return DatasetSource(source)
    if isinstance(source, tuple):
        return ArraySource(source)
    if isinstance(source, (Mapping, np.ndarray, tf.Tensor)):
        return ArraySource((source,))
    raise DataError(
        "data is a folder of shards, arrays (x, y) or an unbatched tf.data.Dataset",
        received=f"a {type(source).__name__}",
    )


def find_split(path: Path) -> tuple[Path, str, Manifest]:
    """Returns the folder, the split and the manifest of "DIR/SPLIT", or of DIR with one split.

    Raises:
        DataError: no such folder, manifest or split.
    """
    if path.is_dir():
        folder, split = path, None
    else:
        folder, split = path.parent, path.name
        if not folder.is_dir():
            folder, split = path, None
    manifest = load_manifest(folder)
    known = ", ".join(str(folder / name) for name in manifest.splits)
    if split is None and len(manifest.splits) > 1:
        raise DataError(
            "one split is read at a time", received=f"{folder}", mend=f"Choose one of {known}"
        )
    split = split or next(iter(manifest.splits))
    if split not in manifest.splits:
        raise DataError(
            "a split is one of the manifest's", received=f"'{split}'", mend=f"Choose one of {known}"
        )
    return folder, split, manifest


def _open_folder(path: Path) -> ShardSource:
    return ShardSource(*find_split(path))
