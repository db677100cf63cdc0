"""The columns of a table as arrays of features: numbers together, each other column alone.

And what becomes of values that are missing before that.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tfdist.errors import DataError, OptionError, spelt
from tfdist.records.format.large_arrays import LargeArray, Store, slices
from tfdist.records.format.text_and_ragged import TextColumn
from tfdist.records.format.whole_numbers import notes_of_float32
from tfdist.records.writing.tables.arrow_texts import ArrowTexts, parts_of
from tfdist.records.writing.tables.table import BOOLEAN, DATE, LISTS, NUMBER, NUMERIC, TEXT, Cells

FEATURES, MISSING = "features", "missing"
DROP, MASK = "drop", "mask"
_WORDS = (DROP, "mean", "median", MASK)
#: Text with at most so many different values, in fewer than half of the rows, is categories.
MOST_CATEGORIES = 1000
_CLASSES_IN_DOUBT = 20
# The names that an input of Keras can have.
_INPUT_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")


def parse_missing(given: str | float | None) -> str | float | None:
    """Returns "drop", "mean", "median", "mask", a number, or None, which is to refuse them.

    Raises:
        OptionError: anything else.
    """
    if given is None or given in _WORDS:
        return given
    try:
        number = float(given)
        if np.isfinite(number):
            return number
    except (TypeError, ValueError):
        pass
    raise OptionError(
        f"missing must be {', '.join(_WORDS)} or a number",
        received=repr(given),
        mend="Choose one of them, or leave it out to have missing values refused",
    )


def filled(name: str, cells: Cells, how: str | float) -> tuple[Cells, str]:
    """Returns the column with a value in each row, and a sentence that says with which.

    Numbers become the mean or the median of those that are there, the number that is given, or 0
    where a mask tells them apart; text becomes "", and a list an empty one.

    Raises:
        DataError: there is nothing to take a mean or a median of.
    """
    count = f"{int(cells.missing.sum()):,} missing in column '{name}'"
    if isinstance(cells.values, ArrowTexts):
        values = cells.values.blanked(cells.missing)
        done = "left empty"
    elif cells.kind in (TEXT, LISTS):
        values = cells.values.copy()
        nothing: object = "" if cells.kind == TEXT else []
        for row in np.flatnonzero(cells.missing):
            values[row] = nothing
        done = "left empty"
    else:
        values = np.array(cells.values[:])
        present = values[~cells.missing]
        if how == MASK:
            fill: float = 0
        elif isinstance(how, str):
            if not len(present):
                raise DataError(
                    f"column '{name}' must have values to take their {how}",
                    received="none in the rows that are kept",
                    mend=f"Give a number, or leave the column out, {spelt('drop', name)}",
                )
            fill = float(np.mean(present) if how == "mean" else np.median(present))
        else:
            fill = how
        if cells.kind in NUMERIC:
            values = values.astype(np.float64)
        if values.dtype.kind == "i":  # Dates are whole seconds.
            limits = np.iinfo(values.dtype)
            fill = max(limits.min, min(limits.max, int(fill)))
        done = f"filled with {fill:.6g}"
        if isinstance(how, str) and how != MASK:
            done += f", the {how} of all rows that have one"
        values[cells.missing] = fill
    kind = NUMBER if cells.kind in NUMERIC else cells.kind
    whole = replace(cells, kind=kind, values=values, missing=np.zeros(len(values), bool))
    return whole, f"{count}: {done}"


@dataclass
class Packed:
    """The arrays of the records.

    Attributes:
        store: where they lie, but for the labels; None where they are held.
        numbers: the columns of "features", float64, int64 or bool [rows].
        inputs, labels: the other arrays, by the name of the feature.
        classes: by feature, the names of the numbers in it.
        columns: by feature, the columns that it is made of.
        details: by column, what else there is to say of its role.
    """

    place: str
    store: Store | None = None
    numbers: dict[str, np.ndarray | LargeArray] = field(default_factory=dict)
    inputs: dict[str, object] = field(default_factory=dict)
    labels: dict[str, object] = field(default_factory=dict)
    classes: dict[str, Sequence[str]] = field(default_factory=dict)
    columns: dict[str, tuple[str, ...]] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_input(self, name: str, cells: Cells, said: Mapping[str, Sequence[str]]) -> None:
        if cells.kind in NUMERIC:
            self.numbers[name] = cells.values
            if cells.kind == BOOLEAN:
                self.details[name] = "0 or 1"
            return
        values = self.inputs[name] = cells.values
        self.columns[name] = (name,)
        if not _INPUT_NAME.fullmatch(name):
            self.notes.append(
                f"'{name}' is a name that no input of Keras can have: give the column another, or "
                "its values in map_fn"
            )
        if cells.kind == DATE:
            self.details[name] = "seconds since 1970"
        elif cells.kind == LISTS:
            self.inputs[name] = values.tolist()
            self.details[name] = "of variable length"
        elif _is_categories(name, cells, said):
            self.classes[name], ids = _numbered(values)
            self.inputs[name] = ids if self.store is None else self.store.rows([ids], np.int64)
            self.details[name] = f"{len(self.classes[name]):,} categories"
        else:
            self.details[name] = "text"
            if isinstance(values, ArrowTexts):
                self.inputs[name] = TextColumn(values.put_in(self.store))

    def add_mask(self, missing: Mapping[str, np.ndarray]) -> None:
        """Adds the input that is 1 where a column has no value, given bool [rows] by column."""
        self._refuse_taken(MISSING, f"values that are missing, which '{MISSING}' tells")
        self.inputs[MISSING] = self._side_by_side(missing.values(), np.uint8)
        self.columns[MISSING] = tuple(missing)

    def _refuse_taken(self, name: str, received: str) -> None:
        if name in self.inputs:
            raise DataError(
                f"no column of {self.place} that is no number must be called '{name}'",
                received=received,
                mend="Give the column another name",
            )

    def add_label(self, name: str, feature: str, cells: Cells) -> None:
        self.columns[feature] = (name,)
        values = cells.values
        if cells.kind in (TEXT, DATE):
            names, self.labels[feature] = _numbered(values)
            self.classes[feature] = names
            if len(names) > max(_CLASSES_IN_DOUBT, len(values) / 2):
                self.notes.append(
                    f"the label '{name}' has {len(names):,} classes in {len(values):,} rows: if it "
                    f"is none, name the label with {spelt('label')}"
                )
        elif cells.kind == BOOLEAN:
            self.labels[feature] = values.astype(np.int64)
            self.classes[feature] = ("false", "true")
        elif cells.kind == LISTS:
            self.labels[feature] = values.tolist()
        elif cells.kind == NUMBER:
            self.labels[feature] = values.astype(np.float32)
            self.notes += notes_of_float32([(name, values)])
        else:
            self.labels[feature] = values

    def all_inputs(self) -> dict[str, object]:
        """Returns the inputs, that of all numbers first."""
        if not self.numbers:
            return self.inputs
        numbers = ", ".join(self.numbers)
        self._refuse_taken(FEATURES, f"numbers in {numbers}, which are '{FEATURES}' together")
        features = self._side_by_side(self.numbers.values(), np.float32)
        self.notes += notes_of_float32(self.numbers.items())
        self.columns = {FEATURES: tuple(self.numbers), **self.columns}
        return {FEATURES: features, **self.inputs}

    def _side_by_side(
        self, columns: Collection[np.ndarray | LargeArray], dtype: type
    ) -> np.ndarray | LargeArray:
        """Returns numbers of columns, [rows] each, as rows, [rows, columns]."""
        rows = len(next(iter(columns)))

        def block(of: slice) -> np.ndarray:
            packed = np.empty((of.stop - of.start, len(columns)), dtype)
            for place, values in enumerate(columns):
                with np.errstate(over="ignore"):
                    packed[:, place] = values[of]
            return packed

        if self.store is None:
            return block(slice(0, rows))
        return self.store.rows(map(block, slices(rows, len(columns))), dtype, [len(columns)])


def _is_categories(name: str, cells: Cells, said: Mapping[str, Sequence[str]]) -> bool:
    if name in said["text"] or name in said["categories"]:
        return name in said["categories"]
    different: set[str] = set()
    for part in parts_of(cells.values):
        different.update(part)
        if len(different) > MOST_CATEGORIES:
            return False
    return len(different) * 2 < len(cells)


def _numbered(values: np.ndarray | ArrowTexts) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns the different values, sorted, and the number of each value there, int64 [rows]."""
    different = {value for part in parts_of(values) for value in set(part)}
    classes = tuple(_sorted({str(value).strip() for value in different}))
    number = {name: place for place, name in enumerate(classes)}
    ids = {value: number[str(value).strip()] for value in different}
    numbers = (ids[value] for part in parts_of(values) for value in part)
    return classes, np.fromiter(numbers, np.int64, len(values))


def _sorted(names: Collection[str]) -> list[str]:
    """Sorts names; numbers by their value, after what is empty, and before "nan"."""

    def place(name: str) -> tuple[bool, bool, float, str]:
        number = float(name or 0)
        is_none = number != number  # Which is neither less nor more than another.
        return name != "", is_none, 0.0 if is_none else number, name

    try:
        return sorted(names, key=place)
    except ValueError:
        return sorted(names)
