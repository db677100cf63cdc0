"""What can be read gives ordered batches of any part of it: arrays, datasets, and what may come."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import DataError, TfdistError
from tfdist.records.format.manifest import Manifest
from tfdist.records.format.schema import Schema
from tfdist.records.reading import dataset_graph as graph
from tfdist.records.reading.batched import SingleRecords
from tfdist.records.reading.decode import spec_bytes
from tfdist.records.reading.elementwise import begun_anew, elementwise
from tfdist.records.reading.map_fn import spec_of_batch
from tfdist.records.sources.dataframes import plain
from tfdist.records.sources.elements import check_parts
from tfdist.records.wording import EQUAL_ROWS, check_unmasked, no_record

_SHUFFLE_BUFFER_BYTES = 128 << 20
_LOAD_BATCH_SIZE = 1024
# Of a key; the number of a part stands above them.
_EPOCH_BITS = 40
# Enough to tell a shuffled dataset from one that is not.
_COMPARED_RECORDS = 8
# Of arrays, from the first to the last: enough to tell those that a rank has shuffled by itself.
_COMPARED_ROWS = 32
_TUPLE = "Give several inputs or outputs as a tuple: ((a, b), y)"


def as_it_is(record: Any) -> Any:
    return record


def order_seed(seed: int, epoch: Any, part: int = 0) -> tf.Tensor:
    """Returns int64 [2]: the key of all that is random in one epoch.

    Args:
        part: of parts that are shuffled side by side. By one key, records at the same places of
            two parts would meet in a batch in every epoch.
    """
    of_part = tf.constant(part << _EPOCH_BITS, tf.int64)
    return tf.stack([tf.constant(seed, tf.int64), tf.cast(epoch, tf.int64) + of_part])


@dataclass(frozen=True)
class Wanted:
    """Some records of one epoch.

    Attributes:
        start, stop: records [start, stop).
        batch_size: of batches; of single records, how many may be held at once on the way.
        order: the key from ``order_seed``; None for the order of the records.
        skip: how many are left out, of those that would come first.
    """

    start: int
    stop: int
    batch_size: int
    order: tf.Tensor | None = None
    skip: Any = 0


class OrderedRecords:
    """Records in a fixed global order.

    Attributes:
        num_records: how many there are.
        spec: of a batch, (x,), (x, y) or (x, y, sample_weight) of tf.TensorSpec.
        in_memory: whether the records are in memory already.
        is_sequential: whether each pass must be one over all records, as through a pipe.
        is_repeated: whether each reader of a part also makes the records before it.
        place: folder and split of shards with their manifest; None for anything else.
        apart: folder, split and manifest of shards that lie apart from it; likewise.
        failures: what went wrong while reading, where TensorFlow hands on a text only.
        fingerprint: what tells the first records from others; None where a manifest does, or
            where hosts hold different records.
        note: what a user should know of how the records are read; None when there is nothing.
        schema: of shards; None for anything else.
        readers: (this reader, readers) when this host holds records that no other host has, and
            its readers share them; None when every host holds all records.
    """

    num_records: int
    spec: Any
    in_memory = False
    is_sequential = False
    is_repeated = False
    place: tuple[Path, str] | None = None
    apart: tuple[Path, str, Manifest] | None = None
    failures: Sequence[TfdistError] = ()
    fingerprint: str | None = None
    note: str | None = None
    schema: Schema | None = None
    readers: tuple[int, int] | None = None

    @property
    def record_bytes(self) -> int | None:
        """Bytes of one decoded record; None when they are not known beforehand."""
        return spec_bytes(self.spec)

    def stream(self, wanted: Wanted) -> tf.data.Dataset:
        """Returns batches of records."""
        raise AssertionError("not of what is in memory")

    def singles(self, wanted: Wanted) -> tuple[tf.data.Dataset, Callable[[Any], Any]]:
        """Returns what ``stream`` does as single records, which may differ in size.

        Returns:
            The records, an element each, and what decodes one: it can run in parallel.
        """
        return self.stream(wanted).unbatch(), as_it_is

    def numbers(self, start: int, stop: int, order: tf.Tensor | None) -> tf.data.Dataset:
        """Returns the numbers of records [start, stop), int64 [], as ``stream`` orders them.

        No record is read.
        """
        raise AssertionError("not of what is in memory")

    def lengths(self) -> np.ndarray:
        """Returns the entries of each feature of variable length, as they are read.

        Returns:
            int32 [num_records, features], the features in the order of the schema.
        """
        raise AssertionError("of shards alone")

    def check_can_choose(self) -> None:
        """Raises DataError where records can be read in their own order alone."""
        raise AssertionError("of shards alone")

    def chosen(self, numbers: tf.data.Dataset) -> tf.data.Dataset:
        """Returns batches of any records.

        Args:
            numbers: of the records of each batch, int64 [rows]; of known length.
        """
        raise AssertionError("of shards alone")

    def confirm(self) -> None:
        """Returns when what has been read so far is known to be right. Raises DataError."""

    def load(self, start: int, stop: int) -> Any:
        """Returns records [start, stop) as tensors [stop - start, ...]. Called eagerly."""
        batches = iter(self.stream(Wanted(start, stop, _LOAD_BATCH_SIZE)).prefetch(2))
        first = next(batches)
        # Filled in place: joining the batches at the end would need twice the memory.
        arrays = tf.nest.map_structure(
            lambda leaf: np.empty((stop - start, *leaf.shape[1:]), leaf.dtype.as_numpy_dtype), first
        )
        filled = 0
        for batch in itertools.chain([first], batches):
            rows = len(tf.nest.flatten(batch)[0])
            for array, leaf in zip(tf.nest.flatten(arrays), tf.nest.flatten(batch), strict=True):
                if leaf.shape[1:] != array.shape[1:]:  # NumPy would repeat what has a size of 1.
                    raise DataError(
                        "records that are kept in memory must have one shape",
                        received=f"shapes {list(array.shape[1:])} and {list(leaf.shape[1:])}",
                        mend="Leave cache out, or bring them to one shape in dataset.map",
                    )
                array[filled : filled + rows] = leaf.numpy()
            filled += rows
        if filled != stop - start:
            raise DataError(
                "data must keep its number of records",
                received=f"{filled} records where there were {stop - start}",
                mend="Give data that stays as it is while it is read",
            )
        return tf.nest.map_structure(tf.convert_to_tensor, arrays)


class ArraySource(OrderedRecords):
    """Arrays in memory: ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``.

    Attributes:
        arrays: the same as NumPy arrays.
    """

    in_memory = True

    def __init__(self, arrays: tuple[Any, ...]):
        check_parts("arrays", arrays)
        arrays = tf.nest.map_structure(_to_array, tuple(_as_parts(item) for item in arrays))
        lengths = [len(array) for array in tf.nest.flatten(arrays)]
        if len(set(lengths)) != 1:
            raise DataError(
                "all arrays must have the same number of records",
                received=", ".join(map(str, lengths)),
                mend=f"{EQUAL_ROWS}. {_TUPLE}",
            )
        if lengths[0] == 0:
            raise no_record("empty arrays")
        if len(arrays) == 3:
            arrays = (*arrays[:2], _to_weights(*arrays[1:]))
        self.arrays = arrays
        self.num_records = lengths[0]
        some = np.linspace(0, self.num_records - 1, _COMPARED_ROWS).astype(np.int64)
        self.fingerprint = fingerprint([array[some] for array in tf.nest.flatten(arrays)])
        self.spec = spec_of_rows(arrays)

    def load(self, start: int, stop: int) -> Any:
        return tf.nest.map_structure(
            lambda array: tf.convert_to_tensor(array[start:stop]), self.arrays
        )


def spec_of_rows(arrays: Any) -> Any:
    """Returns the tf.TensorSpec of a batch of any number of rows of a structure of arrays."""
    return tf.nest.map_structure(
        lambda array: tf.TensorSpec((None, *array.shape[1:]), tf.as_dtype(array.dtype)), arrays
    )


def _as_parts(item: Any) -> Any:
    """Returns an item with its tables and lists as arrays: to tf.nest a list is structure."""
    if isinstance(item, Mapping):
        return {name: _as_parts(part) for name, part in item.items()}
    if isinstance(item, tuple):
        return tuple(_as_parts(part) for part in item)
    if not isinstance(item, list):
        return plain(item)
    try:
        return np.asarray(item)
    except ValueError:
        raise DataError(
            "a list must be rows of one shape, for it is one array",
            received=f"a list of {len(item)} of several shapes",
            mend=_TUPLE,
        ) from None


def _to_array(value: Any) -> np.ndarray:
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        raise DataError(
            "arrays must be dense",
            received=f"a {type(value).__name__}",
            mend="Give ragged.to_tensor() or tf.sparse.to_dense(sparse), or write shards of ragged "
            "ones with tfdist.records.write",
        )
    check_unmasked(value, "an array")
    array = np.asarray(value)
    if array.ndim == 0:
        raise DataError(
            "an array must have a first dimension of records",
            received=repr(value)[:80],
            mend="Give a list or an array with an entry for each record",
        )
    if array.dtype.kind == "T":  # NumPy's StringDType, which TensorFlow does not take.
        array = array.astype(object)
    is_text = array.dtype.kind == "O" and all(isinstance(v, (str, bytes)) for v in array.flat)
    is_longer = array.dtype.kind == "f" and array.dtype.itemsize > 8  # Than TensorFlow's longest.
    if is_longer or (array.dtype.kind not in "biufSU" and not is_text):
        raise DataError(
            "arrays must hold numbers or strings",
            received=f"dtype {array.dtype}",
            mend="Convert it first, as by array.astype('float32')",
        )
    return array


def _to_weights(labels: Any, weights: Any) -> Any:
    """Returns weights as float32: of records [records], or of their labels, as of each word.

    A model of several outputs may have some for each.
    """
    of_labels, flat = tf.nest.flatten(labels), tf.nest.flatten(weights)
    is_each = len(flat) == len(of_labels)
    for number, array in enumerate(flat):
        if array.dtype.kind not in "biuf":
            raise DataError(
                "a sample weight must be a number",
                received=f"dtype {array.dtype}",
                mend="Convert it first, as by array.astype('float32')",
            )
        weighed = of_labels[number : number + 1] if is_each else of_labels
        shapes = [label.shape[: array.ndim] for label in weighed]
        if array.ndim != 1 and array.shape not in shapes:
            raise DataError(
                "a sample weight must be one number a record, or one for each of its labels",
                received=f"shape {array.shape}",
                mend="Give weights of shape (records,), or of the shape of the labels",
            )
    return tf.nest.map_structure(lambda array: array.astype(np.float32), weights)


class DatasetSource(OrderedRecords):
    """A tf.data.Dataset of records ``(x, y)`` or ``(x, y, sample_weight)``."""

    def __init__(self, records: SingleRecords):
        dataset = records.dataset
        element = dataset.element_spec
        if not isinstance(element, tuple):
            element, dataset = (element,), dataset.map(lambda x: (x,))
        check_parts("an element of a dataset", element)
        if any(leaf.shape.rank is None for leaf in tf.nest.flatten(element)):
            raise DataError(
                "a dataset must give tensors of known numbers of dimensions",
                received=str(element),
                mend="Say them with tensor.set_shape, or the output_signature of from_generator",
            )
        self.note = records.note
        self.fingerprint = _first_records(dataset)
        # The maps run on the records that are wanted, and not on all before them.
        self._elements = elementwise(dataset)
        self._draws = graph.draws(self._elements.base)
        self.is_repeated = self._elements.is_costly
        self.num_records = records.num_records or _count(self._elements.base)
        self.spec = spec_of_batch(element)

    def stream(self, wanted: Wanted) -> tf.data.Dataset:
        return self.singles(wanted)[0].batch(wanted.batch_size)

    def singles(self, wanted: Wanted) -> tuple[tf.data.Dataset, Callable[[Any], Any]]:
        elements, total = self._elements, wanted.stop - wanted.start
        part = elements.base.skip(wanted.start).take(total)
        if self._draws:
            whole = part
            part = tf.data.Dataset.range(1).flat_map(lambda _: begun_anew(whole, total))
        # What the maps read may be much larger than a record: too much for the buffer.
        are_mapped_first = wanted.order is not None and not elements.is_in_memory
        records = elements.mapped(part) if are_mapped_first else part
        records = shuffled_by(records, wanted.order, self.record_bytes, total).skip(wanted.skip)
        return records if are_mapped_first else elements.mapped(records), as_it_is

    def numbers(self, start: int, stop: int, order: tf.Tensor | None) -> tf.data.Dataset:
        numbers = tf.data.Dataset.range(start, stop)
        return shuffled_by(numbers, order, self.record_bytes, stop - start)


def _first_records(dataset: tf.data.Dataset) -> str:
    """Returns the fingerprint of the first records.

    Raises:
        DataError: they are others in a second pass. A dataset is read by ranges, by several ranks,
            and may be kept: it must not change.
    """
    passes = [list(dataset.take(_COMPARED_RECORDS).as_numpy_iterator()) for _ in range(2)]
    once, again = ([np.asarray(leaf) for leaf in tf.nest.flatten(read)] for read in passes)
    if not all(
        np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
        for a, b in zip(once, again, strict=True)
    ):
        raise DataError(
            "a dataset must give the same records in the same order each time",
            received="other records in a second pass",
            mend="Remove shuffle() and random augmentation from it: strategy.dataset shuffles, and "
            "its record_fn or map_fn augments",
        )
    return fingerprint(once)


def fingerprint(arrays: Any) -> str:
    """Returns what tells arrays from others, on any process: 16 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=8)
    for array in map(np.asarray, tf.nest.flatten(arrays)):
        # Text may be an array of objects, whose bytes are addresses.
        content = repr(array.tolist()).encode() if array.dtype.kind in "OSU" else array.tobytes()
        digest.update(f"{array.dtype.kind}{array.shape}".encode() + content)
    return digest.hexdigest()


