"""From a table to columns of records: which of its columns are what, and how they are stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tfdist.errors import DataError, spelt
from tfdist.records.format.columns import Columns, from_arrays
from tfdist.records.format.large_arrays import LargeArray, Store, chunks, slices
from tfdist.records.format.schema import Feature, Schema
from tfdist.records.format.text_and_ragged import objects
from tfdist.records.wording import left_out, listed, placed
from tfdist.records.writing.roles import Asked, Roles, assign, looks_like_label, mentioned, named
from tfdist.records.writing.tables.arrow_texts import ArrowTexts, spooled
from tfdist.records.writing.tables.dates import dates_as_text, is_day_first
from tfdist.records.writing.tables.delimited import UNNAMED
from tfdist.records.writing.tables.infer import beside_decimal_commas, infer
from tfdist.records.writing.tables.packing import DROP, MASK, Packed, filled, parse_missing
from tfdist.records.writing.tables.table import (
    BOOLEAN,
    DATE,
    EMPTY,
    INTEGER,
    LISTS,
    NUMBER,
    NUMERIC,
    TEXT,
    Cells,
    Table,
    Texts,
    Values,
    Written,
    complaints_of,
    refuse,
)

# What tables number their rows with, as pandas writes them.
_INDEX_NAMES = ("", "id", "index", UNNAMED.lower(), "__index_level_0__")
# Letters of a text, as long as texts usually are.
_LETTERS = 64
# Kinds that are the names of classes when a label is written so.
_NAMES = {Written: (BOOLEAN, DATE), Values: (DATE,), Texts: (DATE,)}


def columns_of_table(table: Table, asked: Asked, *, last_is_label: bool) -> Columns:
    """Returns the records of a table.

    All numbers and truth values that are inputs are one input, "features", float32 [columns].
    Every other input is called as its column: dates are int64, seconds since 1970; text of few
    different values is categories, int64, numbered in the order of the sorted values of all rows;
    other text is strings; lists have variable length. With ``missing="mask"`` there is one more,
    "missing", uint8 [columns], 1 where a column had no value.

    Without one that is named, the label's column is the one called label, target, class or y, else
    the last; see ``roles``. Integers become int64 class ids, other numbers float32 targets, text
    the numbers of its sorted values, which are the class names. One label is called "label",
    several are called as their columns. The column that names the owner of each row is no input,
    nor is one that only numbers the rows.

    Args:
        last_is_label: whether the last column is the label where none is called so.

    Raises:
        DataError: rows that are not whole, values that are missing or not of their column's kind,
            no rows, or columns of which only the user can say what they are.
    """
    how = parse_missing(asked.missing)
    if not len(table.lines):
        raise refuse(table, table.bad, {})
    said = words_of(table, asked)
    index = index_columns(table, asked, last_is_label=last_is_label)
    names = [name for name in table.names if name not in index]
    roles = assign(table.place, "column", names, asked, last_is_label=last_is_label)
    cells = cells_of(table, roles, said)
    empty = [name for name in roles.inputs if cells[name].kind == EMPTY]
    cells = {name: column for name, column in cells.items() if name not in empty}
    inputs = [name for name in roles.inputs if name not in empty]
    if not inputs:
        raise DataError(
            f"{table.place} must have an input with values",
            received="none",
            mend="Fill one in, or leave fewer out",
        )
    was_missing = {name: column.missing for name, column in cells.items()}
    kept, notes, counts = _kept_rows(
        table, asked, how, cells, [n for n in cells if n not in inputs]
    )
    if kept is not None:
        cells = {name: taken(column, kept, table.store) for name, column in cells.items()}
    notes = [*table.notes, *notes]
    notes += [f"column '{name}' has no value in any row: it is left out" for name in empty]
    notes += [
        f"column '{name}' is left out as the number of the row: {spelt('inputs')} would keep it"
        for name, counts in index.items()
        if not counts
    ]
    for name in inputs:
        if cells[name].missing.any():
            whole, note = filled(name, cells[name], how)
            cells[name] = _stored(whole, table.store)
            notes.append(note)
    _check_label_lists(table.place, roles, cells)
    packed = Packed(table.place, store=None if table.store is None else Store())
    for name in inputs:
        packed.add_input(name, cells[name], said)
    if how == MASK:
        of_inputs = {name: was_missing[name] for name in inputs}
        packed.add_mask(of_inputs if kept is None else {n: m[kept] for n, m in of_inputs.items()})
    for name in roles.labels:
        packed.add_label(name, "label" if len(roles.labels) == 1 else name, cells[name])
    weights = {} if roles.weight is None else {roles.weight: cells[roles.weight].values}
    all_inputs = packed.all_inputs()
    try:
        columns = from_arrays(
            table.kind,
            all_inputs,
            packed.labels,
            weights,
            classes=packed.classes,
            columns=packed.columns,
        )
    except DataError as error:
        rows = range(len(table.lines)) if kept is None else kept
        where = f"{table.place}: "
        raise placed(error, lambda n: f"{table.unit} {table.line_of(rows[n])}", where) from None
    columns = replace(columns, schema=_with_orders(columns.schema, table, cells))
    details = {
        **packed.details,
        **dict.fromkeys(index, "it numbers the rows"),
        **dict.fromkeys(empty, "it is empty"),
    }
    roles = replace(roles, inputs=tuple(inputs), dropped=(*roles.dropped, *index, *empty))
    columns = replace(
        columns,
        roles=roles.listed(table.names, details),
        notes=(*columns.notes, *notes, *packed.notes, *notes_of(cells)),
        left_out=counts,
    )
    if roles.client is None:
        return columns
    owners = infer(table.columns[roles.client], is_text=True).values
    owners = owners if kept is None else owners[kept]
    return replace(columns, owners=objects([owner.strip() for owner in owners]))


def _with_orders(schema: Schema, table: Table, cells: Mapping[str, Cells]) -> Schema:
    """Returns the schema, whose dates tell how they are written where other rows may not."""

    def with_order(feature: Feature) -> Feature:
        is_alone = feature.role == "input" and feature.columns == (feature.name,)
        if not is_alone or cells[feature.name].kind != DATE:
            return feature
        column = table.columns[feature.name]
        if isinstance(column, Values):
            texts = {value for value in column.values if isinstance(value, str)}
        else:
            texts = column.texts
        return feature if texts is None else replace(feature, day_first=is_day_first(texts))

    return Schema(tuple(map(with_order, schema.features)))


def words_of(table: Table, asked: Asked) -> dict[str, tuple[str, ...]]:
    """Returns the columns that are "text", and "categories", whatever they look like."""
    return {
        role: named(table.place, "column", spelt(role), getattr(asked, role), table.names) or ()
        for role in ("text", "categories")
    }


def index_columns(table: Table, asked: Asked, *, last_is_label: bool) -> dict[str, bool]:
    """Returns the columns that number the rows, of which the user says nothing.

    Of each whether it counts them; else it has another whole number in each row, as ids are.
    """
    said = mentioned(table.place, "column", table.names, asked)
    may_be_label = last_is_label and asked.label is None
    may_be_label &= not any(map(looks_like_label, table.names))
    found = {}
    for name in table.names:
        if name.lower() in _INDEX_NAMES and name not in said:
            cells = infer(table.columns[name])
            is_whole = cells.kind == INTEGER and not cells.missing.any() and not cells.bad
            if not is_whole or len(np.unique(cells.values)) < len(cells):
                continue
            # An index of prices, say, is no numbering, least of all as the last column.
            counts = bool(np.ptp(cells.values) == len(cells) - 1)
            is_label = may_be_label and name.lower() == "index" and name == table.names[-1]
            if counts or not is_label:
                found[name] = counts
    return found


def cells_of(table: Table, roles: Roles, said: Mapping[str, Sequence[str]]) -> dict[str, Cells]:
    """Returns the columns that are used, each of its kind.

    Args:
        said: see ``words_of``.

    Raises:
        DataError: a label, weight or client without values, or weights that are no numbers.
    """
    cells = {}
    words = (*said["text"], *said["categories"])
    others = [name for name in (roles.weight, roles.client) if name is not None]
    for name in dict.fromkeys((*roles.inputs, *roles.labels, *others)):
        column = table.columns[name]
        try:
            cells[name] = found = infer(column, is_text=name in words)
        except DataError as error:
            raise DataError(
                f"column '{name}' of {table.place}: {error.rule}",
                received=error.received,
                mend=error.mend,
            ) from None
        if found.kind == NUMBER:
            cells[name] = found = _bad_beyond_float32(found)
        if name == roles.client and name not in roles.labels:
            cells[name] = replace(infer(column, is_text=True), missing=found.missing)
        elif name in roles.labels and found.kind in _NAMES.get(type(column), ()):
            as_written = infer(column, is_text=True)
            cells[name] = replace(as_written, missing=found.missing, bad=found.bad)
        elif name in roles.labels and found.kind == DATE:
            cells[name] = replace(found, kind=TEXT, values=objects(dates_as_text(found.values[:])))
        elif name not in (*roles.labels, *others):
            cells[name] = _stored(found, table.store)
    numbers = {name for name in (*roles.labels, roles.weight) if name in cells}
    numbers = {name for name in numbers if cells[name].kind == NUMBER}
    cells = beside_decimal_commas(cells, table.columns)
    in_doubt = sorted(name for name in numbers if cells[name].kind == TEXT)
    if in_doubt:
        raise DataError(
            f"column '{in_doubt[0]}' of {table.place} must say what its points are",
            received="numbers such as 1.000, beside decimal commas in other columns",
            mend="Take out what marks thousands, or write decimal commas there, too",
        )
    for name in (*roles.labels, *others):
        if cells[name].kind == EMPTY or cells[name].missing.all():
            raise DataError(
                f"column '{name}' of {table.place} must have values",
                received="none",
                mend="Fill it in, or name another",
            )
    if roles.weight is not None:
        weights = cells[roles.weight]
        if weights.kind not in NUMERIC:
            raise DataError(
                f"the sample weights in column '{roles.weight}' of {table.place} must be numbers",
                received=weights.kind,
                mend=f"Name another with {spelt('weight', 'NAME')}, or leave it out with "
                f"{spelt('drop', roles.weight)}",
            )
        is_negative = ~weights.missing & (weights.values < 0)
        cells[roles.weight] = _bad_where(is_negative, "a weight below 0", weights)
    return cells


def _check_label_lists(place: str, roles: Roles, cells: Mapping[str, Cells]) -> None:
    """Raises DataError for several labels a row, as of tags, in lists of unequal lengths.

    What is padded when they are read would count as class 0. Beside an input of lists they may be
    a label of each entry, or a sequence of their own, which are read so.
    """
    if any(cells[name].kind == LISTS for name in roles.inputs if name in cells):
        return
    for name in roles.labels:
        values = cells[name].values if cells[name].kind == LISTS else ()
        lengths = {len(value) for value in values}
        if len(lengths) > 1 and not any(np.ndim(entry) for value in values for entry in value):
            raise DataError(
                f"the label '{name}' of {place} must be one value in each row, or as many in all",
                received=f"lists of {min(lengths)} to {max(lengths)} values, where what is missing "
                "would be read as 0",
                mend="Give one label a row, or a list of 0 and 1 for each class",
            )


def _bad_beyond_float32(cells: Cells) -> Cells:
    """Returns the numbers, of which those are bad that would be infinite as what is written."""
    with np.errstate(invalid="ignore"):
        is_beyond = ~cells.missing & (np.abs(cells.values) > np.finfo(np.float32).max)
    return _bad_where(is_beyond, "beyond float32", cells)


def _bad_where(is_bad: np.ndarray, words: str, cells: Cells) -> Cells:
    bad = {row: f"{cells.values[row]:g}, {words}" for row in np.flatnonzero(is_bad)}
    return replace(cells, bad={**bad, **cells.bad}) if bad else cells


def _kept_rows(
    table: Table,
    asked: Asked,
    how: str | float | None,
    cells: Mapping[str, Cells],
    needed: Sequence[str],
) -> tuple[np.ndarray | None, list[str], dict[str, int]]:
    """Returns the rows that are kept, int64 [n], and sentences and counts of the others.

    Instead of all rows, None.

    Args:
        needed: the columns of which no value can be made up.

    Raises:
        DataError: rows that are not as they must be, and of which the user has said nothing.
    """
    complaints = complaints_of(table, cells)
    is_kept = np.ones(len(table.lines), bool)
    notes, counts = [], {}
    if asked.skip_bad and complaints:
        for column in cells.values():
            is_kept[list(column.bad)] = False
        lines = list(dict.fromkeys(complaint.line for complaint in complaints))
        counts["bad row"] = len(lines)
        first = f"{table.place} {table.unit} {listed(map(str, lines), 20)}"
        notes.append(left_out(len(lines), "row", "as bad", [first]))
        complaints = []
    missing = {n: rows for n, c in cells.items() if (rows := c.missing & is_kept).any()}
    if complaints or (how is None and missing):
        told = missing if how is None else {}
        raise refuse(table, complaints, {n: np.flatnonzero(rows) for n, rows in told.items()})
    dropped = [name for name in missing if how == DROP or name in needed]
    if dropped:
        gone = np.any([missing[name] for name in dropped], axis=0)
        is_kept &= ~gone
        of_columns = [f"{int(missing[name].sum()):,} in '{name}'" for name in dropped]
        count = int(gone.sum())
        counts["row with a missing value"] = count
        notes.append(left_out(count, "row", "for missing values", of_columns, most=len(of_columns)))
    if not is_kept.any():
        raise DataError(
            f"{table.place} must have a row without missing or bad values",
            received="none",
            mend="Fill in what is missing, or leave out the columns that lack it: "
            f"{spelt('drop', 'NAME')}",
        )
    return None if is_kept.all() else np.flatnonzero(is_kept), notes, counts


def taken(cells: Cells, rows: np.ndarray, store: Store | None = None) -> Cells:
    """Returns some rows of a column, int64 [n]; of one in a store those that lie there, too."""
    values = cells.values
    if isinstance(values, ArrowTexts):
        values = values.taken(rows)
    elif isinstance(values, LargeArray):
        values = store.rows((values[some] for _, some in chunks(rows)), values.dtype)
    else:
        values = values[rows]
    return replace(cells, values=values, missing=cells.missing[rows], bad={})


def _stored(cells: Cells, store: Store | None) -> Cells:
    """Returns the column, whose values lie in the store, unless there is none or they are lists."""
    values = cells.values
    if store is None or not isinstance(values, np.ndarray):
        return cells
    if cells.kind == TEXT:
        # Some at a time, as one array of pyarrow has up to 2 GB.
        values = spooled((values[rows] for rows in slices(len(values), _LETTERS)), store)
    elif values.dtype == np.int64:
        least, most = values.min(), values.max()
        limits = map(np.iinfo, (np.int8, np.int16, np.int32, np.int64))
        narrow = next(each.dtype for each in limits if each.min <= least and most <= each.max)
        values = store.rows([values], narrow).astype(np.int64)
    elif values.dtype != object:
        values = store.rows([values], values.dtype)
    return replace(cells, values=values)


def notes_of(cells: Mapping[str, Cells]) -> Iterator[str]:
    """Yields what is to be said of the columns; columns of the same are said together."""
    together: dict[str, list[str]] = {}
    for name, column in cells.items():
        for note in column.notes:
            together.setdefault(note, []).append(f"'{name}'")
    for note, names in together.items():
        yield f"column {names[0]} {note}" if len(names) == 1 else f"{', '.join(names)}: each {note}"
