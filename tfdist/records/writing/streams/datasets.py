"""The records of a tf.data.Dataset as they come. Its owner has imported TensorFlow already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfdist.errors import DataError
from tfdist.records.reading.batched import is_batched, refuse_endless, single_records
from tfdist.records.writing.roles import Asked
from tfdist.records.writing.streams.stream import Chunk, Stream, Structure, are_batches

_CHUNK_BYTES = 1 << 20
_SEEN = 8


def from_tf_dataset(dataset: tf.data.Dataset, asked: Asked, batched: bool | None) -> Stream:
    """Returns the records of a dataset, whose elements may be batches, and may differ in length.

    Raises:
        DataError: it never ends, or cannot be told to be of records or of batches.
    """
    refuse_endless(dataset)
    if batched is None:
        batched = is_batched(dataset)
    if batched is None and _tells_nothing(dataset):
        seen = list(dataset.take(_SEEN).as_numpy_iterator())
        batched = are_batches(seen, "dataset") if seen else None
    records = single_records(dataset, batched)
    if records.note is not None:
        print(f"tfdist: {records.note}", flush=True)
    total = records.num_records
    if total is None:
        known = int(records.dataset.cardinality())
        total = known if known >= 0 else None
    structure = Structure.of(records.dataset.element_spec, asked, "dataset")
    _check_tensors(structure.named(0, records.dataset.element_spec))
    if _has_one_shape(records.dataset):
        chunks = _in_batches(records.dataset, structure)
    else:
        chunks = structure.chunks([(None, as_numpy(records.dataset))])
    return structure.stream("dataset", chunks, total=total)


def _check_tensors(specs: Mapping[str, Any]) -> None:
    """Raises DataError for values of records that are no tensors."""
    for name, spec in specs.items():
        if isinstance(spec, tf.data.DatasetSpec):
            raise DataError(
                "each value of a dataset's records must be a tensor",
                received=f"a dataset as '{name}'",
                mend="Make tensors of windows: dataset.flat_map(lambda window: window.batch(SIZE))",
            )
        if isinstance(spec, (Mapping, tuple, list, tf.OptionalSpec)):
            raise DataError(
                "each value of a dataset's records must be a tensor",
                received=f"a {type(spec).__name__} as '{name}'",
                mend="Give each a name of its own: dataset.map(lambda x, y: ({'a': ...}, y))",
            )


def _tells_nothing(dataset: tf.data.Dataset) -> bool:
    """Whether no shape is known, as of a generator with output_types alone."""
    return any(
        getattr(leaf, "shape", None) is not None and leaf.shape.rank is None
        for leaf in tf.nest.flatten(dataset.element_spec)
    )


def _has_one_shape(dataset: tf.data.Dataset) -> bool:
    return all(
        isinstance(leaf, tf.TensorSpec) and leaf.shape.is_fully_defined()
        for leaf in tf.nest.flatten(dataset.element_spec)
    )


def _in_batches(dataset: tf.data.Dataset, structure: Structure) -> Iterator[tuple[None, Chunk]]:
    leaves = tf.nest.flatten(dataset.element_spec)
    record_bytes = sum(leaf.shape.num_elements() * max(1, leaf.dtype.size) for leaf in leaves)
    size = max(1, min(1024, _CHUNK_BYTES // max(1, record_bytes)))
    for number, batch in enumerate(as_numpy(dataset.batch(size))):
        yield None, structure.named(number, batch)


def as_numpy(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yields elements of arrays; a ragged tensor of one record is an array or a list of them."""
    for leaf in tf.nest.flatten(dataset.element_spec):
        if isinstance(leaf, tf.SparseTensorSpec):
            raise DataError(
                "a dataset must give dense or ragged tensors",
                received="a sparse one",
                mend="Make it dense: dataset.map(lambda x, y: (tf.sparse.to_dense(x), y))",
            )
    for element in dataset.as_numpy_iterator():
        yield tf.nest.map_structure(_of_ragged, element)


def _of_ragged(value: Any) -> Any:
    return value.to_list() if hasattr(value, "to_list") and hasattr(value, "row_splits") else value
