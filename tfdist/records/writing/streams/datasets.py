"""The records of a tf.data.Dataset as they come. Its owner has imported TensorFlow already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfdist.errors import DataError
from tfdist.records.reading.batched import single_records
from tfdist.records.writing.roles import Asked
from tfdist.records.writing.streams.stream import Stream, Structure

_CHUNK_BYTES = 1 << 20


def from_tf_dataset(dataset: tf.data.Dataset, asked: Asked, batched: bool | None) -> Stream:
    """Returns the records of a dataset, whose elements may be batches, and may differ in length.

    Raises:
        DataError: it never ends, or cannot be told to be of records or of batches.
    """
    records = single_records(dataset, batched)
    if records.note is not None:
        print(f"tfdist: {records.note}", flush=True)
    total = records.num_records
    if total is None:
        known = int(records.dataset.cardinality())
        total = known if known >= 0 else None
    structure = Structure.of(records.dataset.element_spec, asked, "dataset")
    _check_tensors(structure.named(0, records.dataset.element_spec))
    elements, leaves = records.dataset, tf.nest.flatten(records.dataset.element_spec)
    batched = all(isinstance(s, tf.TensorSpec) and s.shape.is_fully_defined() for s in leaves)
    if batched:
        record_bytes = sum(s.shape.num_elements() * max(1, s.dtype.size) for s in leaves)
        elements = elements.batch(max(1, min(1024, _CHUNK_BYTES // max(1, record_bytes))))
    return structure.stream("dataset", [(None, as_numpy(elements))], batched=batched, total=total)


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
