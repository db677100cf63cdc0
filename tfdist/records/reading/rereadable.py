"""What Python reads element by element, as often as is asked: generator functions and Sequences."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import DataError, notice
from tfdist.records.reading.batched import SingleRecords, single_records
from tfdist.records.reading.source import fingerprint
from tfdist.records.sources.dataframes import plain
from tfdist.records.sources.elements import (
    cannot_be_told,
    is_list_of_parts,
    parts_of,
    told_by_shapes,
)
from tfdist.records.sources.recognise import Source
from tfdist.records.wording import check_unmasked, no_record

_NOTICE_INTERVAL_S = 20
# An element that comes this many times, on average, comes from something that begins again.
_RETURNS = 16
_ELEMENTS_BEFORE_ENDLESS = 1000


def _check_can_be_read_again(source: Source) -> None:
    for _ in source.read():
        return
    raise DataError(
        f"{source.name} must give its elements in each pass",
        received="none in a second pass",
        mend="Give a function that makes a new generator each time it is called",
    )


def records_of(source: Source, batched: bool | None) -> SingleRecords:
    """Returns the records of a source as a tf.data.Dataset. Reads all of it once.

    Raises:
        DataError: it is empty, never ends, changes its structure, or cannot be told apart.
    """
    batched = source.batched if batched is None else batched
    found = _surveyed(source)
    _check_can_be_read_again(source)
    if batched is None:
        batched = told_by_shapes([*found.earlier_shapes, found.last_shapes])
    if batched is None:
        raise cannot_be_told(source.name, found.shapes)
    signature = tf.nest.pack_sequence_as(
        found.structure, list(map(tf.TensorSpec, found.shapes, found.dtypes))
    )
    dataset = tf.data.Dataset.from_generator(
        lambda: (element_of(given) for given in source.read()), output_signature=signature
    )
    if batched:
        return single_records(dataset, True, source.name)
    return SingleRecords(dataset, found.count)


@dataclass
class _Survey:
    """What one pass has shown.

    Attributes:
        count: elements.
        structure: the first element.
        shapes: of each part of an element, None for a dimension that differs among them.
        earlier_shapes: those that the parts of an element but the last had.
        last_shapes: those that the parts of the last had.
    """

    count: int
    structure: Any
    shapes: list[tuple[int | None, ...]]
    dtypes: list[tf.DType]
    earlier_shapes: set[tuple[tuple[int, ...], ...]]
    last_shapes: tuple[tuple[int, ...], ...] = ()


def _surveyed(source: Source) -> _Survey:
    found, seen = None, set()
    try:
        length = len(source.given)
    except Exception:  # It has none, or a method of a user's that does not say it.
        length = 0
    told_at = time.monotonic()
    for given in source.read():
        element = element_of(given)
        leaves = [np.asarray(leaf) for leaf in tf.nest.flatten(element)]
        if found is None:
            dtypes = [tf.as_dtype(leaf.dtype) for leaf in leaves]
            found = _Survey(0, element, [leaf.shape for leaf in leaves], dtypes, set())
        _check_alike(source.name, found, element, leaves)
        found.count += 1
        found.shapes = [
            tuple(size if size == other else None for size, other in zip(a, b.shape, strict=True))
            for a, b in zip(found.shapes, leaves, strict=True)
        ]
        if found.last_shapes:
            found.earlier_shapes.add(found.last_shapes)
        found.last_shapes = tuple(leaf.shape for leaf in leaves)
        if found.count > length:
            seen.add(fingerprint(leaves))
        if found.count - length > max(_ELEMENTS_BEFORE_ENDLESS, _RETURNS * len(seen)):
            raise DataError(
                f"{source.name} must end, since tfdist repeats it each epoch",
                received=f"the same {len(seen)} elements again and again",
                mend="Let it end after one pass over the data, or, where it does, give it a length "
                "as a Sequence has, or its arrays",
            )
        if time.monotonic() - told_at > _NOTICE_INTERVAL_S:
            told_at = time.monotonic()
            notice(f"counting {source.name}, {found.count:,} elements so far; it must end")
    if found is None:
        raise no_record(f"none in {source.name}")
    return found


def _check_alike(name: str, found: _Survey, element: Any, leaves: list[np.ndarray]) -> None:
    try:
        tf.nest.assert_same_structure(found.structure, element)
        alike = all(
            len(shape) == leaf.ndim and dtype == tf.as_dtype(leaf.dtype)
            for shape, dtype, leaf in zip(found.shapes, found.dtypes, leaves, strict=True)
        )
    except (ValueError, TypeError):
        alike = False
    if not alike:
        raise DataError(
            f"all elements of {name} must have the same parts, dtypes and numbers of dimensions",
            received=f"{_described(found.structure)} and {_described(element)}",
            mend="Convert each element to what the first one is",
        )


def _described(element: Any) -> str:
    leaves = [np.asarray(leaf) for leaf in tf.nest.flatten(element)]
    return ", ".join(f"{leaf.dtype} {list(leaf.shape)}" for leaf in leaves)


def element_of(given: Any) -> tuple[Any, ...]:
    """Returns (x,), (x, y) or (x, y, sample_weight) of arrays, as Keras reads an element."""
    parts = parts_of(given)
    while len(parts) > 1 and parts[-1] is None:
        parts = parts[:-1]
    return tuple(_part(part) for part in parts)


def _part(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _part(item) for name, item in value.items()}
    if isinstance(value, tuple) or is_list_of_parts(value):
        return tuple(_part(item) for item in value)
    if isinstance(value, (bool, int, float)):  # As TensorFlow takes them.
        return tf.constant(value).numpy()
    check_unmasked(value, "an array of an element")
    array = plain(value)
    if isinstance(array, Mapping):
        return array
    array = np.array(array)  # A copy: a generator may fill it anew, and TensorFlow makes none.
    for item in array.flat if array.dtype == object else ():
        if not isinstance(item, (str, bytes)):
            raise DataError(
                "each part of an element must be numbers or text",
                received=f"a {type(item).__name__}",
                mend="Make a NumPy array of equal rows of it, or leave it out",
            )
    return array
