"""Columns of text, and of arrays that differ in length from record to record."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist.errors import DataError
from tfdist.records.format.large_arrays import LargeTexts
from tfdist.records.format.whole_numbers import check_kept
from tfdist.records.wording import check_unmasked

_TEXT_KINDS = "OSTU"


class TextColumn:
    """Text of each record: str or bytes, which are taken as they are.

    Args:
        values: [records, ...], of dtype object, str or bytes; or in a file.
    """

    def __init__(self, values: np.ndarray | LargeTexts):
        self.values = values
        self.shape = values.shape[1:]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: np.ndarray) -> list[Any]:
        chosen = self.values[rows]
        if not self.shape:
            return [as_bytes(text) for text in chosen.tolist()]
        return [[as_bytes(text) for text in texts] for texts in chosen.reshape(len(rows), -1)]


class RaggedColumn:
    """For each record an array [n, *inner] with an n of its own.

    Attributes:
        flat: the entries of all records, [entries, *inner]; of text, dtype object with bytes.
        ends: where those of each record end, int64 [records].
    """

    def __init__(self, flat: np.ndarray, ends: np.ndarray):
        self.flat = flat
        self.ends = ends

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, rows: np.ndarray) -> list[np.ndarray]:
        return [self._of(row) for row in rows.tolist()]

    def _of(self, row: int) -> np.ndarray:
        return self.flat[self.ends[row - 1] if row else 0 : self.ends[row]]

    @property
    def longest(self) -> int:
        """Entries of the longest record, at least 1."""
        return max(1, int(np.diff(self.ends, prepend=0).max(initial=0)))


def objects(values: Sequence[Any]) -> np.ndarray:
    """Returns an array of objects, [values], also where those are sequences themselves."""
    array = np.empty(len(values), object)
    for row, value in enumerate(values):
        array[row] = value
    return array


def as_bytes(text: Any) -> bytes:
    """Returns text as it is stored. Raises DataError for text that UTF-8 has no bytes for."""
    try:
        return text if isinstance(text, bytes) else str(text).encode()
    except UnicodeEncodeError:
        raise DataError(
            "text must be such that UTF-8 can write it",
            received=f"{text!r:.60}, with half of a pair of surrogates",
            mend="Replace it, as by text.encode('utf-8', 'replace')",
        ) from None


def as_label(name: str, text: str | bytes) -> str:
    """Returns the class that a label names. Raises DataError for bytes that are no text."""
    try:
        return text.decode() if isinstance(text, bytes) else str(text)
    except UnicodeDecodeError:
        raise DataError(
            f"the text of label '{name}' must be UTF-8",
            received=f"{text!r:.60}",
            mend="Decode it first, as by text.decode('latin-1')",
        ) from None


def as_classes(texts: Sequence[str]) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns the different texts, sorted, and the number of each text there, int64 [texts]."""
    # NumPy's own text would lose the NULs that one ends with, and two classes would become one.
    classes = tuple(sorted(set(texts)))
    ids = {name: number for number, name in enumerate(classes)}
    return classes, np.array([ids[text] for text in texts], np.int64)


def as_column(name: str, values: Any) -> np.ndarray | TextColumn | RaggedColumn:
    """Returns the column of what a user has: an array, lists, text, or a tf.RaggedTensor.

    Raises:
        DataError: lists of lists that are neither all alike nor different in their first length
            alone, or values that are neither numbers nor text.
    """
    if isinstance(values, TextColumn):
        return values
    check_unmasked(values, f"an array '{name}'")
    if hasattr(values, "row_splits"):  # tf.RaggedTensor, which only a program with TensorFlow has.
        return _of_ragged_tensor(name, values)
    try:
        array = np.asarray(values)
    except ValueError:  # Lists of unequal lengths.
        array = objects(values)
    if array.dtype.kind == "T":  # NumPy's StringDType, which TensorFlow does not take.
        array = array.astype(object)
    if array.dtype.kind in "SU" and hasattr(values, "dtype"):
        return TextColumn(array)
    if array.dtype.kind in "SU":  # NumPy makes text of numbers beside text.
        array = np.array(values, object)
    if array.dtype.kind != "O":
        if not hasattr(values, "dtype"):
            check_kept(name, values, array)
        return array
    if all(isinstance(value, (str, bytes)) for value in array.flat):
        return TextColumn(array)
    if hasattr(values, "dtype") and all(isinstance(value, numbers.Real) for value in array.flat):
        return as_column(name, array.tolist())
    if array.ndim == 1 and all(_is_list(value) for value in array):
        return _of_lists(name, array)
    raise DataError(
        f"array '{name}' must hold numbers, or text, or an array for each record",
        received=_odd_one(array),
        mend="Convert it to one of these first",
    )


