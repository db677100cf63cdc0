"""The files of a training's folder that are text: how they are written, and read with distrust."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

from tfdist.errors import DataError, read_json
from tfdist.records.replacing import replacing

# By its name what a table has at least, and the whole numbers that grow from row to row.
_TABLES: dict[str, tuple[set[str], tuple[str, ...]]] = {
    "history.csv": ({"epoch", "seconds", "samples_per_s"}, ("epoch",)),
    "evaluations.csv": ({"epoch", "step"}, ("epoch", "step")),
    "resources.csv": ({"epoch", "rank", "seconds"}, ("epoch", "rank")),
}
# What a config.json has at least, of any version of tfdist train.
_SETTINGS = {"model", "data", "splits", "strategy", "output", "global_batch_size", "seed"}
_LARGEST_EPOCH = 10**9


def read_config(path: Path) -> dict[str, Any]:
    """Returns what ``tfdist train`` was asked for.

    Raises:
        DataError: the file is not as it was written.
    """
    try:
        _check_regular(path)
        config = read_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from None
    if not isinstance(config, dict) or not config.keys() >= _SETTINGS:
        raise _damaged(path, "no settings of a training")
    texts = [config[name] for name in ("model", "data", "strategy", "output")]
    if not all(map(_is_name, [*texts, config.get("working_folder", "")])):
        raise _damaged(path, "settings of another kind")
    return config


def _check_regular(path: Path) -> None:
    """Reading a pipe or a device may never end."""
    if path.exists() and not path.is_file():
        raise OSError("it is no regular file")


def _is_name(value: Any) -> bool:
    """Whether ``value`` may be a part of a path."""
    try:
        return b"\0" not in os.fsencode(value)
    except (TypeError, UnicodeError):
        return False


def read_rows(path: Path) -> list[dict[str, float]]:
    """Returns the rows of a .csv of a training, none when there is no such file.

    Raises:
        DataError: the file is not as it was written.
    """
    columns, order = _TABLES[path.name]
    if not os.path.lexists(path):
        return []
    try:
        _check_regular(path)
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            found = list(reader.fieldnames or ())
            rows = [_row(row, columns, order) for row in reader]
    except (OSError, ValueError, csv.Error) as error:
        raise _damaged(path, error) from None
    if not set(found) >= columns:
        raise _damaged(path, f"columns {', '.join(found) or 'none'}")
    places = [tuple(row[name] for name in order) for row in rows]
    if places != sorted(set(places)):
        raise _damaged(path, "epochs that do not follow each other")
    return rows


def _row(
    texts: dict[str | None, Any], columns: set[str], order: tuple[str, ...]
) -> dict[str, float]:
    if None in texts:
        raise ValueError("a row with more cells than the first one")
    row: dict[str, float] = {
        str(name): float(text) for name, text in texts.items() if text not in ("", None)
    }
    if not row.keys() >= columns:
        raise ValueError(f"a row without {' and '.join(sorted(columns - row.keys()))}")
    for name in order:
        # The state of a training within its first epoch is that of epoch 0.
        lowest = 0 if len(order) > 1 else 1
        if not (lowest <= row[name] <= _LARGEST_EPOCH and row[name].is_integer()):
            raise ValueError(f"{name} {row[name]}")
    return row | {name: int(row[name]) for name in order}


def _damaged(path: Path, found: str | Exception) -> DataError:
    if isinstance(found, Exception):
        found = f"an error: {found}"
    return DataError(
        f"{path} must be as tfdist train wrote it",
        received=" ".join(found.split())[:200],
        mend="Restore it, or train anew with --overwrite",
    )


def write_history(path: Path, rows: list[dict[str, float]]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def write_json(path: Path, value: Any) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n")
