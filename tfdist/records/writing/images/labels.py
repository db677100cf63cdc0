"""A labels file beside images: any table with a row for each image, or COCO's annotations."""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType

import numpy as np

from tfdist.errors import DataError, read_json, spelt
from tfdist.records.wording import listed
from tfdist.records.writing.images import coco
from tfdist.records.writing.images.search import SUFFIXES
from tfdist.records.writing.tables.files import NAMES, read_table
from tfdist.records.writing.tables.infer import infer
from tfdist.records.writing.tables.table import Cells, Table, Values, Written, refuse

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
# What is called so names the files of its rows; numbers of rows may be called as the others are.
_SURE_COLUMNS = _FILE_COLUMNS[: _FILE_COLUMNS.index("image_id")]


@dataclass(frozen=True)
class LabelRows:
    """The rows of a labels file.

    Attributes:
        path: of the file, or of the folder with COCO's.
        places: where each row stands, "line 3".
        sizes: height and width that the image of each row must have; None where nothing says so.
        classes: by column, names that are classes whether a row has them or not.
        files: those that it was read from.
    """

    path: Path
    table: Table
    places: list[str]
    sizes: list[tuple[int, int]] | None = None
    classes: Mapping[str, Collection[str]] = field(default_factory=dict)
    files: tuple[Path, ...] = ()

    def texts(self, name: str) -> list[str]:
        """Returns the values of a column as they are written, "" where there is none."""
        texts = infer(self.table.columns[name], is_text=True).values.tolist()
        return [text.strip() for text in texts]


def read_label_rows(path: str | Path, folder: Path) -> LabelRows:
    """Returns the rows of a labels file, given by its path or by its name in ``folder``.

    COCO's annotations are one file, or a folder with several.

    Raises:
        DataError: no such file, or one that is no table.
    """
    path = Path(path)
    if not path.exists() and (folder / path).exists():
        path = folder / path
    if path.is_dir() and (files := coco.annotation_files(path)):
        return _of_coco(path, files)
    if not path.is_file():
        raise DataError(
            f"labels must name {NAMES}, or COCO's annotations",
            received=f"{path}, which is no file",
            mend="Write its path from the current folder, or from that of the images",
        )
    if _holds_coco(path):
        return _of_coco(path, [path])
    table = read_table(path, "jsonl" if path.suffix.lower() == ".json" else "csv")
    if not len(table.lines):
        raise refuse(table, table.bad, {})
    columns = {name: _as_written(column) for name, column in table.columns.items()}
    table = replace(table, columns=columns)
    places = [f"{table.unit} {line}" for line in table.lines.tolist()]
    return LabelRows(path, table, places, files=(path,))


def _as_written(column: Cells | Written | Values) -> Cells | Written | Values:
    """Returns a column of JSON's text as one of a text file: "3" is a number in both."""
    values = column.values if isinstance(column, Values) else [0]
    are_texts = all(type(value) in (str, NoneType) for value in values)
    return Written([value or "" for value in values]) if are_texts else column


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
        raise DataError(
            f"{path} must have a row for each image",
            received="none",
            mend=f"Name other annotations with {spelt('labels', 'FILE')}",
        )
    boxes = sum(len(row[coco.BOXES]) for row in found.rows)
    notes = [
        f"{boxes:,} boxes, in parts of height and width, are those of {listed(map(str, files))}"
    ]
    nameless = [file.name for file in files if coco.split_of(file) is None]
    if 0 < len(nameless) < len(files):
        notes.append(
            f"the names of the files of annotations divide nothing, as {listed(nameless)} says no "
            "split: rename it as instances_train.json, or move it away"
        )
    if found.has_masks:
        notes.append("the outlines (segmentation) that COCO has beside its boxes are not read")
    table = Table(
        kind="coco",
        place=str(path),
        unit="image",
        columns={name: Values([row[name] for row in found.rows]) for name in found.names},
        lines=np.arange(len(found.rows)),
        notes=tuple(notes),
    )
    return LabelRows(
        path, table, found.places, found.sizes, {coco.KINDS: found.kinds}, tuple(files)
    )


