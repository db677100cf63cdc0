"""Records before they are written: for each feature one column, an array or a list of files."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from tfdist.errors import DataError
from tfdist.records.format.encoding import Block, varint_width
from tfdist.records.format.large_arrays import LargeArray, LargeTexts, chunks, large
from tfdist.records.format.schema import RAW_DTYPES, STRING, Feature, Schema
from tfdist.records.format.text_and_ragged import (
    RaggedColumn,
    TextColumn,
    as_classes,
    as_column,
    as_label,
)
from tfdist.records.format.whole_numbers import note_rounded
from tfdist.records.wording import EQUAL_ROWS, no_record


class Column(Protocol):
    """The values of one feature in all records: an array, or files that are read when asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: np.ndarray) -> np.ndarray | Sequence[bytes]:
        """Returns the values of the records of the given numbers, int64 [n]."""


@dataclass(frozen=True)
class Columns:
    """All records of one source.

    Attributes:
        kind: what the source was: "folder", "csv" or another table, "npz", "digits", "arrays" or
            "dataset".
        columns: by feature name, an array [records, *shape] or the files of images.
        owners: [records] numbers or text, the values of the column that names the clients; None
            when none was asked for.
        roles: (name, what it has become) of each column of a table or array of a .npz; empty for
            other sources.
        splits: the numbers of the records of each split, int64 [n], where the source is divided
            already; None where it is not.
        notes: what a user should know of how the source was read, a sentence each.
        left_out: how many records of the source are not among these, by reason.
    """

    kind: str
    schema: Schema
    columns: Mapping[str, Column]
    owners: np.ndarray | None = None
    roles: tuple[tuple[str, str], ...] = ()
    splits: Mapping[str, np.ndarray] | None = None
    notes: Sequence[str] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_records(self) -> int:
        return len(self.columns[self.schema.features[0].name])

    @property
    def are_images(self) -> bool:
        """Whether a feature is files of images."""
        return any(feature.is_image for feature in self.schema.features)

    @property
    def are_in_files(self) -> bool:
        """Whether the values of a feature are read from one file when they are asked for."""
        values = (getattr(column, "values", column) for column in self.columns.values())
        return any(isinstance(column, (LargeArray, LargeTexts)) for column in values)

    def block(self, rows: np.ndarray) -> Block:
        """Returns the records of the given numbers, int64 [n], as columns."""
        return {name: column[rows] for name, column in self.columns.items()}

    def class_ids(self) -> np.ndarray | None:
        """Returns int64 [records], or None when the records have no class ids."""
        label = self.schema.class_label
        return None if label is None else self.columns[label.name]

    def owned_by(self, column: str | None) -> Columns:
        """Returns the same records, owned by their classes where ``column`` is the class label.

        Raises:
            DataError: it names the clients, and is neither that nor known to do so.
        """
        if column is None or self.owners is not None:
            return self
        label = self.schema.class_label
        if label is None or column not in (label.name, *(label.columns or ())):
            raise DataError(
                "the column of by:COLUMN must be one of the source's",
                received=f"'{column}'",
                mend="Choose another partition" if label is None else f"Choose by:{label.name}",
            )
        ids = self.class_ids()
        owners = ids if label.classes is None else np.array(label.classes, object)[ids]
        return replace(self, owners=owners)

    @functools.cached_property
    def varint_widths(self) -> dict[str, int]:
        """The bytes that each value of a feature of whole numbers takes, by its name."""
        return {
            feature.name: varint_width(self.columns[feature.name])
            for feature in self.schema.features
            if feature.encoding == "int64" and not feature.varies
        }


def from_arrays(
    kind: str,
    inputs: Mapping[str, Any],
    labels: Mapping[str, Any],
    weights: Mapping[str, Any] | None = None,
    *,
    classes: Mapping[str, Sequence[str]] | None = None,
    columns: Mapping[str, Sequence[str]] | None = None,
) -> Columns:
    """Returns the columns of arrays whose first dimension counts the records.

    Args:
        weights: at most one array [records] of sample weights.
        classes: for labels of class ids, the names of the classes.
        columns: for arrays packed from the columns of a table, the names of those.

    Raises:
        DataError: no records, unequal lengths, a dtype that cannot be written, values that are
            missing (NaN) or infinite, whole numbers that are others beside floats, weights below 0,
            or class ids out of range.

    Text becomes strings, and a label of text class ids; arrays that differ in their first length
    keep it: see ``text_and_ragged``.
    """
    features, arrays, notes = [], {}, []
    for role, named in (("input", inputs), ("label", labels), ("weight", weights or {})):
        for name, values in named.items():
            if name in arrays:
                raise DataError(
                    "each array must have a name of its own",
                    received=f"'{name}' twice",
                    mend="Rename one of them",
                )
            of = (columns or {}).get(name)
            feature, array = column_of(name, role, values, (classes or {}).get(name), notes, of)
            features.append(feature)
            arrays[name] = array
    schema = Schema(tuple(features))
    check_lengths({name: len(array) for name, array in arrays.items()})
    return Columns(kind, schema, arrays, notes=notes)


