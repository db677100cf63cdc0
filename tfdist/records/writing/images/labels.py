"""A labels file beside images: a CSV or JSON lines file with a row for each image, or COCO's."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfdist.errors import DataError, read_json
from tfdist.records.wording import listed
from tfdist.records.writing.images import coco

_FILE_COLUMNS = (
    "file",
    "filename",
    "file_name",
    "image",
    "image_name",
    "image_file",
    "image_path",
    "filepath",
    "file_path",
    "path",
    "img",
    "image_id",
    "id",
    "name",
)
_JSON_LINES = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True)
class LabelRows:
    """The rows of a labels file.

    Attributes:
        names: of its columns, in their order.
        rows: the values by column, text or what JSON holds; None where a row has none.
        places: where each row stands, "line 3".
        sizes: height and width that the image of each row must have; None where nothing says so.
        classes: by column, names that are classes whether a row has them or not.
        notes: what there is to tell, a sentence each.
        files: those that it was read from.
    """

    path: Path
    names: tuple[str, ...]
    rows: list[Mapping[str, Any]]
    places: list[str]
    sizes: list[tuple[int, int]] | None = None
    classes: Mapping[str, Collection[str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Matched:
    """Which row belongs to which image.

    Attributes:
        column: the one that names the files.
        rows: of each image, the number of its row; None where it has none.
        astray: the rows without an image, "line 3: cat.png".
    """

    column: str
    rows: list[int | None]
    astray: list[str]


def read_label_rows(path: str | Path, folder: Path) -> LabelRows:
    """Returns the rows of a labels file, given by its path or by its name in ``folder``.

    COCO's annotations are one file, or a folder with several.

    Raises:
        DataError: no such file, or lines that are no rows; all of them are named.
    """
    path = Path(path)
    if not path.exists() and (folder / path).exists():
        path = folder / path
    if path.is_dir() and (files := coco.annotation_files(path)):
        return _of_coco(path, files)
    if not path.is_file():
        raise DataError(
            "labels must name a CSV or JSON lines file, or COCO's annotations",
            received=f"{path}, which is no file",
        )
    if _holds_coco(path):
        return _of_coco(path, [path])
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} must be UTF-8 text", received=f"an error: {error}") from None
    is_json = path.suffix.lower() in _JSON_LINES
    try:
        names, rows, lines, wrong = (_json_rows if is_json else _csv_rows)(text)
    except csv.Error as error:
        raise DataError(
            f"{path} must be a table of comma-separated values", received=f"an error: {error}"
        ) from None
    if "" in names or len(set(names)) != len(names):
        raise DataError(
            f"the first line of {path} must name each column, each once",
            received=", ".join(names) or "an empty line",
        )
    if wrong:
        what = "an object of JSON" if is_json else f"a row of {len(names)} values"
        raise DataError(
            f"every line of {path} must be {what}",
            received=f"{len(wrong):,} that are not: {listed(wrong, 20)}",
        )
    if not rows:
        raise DataError(f"{path} must have a row for each image", received="none")
    places = [f"line {line}" for line in lines]
    return LabelRows(path, tuple(names), rows, places, files=(path,))


def _holds_coco(path: Path) -> bool:
    """Whether a file of JSON is one object of annotations, and not one a line."""
    if path.suffix.lower() != ".json":
        return False
    try:
        return coco.is_coco(read_json(path.read_text(encoding="utf-8-sig")))
    except ValueError:
        return False


def _of_coco(path: Path, files: Sequence[Path]) -> LabelRows:
    found = coco.read_annotations(files)
    if not found.rows:
        raise DataError(f"{path} must have a row for each image", received="none")
    boxes = sum(len(row[coco.BOXES]) for row in found.rows)
    notes = [
        f"{boxes:,} boxes, in parts of height and width, are those of {listed(map(str, files))}"
    ]
    if found.has_masks:
        notes.append("the outlines (segmentation) that COCO has beside its boxes are not read")
    return LabelRows(
        path,
        found.names,
        found.rows,
        found.places,
        sizes=found.sizes,
        classes={coco.KINDS: found.kinds},
        notes=tuple(notes),
        files=tuple(files),
    )


def _csv_rows(text: str) -> tuple[list[str], list[Mapping[str, Any]], list[int], list[str]]:
    header = next(iter(text.splitlines()), "")
    separator = max(",;\t", key=header.count)
    # Not lines: a value between quotes may go on in the next one.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    names = [name.strip() for name in next(reader, [])]
    rows, numbers, wrong = [], [], []
    for row in reader:
        if not row:
            continue
        if len(row) != len(names):
            wrong.append(f"line {reader.line_num} has {len(row)}")
        rows.append(dict(zip(names, (value.strip() for value in row), strict=False)))
        numbers.append(reader.line_num)
    return names, rows, numbers, wrong


def _json_rows(text: str) -> tuple[list[str], list[Mapping[str, Any]], list[int], list[str]]:
    names: dict[str, None] = {}
    rows, numbers, wrong = [], [], []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = read_json(line)
        except ValueError as error:
            wrong.append(f"line {number} ({error})")
            continue
        if not isinstance(row, dict):
            wrong.append(f"line {number} holds {type(row).__name__}")
            continue
        names.update(dict.fromkeys(row))
        rows.append(row)
        numbers.append(number)
    return list(names), rows, numbers, wrong


def match(table: LabelRows, images: Sequence[str]) -> Matched:
    """Returns the row of each image.

    A file is named by its path in the folder or by its name, with its suffix or without.

    Args:
        images: their paths in the folder.

    Raises:
        DataError: no column names files, or several rows name the same one.
    """
    known = _by_every_name(images)
    column = _file_column(table, known)
    rows: list[int | None] = [None] * len(images)
    astray, twice = [], []
    for number, row in enumerate(table.rows):
        value = row.get(column)
        image = known.get(_plain(value))
        if image is None:
            astray.append(f"{table.places[number]}: {value}")
        elif rows[image] is not None:
            twice.append(f"{images[image]} in {table.places[number]}")
        else:
            rows[image] = number
    if twice:
        raise DataError(
            f"each image must have one row in {table.path}",
            received=f"{len(twice):,} rows that name one again: {listed(twice, 20)}",
            mend="Put all boxes of an image into one line of JSON, as a list of lists",
        )
    return Matched(column, rows, astray)


def _plain(value: Any) -> str:
    return str(value).strip().replace("\\", "/").removeprefix("./")


def _by_every_name(images: Sequence[str]) -> dict[str, int]:
    """Returns the number of each image by all names that are of it alone; whole paths win."""
    named = defaultdict(set)
    for number, path in enumerate(images):
        base = path.rpartition("/")[2]
        for name in (base, path.rpartition(".")[0], base.rpartition(".")[0]):
            named[name].add(number)
    alone = {name: next(iter(numbers)) for name, numbers in named.items() if len(numbers) == 1}
    return {**alone, **{path: number for number, path in enumerate(images)}}


def _file_column(table: LabelRows, known: Mapping[str, int]) -> str:
    """Returns the column that names files: one that is called so, else the one that names most."""

    def found(name: str) -> int:
        return sum(_plain(row.get(name)) in known for row in table.rows)

    called = [name for name in table.names if name.lower() in _FILE_COLUMNS]
    called.sort(key=lambda name: _FILE_COLUMNS.index(name.lower()))
    for name in called:
        if found(name):
            return name
    counts = {name: found(name) for name in table.names}
    best = max(counts, key=counts.get)
    if not counts[best]:
        raise DataError(
            f"{table.path} must have a column with the names of the image files",
            received=f"columns {', '.join(table.names)}, none of which names one",
            mend=f"Call it {_FILE_COLUMNS[0]} or {_FILE_COLUMNS[1]}, and name files by their path "
            "in the folder",
        )
    return best
