"""Datasets of batches, as Keras takes them: told from datasets of records, and taken apart.

Whether an element is a batch is read off the shapes where they tell, else off the operations that
made the dataset. What neither tells is for the user to say: to guess wrongly would train wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import DataError
from tfdist.records.reading import dataset_graph as graph
from tfdist.records.sources.elements import Shape, cannot_be_told, in_words, told_by_shapes
from tfdist.records.wording import EQUAL_ROWS, no_record

_BATCHES = ("Batch", "ParallelBatch", "PaddedBatch", "MapAndBatch", "Rebatch", "LegacyRebatch")
_MAPS = ("Map", "ParallelMap", "Scan", "ParseExample")
# Each element that they give is one record.
_OF_RECORDS = ("TensorSlice", "Range", "TFRecord", "TextLine", "FixedLengthRecord", "Csv", "Sql")
# They end what never ends.
_ENDING = ("Take", "TakeWhile")
# Elements that are looked at where their shapes are not known beforehand.
_SEEN = 8

# What may hold the rows of a batch.
_OF_ROWS = (tf.TensorSpec, tf.RaggedTensorSpec)

# What makes dense tensors of others.
_DENSE = (
    "Map ragged ones with .to_tensor(), sparse ones with tf.sparse.to_dense, or write shards with "
    "tfdist.records.write, which takes ragged records"
)


@dataclass(frozen=True)
class SingleRecords:
    """A dataset of which each element is one record.

    Attributes:
        num_records: how many they are; None when that is not known.
        note: what a user should know of how they are read; None when they are read as they come.
    """

    dataset: tf.data.Dataset
    num_records: int | None = None
    note: str | None = None


def single_records(
    dataset: tf.data.Dataset, batched: bool | None = None, what: str = "the dataset"
) -> SingleRecords:
    """Returns the records of a dataset, whose elements may be batches of them.

    A shuffle that gives each pass another order is left out of a dataset of batches: its records
    are shuffled when they are read.

    Args:
        batched: whether its elements are batches; None finds out.
        what: the dataset, in words.

    Raises:
        DataError: the dataset never ends, cannot be told apart, or its elements are no batches.
    """
    refuse_endless(dataset)
    if batched is None:
        batched = is_batched(dataset)
        if batched is None:
            raise cannot_be_told(what, _shapes_of(dataset.element_spec))
    if not batched:
        return SingleRecords(dataset)
    _check_could_be_batches(dataset)
    ordered = without_shuffle(dataset)
    records = _taken_apart(ordered)
    left_out = "" if ordered is dataset else ", and its shuffle() is left out"
    note = f"the batches of {what} are taken apart into {records.num_records:,} records{left_out}"
    return SingleRecords(records.dataset, records.num_records, note)


def is_batched(dataset: tf.data.Dataset) -> bool | None:
    """Returns whether the elements of a dataset are batches; None when that cannot be told."""
    leaves = tf.nest.flatten(dataset.element_spec)
    if not all(isinstance(leaf, _OF_ROWS) for leaf in leaves):
        return False
    if any(isinstance(leaf, tf.RaggedTensorSpec) and not leaf.ragged_rank for leaf in leaves):
        return False  # It may have any length: one row of a ragged tensor.
    shapes = _shapes_of(dataset.element_spec)
    if told_by_shapes([shapes]) is False:
        return False
    made = _made_of_batches(dataset)
    if made is None and None in shapes:
        seen = told_by_shapes(map(_shapes_of, dataset.take(_SEEN)))
        return seen and None  # Records may differ in length, as batches do.
    if made is False and all(shape is None or shape[0] is None for shape in shapes):
        return None  # A map may have read many records at once.
    return made


def _shapes_of(element: Any) -> list[Shape]:
    shapes = [leaf.shape for leaf in tf.nest.flatten(element)]
    return [None if shape.rank is None else tuple(shape) for shape in shapes]


def is_endless(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset never ends, behind a filter or an unbatch too; False where nobody knows."""
    while dataset.cardinality() != tf.data.INFINITE_CARDINALITY:
        below = graph.inputs(dataset)
        if len(below) != 1 or graph.operation(dataset) in _ENDING:
            return False
        (dataset,) = below
        if dataset.cardinality() >= 0:
            return False
    return True


def refuse_endless(dataset: tf.data.Dataset) -> None:
    """Raises DataError for a dataset that never ends."""
    if is_endless(dataset):
        raise DataError(
            "a dataset must end, since tfdist repeats it each epoch",
            received="an infinite dataset",
            mend="Remove repeat() from it",
        )


def check_dense(spec: Any, kinds: Any = tf.TensorSpec) -> None:
    """Raises DataError for what a dataset gives, unless it is all of these kinds."""
    if not all(isinstance(leaf, kinds) for leaf in tf.nest.flatten(spec)):
        raise DataError("a dataset must give dense tensors", received=str(spec), mend=_DENSE)


def _check_could_be_batches(dataset: tf.data.Dataset) -> None:
    spec = dataset.element_spec
    check_dense(spec, _OF_ROWS)
    if told_by_shapes([_shapes_of(spec)]) is False:
        raise DataError(
            "the parts of a batch must have a first dimension of as many rows each",
            received=f"batched=True for elements of {in_words(_shapes_of(spec))}",
            mend="Leave batched=True out",
        )


