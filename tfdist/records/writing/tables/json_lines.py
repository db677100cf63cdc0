"""A JSON object in each line: .jsonl and .ndjson files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.errors import DataError, KeyTwiceError, read_json
from tfdist.records.wording import listed
from tfdist.records.writing.tables.table import Complaint, Table, Values
from tfdist.records.writing.text_files import read_text

_MUST = "be a JSON object"
_ONCE = "have each key once"
#: What makes JSON lines of one JSON array.
AS_JSON_LINES = (
    "Save it as JSON lines: pandas.read_json(file).to_json('rows.jsonl', orient='records', "
    "lines=True)"
)


def read_json_lines(path: Path) -> Table:
    """Returns the objects of a file as rows; a key that an object lacks is a missing value.

    Objects within objects are columns called by their path, "user.age".

    Raises:
        DataError: no text, or no objects.
    """
    text, notes = read_text(path)
    _refuse_array(path, text)
    objects: list[Mapping[str, Any]] = []
    lines: list[int] = []
    bad: list[Complaint] = []
    names: dict[str, None] = {}
    is_nested = False
    # Not splitlines: what Unicode calls a line's end may stand within a string.
    for line, content in enumerate(text.split("\n"), 1):
        if not content.strip():
            continue
        try:
            found = read_json(content, keys_once=True)
            flat, twice = _flattened(found) if isinstance(found, dict) else ({}, [])
        except KeyTwiceError as error:
            bad.append(Complaint(line, str(error), _ONCE))
            continue
        except (ValueError, RecursionError) as error:
            bad.append(Complaint(line, f"an error ({error})", _MUST))
            continue
        if not isinstance(found, dict):
            bad.append(Complaint(line, f"{content.strip():.30}", _MUST))
            continue
        if "\\ud" in content.lower() and not _is_utf_8(found):
            bad.append(Complaint(line, "half a letter (a lone surrogate)", "be text of UTF-8"))
            continue
        is_nested |= _has_objects(found)
        if twice:
            bad.append(Complaint(line, f"'{twice[0]}' twice", _ONCE))
            continue
        objects.append(flat)
        lines.append(line)
        names |= dict.fromkeys(flat)
    if not names and not bad:
        raise DataError(
            f"{path} must hold a JSON object in each line",
            received="none",
            mend='Write a line for each record, such as {"x": 1.5, "label": 0}',
        )
    if is_nested:
        nested = [name for name in names if "." in name]
        notes = (*notes, f"objects within objects are columns of their own: {listed(nested, 5)}")
    return Table(
        kind="jsonl",
        place=str(path),
        unit="line",
        columns={name: Values([item.get(name) for item in objects]) for name in names},
        lines=np.array(lines, np.int64),
        bad=tuple(bad),
        notes=notes,
    )


def _refuse_array(path: Path, text: str) -> None:
    """Raises DataError for one JSON array of objects, as programs save whole tables."""
    if not text.lstrip().startswith("["):
        return
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
