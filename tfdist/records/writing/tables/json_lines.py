"""A JSON object in each line: .jsonl and .ndjson files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from json.encoder import encode_basestring
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.errors import DataError, KeyTwiceError, read_json
from tfdist.records.format.large_arrays import Store
from tfdist.records.wording import listed
from tfdist.records.writing.tables.arrow_texts import ArrowTexts, Spool, spooled
from tfdist.records.writing.tables.table import (
    BOOLEAN,
    INTEGER,
    NUMBER,
    Cells,
    ColumnsInFile,
    Complaint,
    Table,
    Texts,
    Values,
)
from tfdist.records.writing.text_files import is_large, read_rows, read_text

_MUST = "be a JSON object"
_ONCE = "have each key once"
# A table of more columns and values, of which fewer than one in so many are there, is none.
_MOST_NAMES, _MOST_CELLS, _LEAST_SHARE = 10_000, 200_000_000, 100
#: What makes JSON lines of one JSON array.
AS_JSON_LINES = (
    "Save it as JSON lines: pandas.read_json(file).to_json('rows.jsonl', orient='records', "
    "lines=True)"
)


def read_json_lines(path: Path, *, in_file: bool = False) -> Table:
    """Returns the objects of a file as rows; a key that an object lacks is a missing value.

    Objects within objects are columns called by their path, "user.age".

    Args:
        in_file: whether the values of a large file may stay in one, see ``Table.store``.

    Raises:
        DataError: no text, or no objects.
    """
    store = None
    if in_file and is_large(path):
        store = Store()
        blocks, notes = read_rows(path, has_quotes=False)
    else:
        text, notes = read_text(path)
        blocks = iter([text])
    spool = None if store is None else Spool(store)
    found = _Objects(path)
    line = 0
    for text in blocks:
        if found.is_new and text.lstrip().startswith("["):
            if store is not None:
                return read_json_lines(path)  # As a whole it may be one array.
            _refuse_array(path, text)
        line = found.add(text, line)
        if spool is not None:
            spool.add(found.as_json(), np.array(found.lines, np.int64))
            found.rows, found.lines = [], []
    if not found.names and not found.bad:
        raise DataError(
            f"{path} must hold a JSON object in each line",
            received="none",
            mend='Write a line for each record, such as {"x": 1.5, "label": 0}',
        )
    nested = [name for name in found.names if "." in name] if found.is_nested else []
    if nested:
        notes = (*notes, f"objects within objects are columns of their own: {listed(nested, 5)}")
    columns: Mapping[str, Any] = {
        name: Values([item.get(name) for item in found.rows]) for name in found.names
    }
    lines: Any = np.array(found.lines, np.int64)
    if spool is not None:
        texts, lines = spool.all()
        columns = ColumnsInFile(texts, lambda name: _column_of(texts[name], store))
    return Table(
        kind="jsonl",
        place=str(path),
        unit="line",
        columns=columns,
        lines=lines,
        bad=tuple(found.bad),
        notes=notes,
        store=store,
    )


class _Objects:
    """The objects of some lines.

    Attributes:
        rows: by path, the values of each.
        lines: where each is.
        names: the paths of all, also of those that were added before.
    """

    def __init__(self, path: Path):
        self._path = path
        self.rows: list[Mapping[str, Any]] = []
        self.lines: list[int] = []
        self.bad: list[Complaint] = []
        self.names: dict[str, None] = {}
        self.is_nested = False
        self._num_rows = self._num_values = 0

    @property
    def is_new(self) -> bool:
        """Whether no line has been anything yet."""
        return not self._num_rows and not self.bad

    def add(self, text: str, line: int) -> int:
        """Adds those of a text behind so many lines, and returns how many are then over."""
        # Not splitlines: what Unicode calls a line's end may stand within a string.
        contents = text.removesuffix("\n").split("\n")
        for number, content in enumerate(contents, line + 1):
            if content.strip():
                self._add_line(number, content)
        self._refuse_ids()
        return line + len(contents)

    def _refuse_ids(self) -> None:
        """Raises DataError for objects whose keys are values, which would be a column each."""
        cells = len(self.names) * self._num_rows
        is_wide = len(self.names) > _MOST_NAMES
        if is_wide and cells > _MOST_CELLS and self._num_values * _LEAST_SHARE < cells:
            raise DataError(
                f"the objects of {self._path} must have the same keys, which name columns",
                received=f"{len(self.names):,} different ones in {self._num_rows:,} objects, of "
                f"which each has {self._num_values / self._num_rows:.0f}",
                mend='Write what differs as a value, {"user": "u17", "score": 1} for {"u17": 1}',
            )

    def _add_line(self, line: int, content: str) -> None:
        try:
            found = read_json(content, keys_once=True)
            flat, twice = _flattened(found) if isinstance(found, dict) else ({}, [])
        except KeyTwiceError as error:
            self.bad.append(Complaint(line, str(error), _ONCE))
            return
        except (ValueError, RecursionError) as error:
            self.bad.append(Complaint(line, f"an error ({error})", _MUST))
            return
        if not isinstance(found, dict):
            self.bad.append(Complaint(line, f"{content.strip():.30}", _MUST))
            return
        if "\\ud" in content.lower() and not _is_utf_8(found):
            self.bad.append(Complaint(line, "half a letter (a lone surrogate)", "be text of UTF-8"))
            return
        self.is_nested |= _has_objects(found)
        if twice:
            self.bad.append(Complaint(line, f"'{twice[0]}' twice", _ONCE))
            return
        self._num_rows += 1
        self._num_values += len(flat)
        self.rows.append(flat)
        self.lines.append(line)
        self.names |= dict.fromkeys(flat)

    def as_json(self) -> Iterator[tuple[str, list[str]]]:
        """Yields the paths of the rows, and the values of each as JSON."""
        for name in dict.fromkeys(name for row in self.rows for name in row):
            yield name, [_as_json(row.get(name)) for row in self.rows]


def _as_json(value: Any) -> str:
    # Most values, in a fifth of the time.
    if type(value) is str:
        return encode_basestring(value)
    if value is None:
        return "null"
    is_number = type(value) is int or (type(value) is float and math.isfinite(value))
    return repr(value) if is_number else json.dumps(value)


def _column_of(texts: ArrowTexts, store: Store) -> Cells | Texts | Values:
    """Returns the values that are written as JSON."""
    numbers = texts.numbers(frozenset(("null", "nan")))
    if numbers is not None:
        values, missing, _ = numbers
        if missing.any() and not any("null" in part for part in texts.parts()):
            values = values.astype(np.float64)  # Whole numbers beside NaN are floats.
        if np.isinf(values).any():  # As Python writes it.
            parts = ([t.replace("Infinity", "inf") for t in part] for part in texts.parts())
            texts = spooled(parts, store)
        kind = INTEGER if values.dtype == np.int64 else NUMBER
        return Cells(kind, values, missing, texts=texts)
    first = {text[0] for part in texts.parts() for text in set(part)}
    if first <= set("tfnN") and first & set("tf"):  # Truth values, null and NaN.
        letters = np.fromiter((text[0] for text in texts), "U1", len(texts))
        return Cells(BOOLEAN, letters == "t", (letters == "n") | (letters == "N"))
    if not first <= {'"', "n", "N"}:  # Text, null and NaN.
        return Values([json.loads(text) for text in texts])
    missing = np.fromiter((text[0] != '"' for text in texts), bool, len(texts))
    parts = ([json.loads(t) if t[0] == '"' else "" for t in part] for part in texts.parts())
    return Texts(spooled(parts, store), missing)


def _refuse_array(path: Path, text: str) -> None:
    """Raises DataError for one JSON array of objects, as programs save whole tables."""
    try:
        found = read_json(text)
    except ValueError:
        return  # Told line by line.
    if all(isinstance(item, dict) for item in found):
        raise DataError(
            f"{path} must hold a JSON object in each line",
            received=f"one array of {len(found):,} objects",
            mend=AS_JSON_LINES,
        )


def _flattened(item: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the values by their paths, with a dot between keys, and paths that come twice."""
    if not _has_objects(item):
        return dict(item), []
    flat: dict[str, Any] = {}
    twice: list[str] = []
    for name, value in item.items():
        inner = _flattened(value) if isinstance(value, dict) else None
        found = {name: value} if inner is None else {f"{name}.{k}": v for k, v in inner[0].items()}
        twice += [path for path in found if path in flat]
        twice += [] if inner is None else [f"{name}.{path}" for path in inner[1]]
        flat |= found
    return flat, twice


def _has_objects(item: Mapping[str, Any]) -> bool:
    return dict in map(type, item.values())


def _is_utf_8(value: Any) -> bool:
    """Whether all text in it can be written: JSON can hold one half of a letter, as of an emoji."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
