"""New photos and tables, without labels, as shards that are read as those of a training are."""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.errors import DataError, notice
from tfdist.records.buckets.urls import url_of
from tfdist.records.format.columns import Column, Columns
from tfdist.records.format.large_arrays import LargeArray, chunks
from tfdist.records.format.manifest import (
    holds_only_others,
    is_split_beside,
)
from tfdist.records.format.schema import Feature, Schema
from tfdist.records.wording import listed
from tfdist.records.writing.column_shards import write_columns
from tfdist.records.writing.images.options import ImageOptions
from tfdist.records.writing.images.search import all_images
from tfdist.records.writing.options import WriteOptions, cores
from tfdist.records.writing.roles import WEIGHT, Asked
from tfdist.records.writing.tables.arrow_texts import ArrowTexts, spooled
from tfdist.records.writing.tables.dates import year_first
from tfdist.records.writing.tables.files import NAMES, kind_of_file, read_table, room_for
from tfdist.records.writing.tables.infer import MISSING_WORDS, infer
from tfdist.records.writing.tables.packing import MISSING
from tfdist.records.writing.tables.records import columns_of_table
from tfdist.records.writing.tables.table import EMPTY, NUMBER, Cells, Texts, Written

if TYPE_CHECKING:
    from tfdist.records.writing.tables.table import Table

_SHOWN = 20


@dataclass(frozen=True)
class Keys:
    """What the records are called.

    Attributes:
        column: what such a name is: "file" or "row".
        values: text or int64 [records].
    """

    column: str
    values: np.ndarray


def find_raw(data: str | Path) -> Path | None:
    """Returns a file, or a folder without shards; None of shards.

    Raises:
        DataError: there is nothing.
    """
    path = Path(data)
    # Shards may be behind a URL.
    may_be_shards = url_of(data) is not None or is_split_beside(path)
    if not path.exists() and not may_be_shards:
        raise _nothing_known(f"{path}, which does not exist")
    return path if path.is_file() or (not may_be_shards and holds_only_others(path)) else None


def write_as_trained(
    source: Path,
    trained_on: Schema,
    out: Path,
    chosen: Callable[[int], range] = range,
) -> Keys:
    """Writes photos, or the rows of a table, as one split in their order.

    A photo gets the size and the colours, and a column the place and the numbers of its categories,
    that they had in the training. Labels are not needed, and other columns are left aside.

    Args:
        source: a photo, a folder with photos in it, or a table.
        trained_on: what the records of the training were.
        out: a folder that does not exist.
        chosen: tells of the number of all photos or rows which of them are written. Other photos
            are not read.

    Raises:
        DataError: the source is none of these, or not what the model was trained on.
    """
    inputs = trained_on.of_role("input")
    if source.is_file() and kind_of_file(source) is not None:
        with room_for(source):
            columns = of_table(read_table(source, in_file=True), inputs)
        rows = chosen(columns.num_records)
        rows = np.arange(rows.start, rows.stop)
        keys = Keys("row", rows)
    else:
        columns, names = _of_images(source, inputs, chosen)
        rows = np.arange(len(names))
        keys = Keys("file", np.array(names))
    options = WriteOptions(opened=lambda _: None, as_read=Schema.checked, in_order=True)
    write_columns(replace(columns, splits={"new": rows}), out, options, None)
    return keys


def _of_images(
    source: Path, inputs: Sequence[Feature], chosen: Callable[[int], range]
) -> tuple[Columns, list[str]]:
    from tfdist.records.writing.images.files import ImageFiles, read_headers
    from tfdist.records.writing.images.folders import image_feature

    images = all_images(source)
    if not images:
        where = "" if source.is_file() else ", without a photo"
        raise _nothing_known(f"{source}{where}")
    if len(inputs) > 1 or not inputs[0].is_image:
        raise _others(f"images in {source}", inputs)
    trained = inputs[0]
    if None in trained.read_shape:
        raise DataError(
            "the shards of a training on images must say the size that these are read in",
            received=f"'{trained.name}', whose sizes differ from record to record",
            mend="Say the one that the model takes: `tfdist adopt DIR --resize HxW`",
        )
    rows = chosen(len(images))
    images = images[rows.start : rows.stop]
    paths = [image.path for image in images]
    headers = read_headers(paths, ImageOptions(workers=cores()))
    bad = [f"{path}: {why}" for path, why in zip(paths, headers, strict=True) if type(why) is str]
    if bad:
        raise DataError(
            "every image must be one that can be read",
            received=f"{len(bad):,} that cannot: {listed(bad, _SHOWN)}",
            mend="Repair or remove them",
        )
    found = image_feature(trained.name, "input", images, headers, None)
    *size, channels = trained.read_shape
    feature = replace(
        found,
        shape=(*found.shape[:2], channels),
        reading=replace(trained.reading, size=tuple(size), upright=found.reading.upright),
    )
    _check_same(source, feature, trained)
    height, width = size
    others = sum(h.height * width != h.width * height for h in headers)
    # How those of the training came to one size is not known.
    if others and trained.reading.size is None:
        notice(
            f"{others:,} of {len(headers):,} images have other proportions than the "
            f"training's, {height}x{width}, and are stretched: bring them to these as those were",
        )
    column = ImageFiles(paths, headers)
    names = [os.fsencode(image.name).decode(errors="replace") for image in images]
    return Columns("folder", Schema((feature,)), {trained.name: column}), names