def _count(dataset: tf.data.Dataset) -> int:
    cardinality = int(dataset.cardinality())
    if cardinality == tf.data.UNKNOWN_CARDINALITY:
        cardinality = int(dataset.reduce(np.int64(0), lambda count, *_: count + 1))
    if cardinality == 0:
        raise no_record("an empty dataset")
    return cardinality


def shuffled_by(
    records: tf.data.Dataset, order: tf.Tensor | None, record_bytes: int | None, num_records: int
) -> tf.data.Dataset:
    """Shuffles by ``order`` alone, in a buffer of as many records as fit into it; None does not."""
    if order is None:
        return records
    held = max(1, min(num_records, _SHUFFLE_BUFFER_BYTES // max(1, record_bytes or 4096)))
    seed = tf.random.stateless_uniform((), order, maxval=2**31 - 1, dtype=tf.int64)

    def shuffled(seed: tf.Tensor) -> tf.data.Dataset:
        # Dataset.shuffle mixes the graph's seed into its own. Inside this function the graph is
        # the function's, so fixing its seed leaves the user's tf.random.set_seed alone, and
        # independent of it.
        tf.random.set_seed(1)
        return records.shuffle(held, seed=seed, reshuffle_each_iteration=False)

    return tf.data.Dataset.from_tensors(seed).flat_map(shuffled)