def match(rows: LabelRows, images: Sequence[str]) -> tuple[str, list[int | None], list[str]]:
    """Returns which row belongs to which image.

    A file is named by its path in the folder or by its name, with its suffix or without.

    Args:
        images: their paths in the folder.

    Returns:
        The column that names the files; of each image the number of its row, None where it has
        none; and the rows without an image, such as "line 3: cat.png, which is no image here".

    Raises:
        DataError: no column names files, or several rows name the same one.
    """
    known = _by_every_name(images)
    files = [n for n in rows.table.names if n.lower().endswith(tuple(SUFFIXES))]
    if rows.table.unit == "line" and (named := [n for n in files if plain(n) in known]):
        raise DataError(
            f"the first line of {rows.path} must name each column",
            received=f"an image of the folder, {named[0]}",
            mend="Write names above the rows, such as file,label",
        )
    column, texts = _file_column(rows, known, images)
    of_images: list[int | None] = [None] * len(images)
    astray, twice = [], []
    for number, text in enumerate(texts):
        image = known.get(plain(text))
        if image is None:
            astray.append(f"{rows.places[number]}: {text}, which is no image here")
        elif of_images[image] is not None:
            twice.append(f"{images[image]} in {rows.places[number]}")
        else:
            of_images[image] = number
    if twice:
        raise DataError(
            f"each image must have one row in {rows.path}",
            received=f"{len(twice):,} rows that name one again: {listed(twice, 20)}",
            mend="Put all boxes of an image into one line of JSON, as a list of lists",
        )
    return column, of_images, astray


def plain(text: str) -> str:
    """Returns a path as all write it: some write an umlaut as a letter and its dots."""
    return unicodedata.normalize("NFC", text.replace("\\", "/").removeprefix("./"))


def _by_every_name(images: Sequence[str]) -> dict[str, int]:
    """Returns the number of each image by all names that are of it alone; whole paths win."""
    named = defaultdict(set)
    images = list(map(plain, images))
    for number, path in enumerate(images):
        base = path.rpartition("/")[2]
        for name in (base, path.rpartition(".")[0], base.rpartition(".")[0]):
            named[name].add(number)
    alone = {name: next(iter(numbers)) for name, numbers in named.items() if len(numbers) == 1}
    return {**alone, **{path: number for number, path in enumerate(images)}}


def _names_files(column: str, texts: Sequence[str]) -> bool:
    """Whether a column is there to name image files: by its own name, or by its values."""
    if column.lower() in _SURE_COLUMNS:
        return True
    named = sum(text.lower().endswith(tuple(SUFFIXES)) for text in texts)
    return named > len(texts) / 2


def _file_column(
    rows: LabelRows, known: Mapping[str, int], images: Sequence[str]
) -> tuple[str, list[str]]:
    """Returns the column that names files, and its texts: one called so, else what names most.

    Raises:
        DataError: there is none, or another one names other files, and with their suffixes.
    """
    names = rows.table.names
    called = [name for name in names if name.lower() in _FILE_COLUMNS]
    called.sort(key=lambda name: _FILE_COLUMNS.index(name.lower()))
    texts = {name: rows.texts(name) for name in names}
    found = {name: [known.get(plain(text)) for text in texts[name]] for name in names}
    counts = {name: len(rows.places) - found[name].count(None) for name in names}
    files = {*images, *(image.rpartition("/")[2] for image in images)}
    whole = {name: sum(plain(text) in files for text in texts[name]) for name in names}
    # A number of a row may well be the name of another row's file, without its suffix.
    best = next(filter(counts.get, called), max(names, key=lambda n: (whole[n], counts[n])))
    other = max(names, key=whole.get)
    numbers = [text for text, n in zip(texts[best], found[best], strict=True) if n is not None]
    # Any column of numbers may seem to name files, without their suffixes.
    is_in_doubt = not whole[best] and best.lower() not in _SURE_COLUMNS
    is_in_doubt = is_in_doubt and all(map(str.isdigit, numbers))
    for name in (*called, *names) if is_in_doubt else ():
        if not counts[name] and any(texts[name]) and _names_files(name, texts[name]):
            shown = next(filter(None, texts[name]))
            raise DataError(
                f"column '{name}' of {rows.path} must name the image files",
                received=f"'{shown:.60}', where the folder has {images[0]}",
                mend=f"Name files by their path in the folder; if '{best}' names them, call it "
                f"{_FILE_COLUMNS[0]}",
            )
    differ = any(
        a is not None and b is not None and a != b
        for a, b in zip(found[best], found[other], strict=True)
    )
    if not whole[best] and whole[other] and differ and best.lower() not in _SURE_COLUMNS:
        raise DataError(
            f"one column of {rows.path} must name the image files",
            received=f"'{best}' and, with their suffixes, '{other}', which name different ones",
            mend=f"Call the one that names them '{_FILE_COLUMNS[0]}', with suffixes",
        )
    if not counts[best]:
        shown = next((text for name in called for text in texts[name] if text), None)
        example = "" if shown is None else f" ('{shown:.60}', where the folder has {images[0]})"
        raise DataError(
            f"{rows.path} must have a column with the names of the image files",
            received=f"columns {', '.join(names)}, none of which names one{example}",
            mend=f"Call it {_FILE_COLUMNS[0]} or {_FILE_COLUMNS[1]}, and name files by their path "
            "in the folder",
        )
    return best, texts[best]