def _made_of_batches(
    dataset: tf.data.Dataset, *, mapped: bool = False, to_undo: int = 0
) -> bool | None:
    """Returns whether the operations of a dataset end in batches; None when they do not tell."""
    name, below = graph.operation(dataset), graph.inputs(dataset)
    if name in _OF_RECORDS:
        return False
    if name in _BATCHES and to_undo == 0:
        (before,) = below or [None]
        return None if mapped and before is not None and _may_be_windows(before) else True
    if name in ("Zip", "Concatenate"):
        told = {_made_of_batches(each, mapped=mapped, to_undo=to_undo) for each in below}
        return told.pop() if len(told) == 1 else None
    if len(below) != 1:
        return None
    if name in _BATCHES:
        to_undo -= 1
    elif name == "Unbatch":
        to_undo += 1
    elif name in _MAPS:
        mapped = True
    elif not graph.keeps_elements(dataset):
        return None
    return _made_of_batches(below[0], mapped=mapped, to_undo=to_undo)


def _may_be_windows(before: tf.data.Dataset) -> bool:
    """Whether a batch of these may be one record: steps of a series, which a map then splits."""
    leaves = tf.nest.flatten(before.element_spec)
    return len(leaves) == 1 and leaves[0].dtype != tf.string


def without_shuffle(dataset: tf.data.Dataset, *, mapped: bool = False) -> tf.data.Dataset:
    """Returns the same batches without what orders them anew in each pass; the same dataset where
    there is no such thing, or where it cannot be left out without leaving out more."""
    below = graph.inputs(dataset)
    if len(below) != 1:
        return dataset
    (before,) = below
    name = graph.operation(dataset)
    if graph.reshuffles(dataset) and name == "Shuffle":
        return without_shuffle(before, mapped=mapped)
    if name in ("Prefetch", "Options", "Cache"):
        ordered = without_shuffle(before, mapped=mapped)
        return dataset if ordered is before else ordered
    if name in ("Map", "ParallelMap"):
        function = graph.mapped_function(dataset)
        ordered = without_shuffle(before, mapped=True)
        return dataset if function is None or ordered is before else ordered.map(function)
    if name in ("Batch", "ParallelBatch"):
        ordered, size = without_shuffle(before), graph.batch_size(dataset)
        if ordered is before or size is None:
            return dataset
        # Which rows a last batch lacks was another matter in each pass: now they would be lost.
        if graph.drops_remainder(dataset) and mapped:
            return dataset
        return ordered.batch(size)
    return dataset


def _taken_apart(batches: tf.data.Dataset) -> SingleRecords:
    innermost = batches
    while graph.operation(innermost) in ("Prefetch", "Options"):
        (innermost,) = graph.inputs(innermost)
    if graph.operation(innermost) in ("Batch", "ParallelBatch"):
        (before,) = graph.inputs(innermost)
        rows = int(before.cardinality())
        if rows >= 0 and not graph.drops_remainder(innermost):
            return SingleRecords(before, rows)
    rows, seen = _measured(batches)
    padded = innermost if graph.operation(innermost) == "PaddedBatch" else None
    return SingleRecords(_of_one_shape(batches.unbatch(), seen, padded), rows)


def _measured(batches: tf.data.Dataset) -> tuple[int, set[tuple[tuple[int, ...], ...]]]:
    """Reads all batches: returns their rows, and the shapes that a record's parts have.

    Raises:
        DataError: parts of a batch have unequal rows, or there is no batch at all.
    """
    shapes = _shapes_of(batches.element_spec)
    if None in shapes:
        raise DataError(
            "the parts of a batch must have known numbers of dimensions",
            received=f"elements of {in_words(shapes)}",
            mend="Say them with tensor.set_shape, or the output_signature of from_generator",
        )
    rows, seen = 0, set()
    for batch in batches.as_numpy_iterator():
        shapes = [leaf.shape for leaf in tf.nest.flatten(batch)]
        sizes = [shape[0] for shape in shapes]
        if len(set(sizes)) > 1:
            raise DataError(
                "the parts of a batch must have the same number of rows",
                received=", ".join(map(str, sizes)),
                mend=EQUAL_ROWS,
            )
        rows += sizes[0]
        seen.add(tuple(shape[1:] for shape in shapes))
    if not rows:
        raise no_record("an empty dataset")
    return rows, seen


def _of_one_shape(
    records: tf.data.Dataset,
    seen: set[tuple[tuple[int, ...], ...]],
    padded: tf.data.Dataset | None,
) -> tf.data.Dataset:
    """Returns records of static shapes, those of a padded batch padded as far as the longest one,
    ragged ones as they are."""
    spec = records.element_spec
    leaves = tf.nest.flatten(spec)
    is_ragged = any(isinstance(leaf, tf.RaggedTensorSpec) for leaf in leaves)
    if is_ragged or all(leaf.shape.is_fully_defined() for leaf in leaves):
        return records
    shapes = [(np.min(sizes, 0), np.max(sizes, 0)) for sizes in zip(*seen, strict=True)]
    most = tf.nest.pack_sequence_as(spec, [tf.TensorShape(high) for _, high in shapes])
    uneven = [(low, high) for low, high in shapes if not np.array_equal(low, high)]
    if uneven:
        values = None if padded is None else graph.padding_values(padded)
        if values is None:
            low, high = uneven[0]
            raise DataError(
                "the records of all batches must have the same shape",
                received=f"{low.tolist()} and {high.tolist()}",
                mend="Pad them alike: dataset.padded_batch(size, padded_shapes=...)",
            )
        batches_of_one = records.padded_batch(1, padded_shapes=most, padding_values=values)
        return batches_of_one.unbatch()

    def shaped(*record: Any) -> Any:
        packed = tf.nest.pack_sequence_as(spec, tf.nest.flatten(record))
        return tf.nest.map_structure(tf.ensure_shape, packed, most)

    return records.map(shaped)
