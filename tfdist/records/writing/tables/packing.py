"""The columns of a table as arrays of features: numbers together, each other column alone."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tfdist.errors import DataError, spelt
from tfdist.records.format.text_and_ragged import as_classes
from tfdist.records.format.whole_numbers import notes_of_float32
from tfdist.records.writing.tables.table import BOOLEAN, DATE, LISTS, NUMBER, NUMERIC, TEXT, Cells

FEATURES, MISSING = "features", "missing"
#: Text with at most so many different values, in fewer than half of the rows, is categories.
MOST_CATEGORIES = 1000
_CLASSES_IN_DOUBT = 20
# The names that an input of Keras can have.
_INPUT_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")


@dataclass
class Packed:
    """The arrays of the records.

    Attributes:
        numbers: the columns of "features", float64, int64 or bool [rows].
        inputs, labels: the other arrays, by the name of the feature.
        classes: by feature, the names of the numbers in it.
        columns: by feature, the columns that it is made of.
        details: by column, what else there is to say of its role.
    """

    place: str
    numbers: dict[str, np.ndarray] = field(default_factory=dict)
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
        self.inputs[name] = cells.values
        self.columns[name] = (name,)
        if not _INPUT_NAME.fullmatch(name):
            self.notes.append(
                f"'{name}' is a name that no input of Keras can have: give the column another, or "
                "its values in map_fn"
            )
        if cells.kind == DATE:
            self.details[name] = "seconds since 1970"
        elif cells.kind == LISTS:
            self.inputs[name] = cells.values.tolist()
            self.details[name] = "of variable length"
        elif _is_categories(name, cells, said):
            self.classes[name], self.inputs[name] = _numbered(cells.values)
            self.details[name] = f"{len(self.classes[name]):,} categories"
        else:
            self.details[name] = "text"

    def add_mask(self, missing: Mapping[str, np.ndarray]) -> None:
        """Adds the input that is 1 where a column has no value, given bool [rows] by column."""
        self._refuse_taken(MISSING, f"values that are missing, which '{MISSING}' tells")
        self.inputs[MISSING] = np.stack(list(missing.values()), axis=-1).astype(np.uint8)
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
        rows = len(next(iter(self.numbers.values())))
        features = np.empty((rows, len(self.numbers)), np.float32)
        for place, values in enumerate(self.numbers.values()):
            with np.errstate(over="ignore"):
                features[:, place] = values
        self.notes += notes_of_float32(self.numbers.items())
        self.columns = {FEATURES: tuple(self.numbers), **self.columns}
        return {FEATURES: features, **self.inputs}


def _is_categories(name: str, cells: Cells, said: Mapping[str, Sequence[str]]) -> bool:
    if name in said["text"] or name in said["categories"]:
        return name in said["categories"]
    different = len(set(cells.values.tolist()))
    return different <= MOST_CATEGORIES and different * 2 < len(cells)


def _numbered(values: np.ndarray) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns the different values, sorted, and the number of each value there, int64 [rows]."""
    return as_classes([str(value).strip() for value in values.tolist()], _sorted)


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