def of_table(table: Table, inputs: Sequence[Feature]) -> Columns:
    """Returns the rows of a table as the features of the training.

    Raises:
        DataError: it lacks columns, or they hold something else than in the training.
    """
    source = table.place
    if not all(map(columns_in, inputs)):
        raise _others(f"the table {source}", inputs)
    mask = [f for f in inputs if (f.name, f.dtype) == (MISSING, "uint8")]
    # In the order in which the training packed them: those of a mask are all, in theirs.
    needed = [name for feature in mask or inputs for name in columns_in(feature)]
    lacking = [name for name in needed if name not in table.names]
    if lacking:
        raise DataError(
            f"{source} must have the columns that the model was trained on",
            received=f"no column {listed(lacking, _SHOWN)}, and the columns "
            f"{listed(table.names, _SHOWN)}",
            mend="Add them, or rename those that are meant",
        )
    changed = _with_words(table.columns, inputs, is_masked=bool(mask))
    changed |= _with_dates(table, inputs)
    if mask:
        changed |= _with_empty_numbers(table.columns, inputs)
    table = replace(table, columns=ChainMap(changed, table.columns))
    asked = Asked(
        label=(),
        inputs=needed,
        drop=[WEIGHT] if WEIGHT in table.names and WEIGHT not in needed else None,
        categories=[feature.name for feature in inputs if feature.classes is not None],
        text=[f.name for f in inputs if f.encoding == "bytes" and f.shape == ()],
        missing="mask" if mask else None,
    )
    try:
        found = columns_of_table(table, asked, last_is_label=False)
    except DataError as error:
        raise DataError(
            error.rule,
            received=error.received,
            mend="Mend the table: each column must hold what it held in the training",
        ) from None
    features, columns = {f.name: f for f in found.schema.features}, {}
    for trained in inputs:
        own = features.get(trained.name)
        is_same = own is not None and columns_in(own) == columns_in(trained)
        if not is_same or is_date(own) != is_date(trained):
            raise _other_kinds(source, trained, own)
        columns[trained.name] = _as_in(table, trained, own, found.columns[own.name])
        _check_same(source, own, trained)
    schema = Schema(tuple(_read_as(features[f.name], f) for f in inputs))
    return Columns(found.kind, schema, columns)


def _with_words(
    columns: Mapping[str, Any], inputs: Sequence[Feature], *, is_masked: bool
) -> dict[str, Any]:
    """Returns columns where "NA" and such in text are what the training took them for.

    Of categories their names tell that. Text may have been said to be text, which nothing tells:
    there it is said how they are read.
    """
    found = {}
    for feature in inputs:
        column = columns[feature.name] if feature.encoding == "bytes" or feature.classes else None
        if not isinstance(column, Written):
            continue
        known = feature.classes or ()
        words = {text for text in column.texts if text.strip().lower() in MISSING_WORDS - {""}}
        words = {word for word in words if word.strip() not in known}
        if not words or (feature.classes is not None and "" not in known):
            continue
        if is_masked or feature.classes is not None:
            texts = column.texts
            if isinstance(texts, ArrowTexts):
                texts = texts.blanked(np.fromiter((text in words for text in texts), bool))
            else:
                texts = ["" if text in words else text for text in texts]
            found[feature.name] = replace(column, texts=texts)
        if feature.classes is None:
            notice(
                f"{listed(map(repr, sorted(words)))} in column '{feature.name}' is read as "
                + ("a missing value" if is_masked else "text")
                + ": write it otherwise if the training took it for something else",
            )
    return found