def _odd_one(array: np.ndarray) -> str:
    """Returns what is neither numbers nor text alone among some objects, in words."""
    width = array[:1].size if array.ndim else 1

    def said(n: int) -> str:
        return f"{array.flat[n]!r:.40} in record {n // width}"

    others = [n for n, value in enumerate(array.flat) if not isinstance(value, (str, bytes))]
    for n in others:
        if not isinstance(array.flat[n], numbers.Real):
            return f"{type(array.flat[n]).__name__} {said(n)}"
    for n, value in enumerate(array.flat):
        if isinstance(value, (str, bytes)):
            return f"text beside numbers: {said(n)}, {said(others[0])}"
    # NumPy has no dtype of numbers for them.
    large = (n for n in others if isinstance(array.flat[n], int) and abs(array.flat[n]) >= 1 << 63)
    n = next(large, others[0])
    return f"{type(array.flat[n]).__name__} {said(n)}, which no number of 64 bits is"


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim > 0)


def _of_ragged_tensor(name: str, values: Any) -> RaggedColumn:
    if values.ragged_rank != 1:
        raise DataError(
            f"array '{name}' must have one ragged dimension, that of the records",
            received=f"{values.ragged_rank} ragged dimensions",
            mend="Give ragged.to_tensor(), which pads all to one shape",
        )
    flat = np.asarray(values.flat_values)
    return RaggedColumn(flat, np.asarray(values.row_splits, np.int64)[1:])


def _of_lists(name: str, lists: np.ndarray) -> RaggedColumn:
    parts = [_as_part(name, record, value) for record, value in enumerate(lists)]
    filled = [part for part in parts if len(part)] or parts[:1]
    is_text = filled[0].dtype == object
    for record, part in enumerate(parts):
        if len(part) and (part.dtype == object) != is_text:
            raise DataError(
                f"the records of array '{name}' must all be numbers, or all text",
                received=f"{part.tolist()!r:.60} in record {record} where others have "
                f"{filled[0].tolist()!r:.60}",
                mend="Write the numbers as text, or leave the text out",
            )
        if len(part) and part.shape[1:] != filled[0].shape[1:]:
            raise DataError(
                f"the entries of array '{name}' must all have the same shape",
                received=f"{list(part.shape[1:])} in record {record} where others have "
                f"{list(filled[0].shape[1:])}",
                mend="Pad or cut them to one shape",
            )
    flat = np.concatenate(filled)
    if flat.dtype.kind == "f":
        for record, part in enumerate(parts):
            if part.dtype.kind in "iu":
                check_kept(name, part, part.astype(flat.dtype), record)
    if is_text:
        flat = objects([as_bytes(text) for part in filled for text in part.tolist()])
    return RaggedColumn(flat, np.cumsum([len(part) for part in parts], dtype=np.int64))


def _as_part(name: str, record: int, value: Sequence[Any]) -> np.ndarray:
    try:
        part = np.asarray(value)
    except ValueError:
        part = None
    is_text = part is not None and part.dtype.kind in _TEXT_KINDS and part.ndim == 1
    if is_text and all(isinstance(v, (str, bytes)) for v in value):
        # As objects: NumPy's own text would lose the NULs that one ends with.
        return np.array(value, object)
    if part is None or part.dtype.kind not in "biuf":
        raise DataError(
            f"each record of array '{name}' must be numbers or text, in equal rows",
            received=f"{value!r:.60} in record {record}",
            mend="Give numbers or texts alone, and pad rows of unequal lengths",
        )
    if not hasattr(value, "dtype"):
        check_kept(name, value, part, record)
    return part
