"""Whole numbers where they become floats: one that is another afterwards is refused, or told."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

import numpy as np

from tfdist.errors import DataError
from tfdist.records.format.large_arrays import LargeArray, chunks

# Whole numbers up to here are exact in float32, and up to there in float64.
EXACT = 1 << 24
_EXACT_64 = 1 << 53
#: Notes, but for the names that follow.
ROUNDED = f"whole numbers beyond {EXACT:,} are rounded to float32: "
VANISHED = "numbers nearer to 0 than float32 can be are 0: "


def is_rounded(values: np.ndarray) -> bool:
    """Whether a whole number among some numbers is another as float32."""
    large = values[(values > EXACT) | (values < -EXACT)]
    if values.dtype.kind == "f":
        large = large[large == np.floor(large)]
    with np.errstate(over="ignore", invalid="ignore"):
        return bool((large.astype(np.float32).astype(values.dtype) != large).any())


def may_be_rounded(values: np.ndarray) -> bool:
    """Whether numbers of a table are others as float32, or were when they became float64."""
    return bool((np.abs(values.astype(np.float64)) >= _EXACT_64).any()) or is_rounded(values)


def vanishes(values: np.ndarray) -> bool:
    """Whether a number that is not 0 is 0 as float32."""
    if values.dtype != np.float64:
        return False
    smallest = np.abs(values[np.abs(values) > 0]).min(initial=1.0)
    return not np.float32(smallest)


_OTHERS = (may_be_rounded, vanishes)


def notes_of_float32(columns: Iterable[tuple[str, np.ndarray | LargeArray]]) -> list[str]:
    """Returns what becomes of the numbers of a table, by name, as float32."""
    found = [
        (name, *(any(is_other(some) for _, some in chunks(values)) for is_other in _OTHERS))
        for name, values in columns
    ]
    rounded = ", ".join(f"'{name}'" for name, is_rounded, _ in found if is_rounded)
    gone = ", ".join(f"'{name}'" for name, _, vanished in found if vanished)
    return [ROUNDED + rounded] * bool(rounded) + [VANISHED + gone] * bool(gone)


def note_rounded(name: str, parts: Iterable[np.ndarray], notes: list[str]) -> None:
    """Adds to ``notes``, once however many records come, that numbers are others as float32."""
    untold = {f"{told}'{name}'": of for told, of in ((ROUNDED, is_rounded), (VANISHED, vanishes))}
    untold = {note: is_other for note, is_other in untold.items() if note not in notes}
    for part in parts if untold else ():  # Which may not fit into memory together.
        found = [note for note, is_other in untold.items() if is_other(part)]
        notes += found
        untold = {note: is_other for note, is_other in untold.items() if note not in found}
        if not untold:
            break


def check_kept(name: str, values: Any, array: np.ndarray, record: int | None = None) -> None:
    """Raises DataError where NumPy has made floats of whole numbers, and one is another there.

    Args:
        values: lists of numbers, or arrays of several dtypes.
        array: what NumPy has made of them.
        record: whose values they are; None for those of all records.
    """
    if array.dtype.kind != "f":
        return
    is_large = np.abs(array) >= _EXACT_64
    if not is_large.any():
        return
    given = np.array(values, object)[is_large]
    places = np.argwhere(is_large)
    for place, before, after in zip(places, given, array[is_large].tolist(), strict=True):
        if isinstance(before, numbers.Integral) and int(before) != after:
            raise DataError(
                f"whole numbers of array '{name}', which become float64 beside floats and beyond "
                "int64, must be ones that it can hold",
                received=f"{before} in record {place[0] if record is None else record}",
                mend="Give whole numbers of int64 alone, or write it as the float that is meant",
            )