def _with_dates(table: Table, inputs: Sequence[Feature]) -> dict[str, Any]:
    """Returns columns where day and month have the order that they had in the training.

    Of a few rows nobody can tell it, nor should others than those of the training tell another.
    """
    found = {}
    for feature in inputs:
        column = None if feature.day_first is None else table.columns[feature.name]
        if column is None or isinstance(column, Cells):
            continue
        read = partial(year_first, is_day_first=feature.day_first)
        if isinstance(column, (Written, Texts)):
            if table.store is None:
                texts = list(map(read, column.texts))
            else:
                parts = (list(map(read, part)) for part in column.texts.parts())
                texts = spooled(parts, table.store)
            found[feature.name] = replace(column, texts=texts)
        else:
            values = [read(value) if isinstance(value, str) else value for value in column.values]
            found[feature.name] = replace(column, values=values)
    return found


def is_date(feature: Feature) -> bool:
    """Whether the feature of a table is dates: only these are whole numbers without classes."""
    is_whole = feature.dtype == "int64" and feature.shape == () and bool(feature.columns)
    return is_whole and feature.classes is None


def _with_empty_numbers(columns: Mapping[str, Any], inputs: Sequence[Feature]) -> dict[str, Any]:
    """Returns columns without a value that were numbers, as numbers that miss."""
    numbers = {name for f in inputs if f.dtype == "float32" for name in f.columns}
    return {
        name: replace(own, kind=NUMBER, values=np.zeros(len(own)))
        for name in numbers
        if (own := infer(columns[name])).kind == EMPTY
    }


def columns_in(feature: Feature) -> tuple[str, ...]:
    """Returns the columns of a table that a feature is made of; none of anything else."""
    is_alone = feature.encoding == "bytes" or feature.is_ragged  # Text and lists.
    return feature.columns or ((feature.name,) if is_alone else ())


def _as_in(table: Table, trained: Feature, found: Feature, values: Column) -> Column:
    """Returns the values of a feature, categories with the numbers of the training."""
    if trained.classes is not None:
        numbers = {name: number for number, name in enumerate(trained.classes)}
        unknown = [name for name in found.classes if name not in numbers]
        if unknown:
            raise DataError(
                f"column '{trained.name}' of {table.place} must hold categories of the training",
                received=listed(map(repr, unknown), _SHOWN),
                mend=f"Choose among {listed(trained.classes, _SHOWN)}",
            )
        known = np.array([numbers[name] for name in found.classes], np.int64)
        if isinstance(values, LargeArray):
            return table.store.rows((known[some] for _, some in chunks(values)), np.int64)
        return known[values]
    return values


def _read_as(found: Feature, trained: Feature) -> Feature:
    reading = trained.reading
    if found.is_ragged:
        reading = replace(reading, length=trained.read_shape[0])
    return replace(found, classes=trained.classes, columns=trained.columns, reading=reading)


def _check_same(source: str | Path, found: Feature, trained: Feature) -> None:
    sizes = found.shape == trained.shape or found.is_image
    if found.dtype != trained.dtype or not sizes:
        raise DataError(
            f"'{trained.name}' of {source} must be what the model was trained on, "
            f"{trained.dtype} {trained.shown_shape}",
            received=f"{found.dtype} {found.shown_shape}",
            mend="Convert it first",
        )


def _other_kinds(source: str, trained: Feature, found: Feature | None) -> DataError:
    have = () if found is None else columns_in(found)
    needed = columns_in(trained)
    wrong = set(needed).symmetric_difference(have) or needed
    return DataError(
        f"each column of {source} must hold values of the kind that it held in the training",
        received=f"none, or of another kind, in {listed(sorted(wrong), _SHOWN)}",
        mend="Mend these columns: numbers stay numbers, and dates dates, of which any rows can be "
        "read if they are written as 2024-12-31",
    )


def _nothing_known(received: str) -> DataError:
    return DataError(
        f"data to predict must be a split of shards, a photo, a folder of photos, or {NAMES}",
        received=received,
        mend="Of arrays and texts write shards first: `tfdist shard SOURCE NEW_FOLDER`",
    )


def _others(what: str, inputs: Sequence[Feature]) -> DataError:
    columns = [name for feature in inputs for name in columns_in(feature)]
    names = [f"the image '{f.name}'" if f.is_image else f"'{f.name}'" for f in inputs]
    taken = f"a table with the columns {listed(columns, _SHOWN)}" if columns else listed(names)
    return DataError(
        f"the model must be given what it was trained on, {taken}",
        received=what,
        mend="Give such data, or shards of it",
    )
