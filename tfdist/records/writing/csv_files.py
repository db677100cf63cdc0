"""A .csv file: numeric columns packed into one input, and one or more columns as labels."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tfdist.errors import DataError
from tfdist.records.format.columns import Columns, from_arrays
from tfdist.records.writing.roles import Asked, assign

_MISSING = ("", "na", "n/a", "nan", "null", "none")
_INT64 = np.iinfo(np.int64)


def from_csv(path: Path, asked: Asked | None = None) -> Columns:
    """Returns "features", float32 [columns], and the labels of each row.

    Without one that is named, the label's column is the one called label, target, class or y, else
    the last; see ``roles``. Integers become int64 class ids, other numbers float32 targets, text
    the numbers of its sorted values, which are the class names. One label is called "label",
    several are called as their columns. The column that names the owner of each row is no feature,
    and may hold text; nor is "sample_weight".

    Raises:
        DataError: ragged rows, missing values, features that are not numbers, no rows, or columns
            of which only the user can say what they are.
    """
    header, rows, lines = _read(path)
    asked = Asked() if asked is None else asked
    roles = assign(str(path), "column", header, asked, last_is_label=True)

    def values(name: str) -> list[str]:
        number = header.index(name)
        return [row[number] for row in rows]

    features = np.empty((len(rows), len(roles.inputs)), np.float32)
    for column, name in enumerate(roles.inputs):
        features[:, column] = _numbers(path, name, values(name), lines)
    labels, classes, packed = {}, {}, {"features": roles.inputs}
    for name in roles.labels:
        feature = "label" if len(roles.labels) == 1 else name
        _check_present(path, name, values(name), lines)
        labels[feature], classes[feature] = _labels(values(name))
        packed[feature] = (name,)
    weights = {}
    if roles.weight is not None:
        weights[roles.weight] = _numbers(path, roles.weight, values(roles.weight), lines)
    columns = from_arrays(
        "csv", {"features": features}, labels, weights, classes=classes, columns=packed
    )
    columns = replace(columns, roles=roles.listed(header))
    if roles.client is None:
        return columns
    owners = [value.strip() for value in values(roles.client)]
    _check_present(path, roles.client, owners, lines)
    return replace(columns, owners=np.array(owners))


def _read(path: Path) -> tuple[list[str], list[list[str]], list[int]]:
    """Returns the header, the rows, and the line of the file where each row ends."""
    rows, lines = [], []
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            header = [name.strip() for name in next(reader, [])]
            _check_header(path, header)
            for row in reader:
                if not row:
                    continue
                if len(row) != len(header):
                    raise DataError(
                        f"every row of {path} must have {len(header)} values",
                        received=f"{len(row)} in line {reader.line_num}",
                    )
                rows.append(row)
                lines.append(reader.line_num)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} must be UTF-8 text", received=f"an error: {error}") from None
    except csv.Error as error:
        raise DataError(
            f"{path} must be a comma-separated table",
            received=f"an error: {error} in line {reader.line_num}",
        ) from None
    if not rows:
        raise DataError(f"{path} must have rows below its header", received="none")
    return header, rows, lines


def _check_header(path: Path, header: list[str]) -> None:
    if not header or "" in header or len(set(header)) != len(header):
        raise DataError(
            f"the first line of {path} must name each column, each once",
            received=", ".join(header) or "an empty line",
        )


def _numbers(path: Path, name: str, values: Sequence[str], lines: Sequence[int]) -> np.ndarray:
    try:
        numbers = np.array(values, np.float64)
    except ValueError:
        _check_present(path, name, values, lines)
        value, line = next(
            (value, line)
            for value, line in zip(values, lines, strict=True)
            if _float(value) is None
        )
        raise DataError(
            f"column '{name}' of {path} must hold numbers",
            received=f"'{value}' in line {line}",
            mend="Encode it as numbers, or name it as the label: --label NAME",
        ) from None
    if np.isnan(numbers).any():
        _check_present(path, name, values, lines)
    return numbers


def _check_present(path: Path, name: str, values: Sequence[str], lines: Sequence[int]) -> None:
    for value, line in zip(values, lines, strict=True):
        if value.strip().lower() in _MISSING:
            raise DataError(
                f"every value of {path} must be present",
                received=f"'{value}' in line {line}, column '{name}'",
                mend="Fill it in, or remove the row",
            )


def _float(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def _labels(values: Sequence[str]) -> tuple[np.ndarray, list[str] | None]:
    """Returns int64 or float32 [rows], and the class names when the values are text."""
    try:
        numbers = [int(value) for value in values]
        if _INT64.min <= min(numbers) and max(numbers) <= _INT64.max:
            return np.array(numbers, np.int64), None
    except ValueError:
        pass
    floats = [_float(value) for value in values]
    if None not in floats:
        return np.array(floats, np.float32), None
    classes, ids = np.unique([value.strip() for value in values], return_inverse=True)
    return ids.astype(np.int64), classes.tolist()