def count_classes(ids: np.ndarray) -> dict[int, int]:
    """Returns the number of records of each class id that occurs, int64 [records]."""
    if len(ids) and ids.min() >= 0 and ids.max() < len(ids):  # Without a sorted copy.
        counts = np.bincount(ids)
        found = np.flatnonzero(counts)
        counts = counts[found]
    else:
        found, counts = np.unique(ids, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def check_lengths(lengths: Mapping[str, int]) -> None:
    """Raises DataError unless all named arrays have the same number of records, at least one."""
    if len(set(lengths.values())) > 1:
        counted = ", ".join(f"'{name}' {length}" for name, length in lengths.items())
        raise DataError(
            "all arrays must have the same number of records", received=counted, mend=EQUAL_ROWS
        )
    if 0 in lengths.values():
        raise no_record("none", "a source")


def column_of(
    name: str,
    role: str,
    values: Any,
    classes: Sequence[str] | None,
    notes: list[str],
    columns: Sequence[str] | None = None,
) -> tuple[Feature, Column]:
    """Returns one of the features of ``from_arrays``, and its column. Raises as that does.

    Args:
        notes: what is to be told of the values is added here.
        columns: of an array packed from the columns of a table, the names of those.
    """
    array = large(values)
    array = as_column(name, values) if array is None else array
    if isinstance(array, TextColumn):
        return _text_column(name, role, array)
    shape = (None, *array.flat.shape[1:]) if isinstance(array, RaggedColumn) else array.shape[1:]
    numbers = array.flat if isinstance(array, RaggedColumn) else array
    if numbers.dtype == object:
        text = {"dtype": STRING, "encoding": "bytes", "longest": array.longest}
        return Feature(name=name, shape=shape, role=role, **text), array
    if numbers.ndim == 0:
        raise DataError(
            f"array '{name}' must have a first dimension of records",
            received="a scalar",
            mend="Give a list or an array with an entry for each record",
        )
    _check_filled(name, shape, array)
    numbers = _plain(name, numbers, role, notes, is_scalar=shape == ())
    if numbers.dtype.name not in RAW_DTYPES:
        raise DataError(
            f"the dtype of array '{name}' must be one of {', '.join(RAW_DTYPES)}",
            received=str(numbers.dtype),
            mend="Convert it to one of these first",
        )
    if role == "weight" and shape != ():
        raise DataError(
            "a sample weight must be one number a record",
            received=f"shape {list(shape)} a record",
            mend="Make it one number, as by weights.mean(axis=1)",
        )
    if numbers.dtype.kind == "f":
        _check_finite(name, numbers, array.ends if isinstance(array, RaggedColumn) else None)
    if role == "weight":
        _check_weights(name, numbers)
    dtype, encoding = _storage(numbers, is_scalar=shape == ())
    feature = Feature(
        name=name,
        dtype=dtype,
        shape=shape,
        encoding=encoding,
        role=role,
        classes=None if classes is None else tuple(classes),
        columns=None if columns is None else tuple(columns),
        longest=array.longest if isinstance(array, RaggedColumn) else None,
    )
    if encoding == "int64":
        numbers = numbers.astype(np.int64, copy=False)
    if feature.is_class_id:
        _check_class_ids(feature, numbers)
    return feature, RaggedColumn(numbers, array.ends) if feature.is_ragged else numbers


def _text_column(name: str, role: str, column: TextColumn) -> tuple[Feature, Column]:
    """Returns a feature of strings; a label of text becomes the numbers of its classes."""
    if role == "weight":
        raise DataError(
            f"the weight '{name}' must hold numbers",
            received="text",
            mend="Convert it to numbers first",
        )
    if role == "label" and column.shape == ():
        classes, ids = as_classes([as_label(name, text) for text in column.values.tolist()])
        of_ids = {"dtype": "int64", "encoding": "int64", "classes": classes}
        return Feature(name=name, shape=(), role=role, **of_ids), ids
    _check_filled(name, column.shape, column)
    feature = Feature(name=name, dtype=STRING, shape=column.shape, encoding="bytes", role=role)
    return feature, column


def _check_filled(name: str, shape: tuple[int | None, ...], array: Column) -> None:
    if 0 in shape:
        raise DataError(
            f"each record of array '{name}' must have values",
            received=f"shape {array.shape}",
            mend="Fill it, or leave it out",
        )


def _check_finite(name: str, array: np.ndarray, ends: np.ndarray | None) -> None:
    """Raises DataError for NaN or infinity. ``ends``: where each ragged record ends."""
    for first, chunk in chunks(array):
        if (place := first_unfinite(chunk)) is not None:
            record = first + int(place[0])
            if ends is not None:
                record = int(np.searchsorted(ends, record, side="right"))
            raise not_finite(name, chunk[place], record)


def first_unfinite(array: np.ndarray) -> tuple[int, ...] | None:
    """Returns where the first NaN or infinity of some floats is; None where there is none."""
    # A sum needs no array of its own; it is not finite where it overflows, too: look again.
    with np.errstate(invalid="ignore", over="ignore"):
        if np.isfinite(array.sum()):
            return None
    return next(map(tuple, np.argwhere(~np.isfinite(array))), None)


def not_finite(name: str, value: Any, record: int) -> DataError:
    """Returns the refusal of a value that is NaN or infinite."""
    is_missing = bool(np.isnan(value))
    return DataError(
        "every value must be present" if is_missing else "every value must be finite",
        received=f"{'NaN' if is_missing else value} in array '{name}', record {record}",
        mend="Replace it, as by numpy.nan_to_num, or leave the record out",
    )


def _check_weights(name: str, weights: np.ndarray) -> None:
    """Raises DataError for a sample weight below 0."""
    for first, chunk in chunks(weights):
        for record in np.flatnonzero(chunk < 0)[:1]:
            raise DataError(
                "a sample weight must be 0 or more",
                received=f"{chunk[record]} in array '{name}', record {first + record}",
                mend="Give 0 to a record that is not to count",
            )


def _plain(
    name: str, array: np.ndarray, role: str, notes: list[str], *, is_scalar: bool
) -> np.ndarray:
    """Returns the array in this machine's byte order; labels and weights in the dtypes of fit."""
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    becomes_float32 = role == "weight" and array.dtype.kind in "iu"
    if role in ("label", "weight") and array.dtype == np.float64:
        _check_float32(name, array)
        becomes_float32 = True
    if becomes_float32:
        note_rounded(name, (chunk for _, chunk in chunks(array)), notes)
    if role == "weight" and array.dtype.kind in "biuf":
        return array.astype(np.float32)
    if role == "label" and is_scalar and array.dtype.kind in "biu":
        if array.dtype == np.uint64:
            most = np.iinfo(np.int64).max
            _refuse_ids(name, array, array > most, f"0 to {most}")
        return array.astype(np.int64, copy=isinstance(array, np.memmap))
    if role == "label" and array.dtype == np.float64:
        return array.astype(np.float32)
    return array


def _check_float32(name: str, array: np.ndarray) -> None:
    """Raises DataError for a number that would be infinite as float32, and is not."""
    for _, chunk in chunks(array):
        with np.errstate(invalid="ignore"):
            is_beyond = (np.abs(chunk) > np.finfo(np.float32).max) & np.isfinite(chunk)
        if is_beyond.any():
            raise DataError(
                f"every value of array '{name}' must be one that float32 can hold",
                received=f"{chunk[is_beyond][0]:g}",
                mend="Scale the values",
            )


def _storage(array: np.ndarray, *, is_scalar: bool) -> tuple[str, str]:
    """Returns the dtype and the encoding; raw bytes where an Example has no such list."""
    name = array.dtype.name
    if name == "float32":
        return name, "float"
    if name == "int64" or (is_scalar and array.dtype.kind in "iu"):
        return name, "int64"
    return name, "raw"


def _check_class_ids(feature: Feature, ids: np.ndarray) -> None:
    classes = feature.classes
    limit = np.inf if classes is None else len(classes)
    known = "0 or more" if classes is None else f"in 0 to {len(classes) - 1}"
    _refuse_ids(feature.name, ids, (ids < 0) | (ids >= limit), known)


def _refuse_ids(name: str, ids: np.ndarray, is_wrong: np.ndarray, known: str) -> None:
    for record in np.flatnonzero(is_wrong)[:1]:
        raise DataError(
            f"integer labels must be class ids, {known}",
            received=f"{ids[record]} in '{name}', record {record}",
            mend="Number the classes from 0, or store targets of a regression as floats",
        )
