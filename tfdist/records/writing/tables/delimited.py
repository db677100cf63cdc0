"""Rows of values between separators: .csv and .tsv files."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from tfdist.errors import DataError
from tfdist.records.writing.tables.arrow_texts import parse_plain
from tfdist.records.writing.tables.table import Complaint, Table, Written
from tfdist.records.writing.text_files import read_text

#: How pandas' first column is called where it has no name.
UNNAMED = "Unnamed: 0"
_SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
_ROWS_LOOKED_AT = 200
_START = 1 << 20
# A number with a comma that can mark no thousands.
_WITH_COMMA = r"[+-]?(?:0,\d+|\d*,\d{1,2}|\d*,\d{4,})(?:e[+-]?\d+)?"
# What Excel writes above the header.
_SAID = re.compile(r'"?sep=(.)"?\r?\n', re.IGNORECASE)
# A text may be longer than the 131,072 letters that the csv module takes.
_LONGEST_VALUE = (1 << 31) - 1


def read_delimited(path: Path, kind: str) -> Table:
    """Returns the rows of a file with a header, whatever separates their values.

    The separator is the one of comma, semicolon, tab and bar that gives the header several names
    and most rows as many values. Between semicolons 1,5 is a number; between tabs and bars where a
    value is written so that no comma can mark thousands.

    Raises:
        DataError: no table, a header that does not name each column once, or no rows.
    """
    text, notes = read_text(path)
    said = _SAID.match(text)
    start = 0 if said is None else said.end()
    _refuse_comments(path, kind, text[start:])
    separator = _find_separator(text[start:], kind) if said is None else said[1]
    usual = "\t" if kind == "tsv" else ","
    if separator != usual:
        name = _SEPARATORS.get(separator, repr(separator))
        notes = (*notes, f"the values of {path} are separated by {name}s")
    with _long_values():
        return _read(path, kind, text[start:], separator, int(start > 0), notes)


def _read(
    path: Path, kind: str, text: str, separator: str, lines_before: int, notes: tuple[str, ...]
) -> Table:
    rows: list[list[str]] = []
    lines: list[int] = []
    bad: list[Complaint] = []
    line = lines_before  # Where the last whole row ends.
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=separator)
    try:
        first = next(reader, [])
        line = reader.line_num + lines_before
        header = _check_header(path, first)
        width = len(header)
        notes = (*notes, *_notes_of_header(path, header))
        is_repeated = width > 1 and _is_repeated(first, text, separator)
        plain = None if is_repeated else parse_plain(text, separator, width)
        names = _names(first)
        for row in reader if plain is None else ():
            line = reader.line_num + lines_before
            if is_repeated and _names(row) == names:
                bad.append(Complaint(line, "the header", "have values, not the header again"))
            elif len(row) == width:
                rows.append(row)
                lines.append(line)
            elif row:
                bad.append(Complaint(line, str(len(row)), f"have {width} values"))
    except csv.Error as error:
        name, at = _SEPARATORS.get(separator, repr(separator)), reader.line_num + lines_before
        if "unexpected end" in str(error):  # Of a value that began in the row behind the last one.
            error, at = "a quote that nothing closes, in the row that begins", line + 1
        raise DataError(
            f"{path} must be a {name}-separated table",
            received=f"an error: {error} in line {at}",
            mend="Mend that line; within a value in quotes, a quote is written twice",
        ) from None
    if plain is None and not rows and not bad:
        raise DataError(
            f"{path} must have rows below its header",
            received="none",
            mend="Write rows below the names",
        )
    if plain is not None:
        by_column: Iterable[Sequence[str]] = plain
        lines = list(range(2 + lines_before, 2 + lines_before + len(plain[0])))
    else:  # Turned here once, so that each value is kept once.
        by_column = zip(*rows, strict=True) if rows else [()] * width
    decimal_comma = separator == ";" or (separator != "," and _has_commas(text, separator))
    return Table(
        kind=kind,
        place=str(path),
        unit="line",
        columns={
            name: Written(texts, decimal_comma=decimal_comma)
            for name, texts in zip(header, by_column, strict=True)
        },
        lines=np.array(lines, np.int64),
        bad=tuple(bad),
        notes=notes,
    )


def _has_commas(text: str, separator: str) -> bool:
    end = re.escape(separator)
    return re.search(rf'(?m)(?:^|{end})[ "]*{_WITH_COMMA}[ "]*(?:{end}|\r?$)', text) is not None


def _names(header: Sequence[str]) -> list[str]:
    return [name.strip().removeprefix("\ufeff").strip() for name in header]


def _is_repeated(header: Sequence[str], text: str, separator: str) -> bool:
    """Whether the header stands among the rows once more, as where files were joined.

    A column of words alone may have its own name among them.
    """
    names = _names(header)
    if text.find(max(names, key=len), text.find("\n") + 1) < 0:
        return False
    again = re.escape(separator).join(rf'[ \t]*"?{re.escape(name)}"?[ \t]*' for name in names)
    return re.search(rf"\n\ufeff?{again}(?=\r?\n|\Z)", text) is not None


def _refuse_comments(path: Path, kind: str, text: str) -> None:
    """Raises DataError for lines above the header that begin with "#", as a name may."""
    if not text.startswith("#"):
        return
    lines = text[:_START].splitlines(keepends=True)
    comments = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
    rest = "".join(lines[len(comments) :])
    separator = _find_separator(rest, kind)
    first, header = (next(_rows_of_start(part, separator), []) for part in (comments[0], rest))
    if header and len(first) != len(header):  # Rows may begin so, too.
        raise DataError(
            f"the first line of {path} must name each column",
            received=f"a comment, {comments[0].strip():.40}",
            mend=f"Remove the lines above the names that begin with #, here {len(comments)}",
        )


def _check_header(path: Path, header: list[str]) -> list[str]:
    names = [name.strip() for name in header]
    if len(names) > 1 and not names[0]:
        names[0] = UNNAMED
    if not names or "" in names or len(set(names)) != len(names):
        raise DataError(
            f"the first line of {path} must name each column, each once",
            received=", ".join(names) or "an empty line",
            mend="Write a name above each column, all of them different",
        )
    numbers = [name for name in names if name != UNNAMED]
    # pandas counts columns that have no names.
    if all(map(_is_number, numbers)) and numbers != list(map(str, range(len(numbers)))):
        raise DataError(
            f"the first line of {path} must name each column",
            received=f"numbers alone: {', '.join(names):.60}",
            mend="Write names above the rows",
        )
    return names


def _notes_of_header(path: Path, names: list[str]) -> list[str]:
    """Returns what is to be said of names that may be the values of a first row."""
    odd = [name for name in names if _is_number(name)]
    numbers = sorted(int(name) for name in odd if name.isdecimal())
    if len(numbers) == len(odd) and numbers:
        are_years = numbers[0] >= 1900 and numbers[-1] <= 2100
        if are_years or numbers == list(range(numbers[0], numbers[0] + len(numbers))):
            return []
    return [
        f"the first line of {path} is taken for the names of its columns, one of which is {name}"
        for name in odd[:1]
    ]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _find_separator(text: str, kind: str) -> str:
    """Returns what separates the values; the kind's own where nothing does."""
    order = ["\t", ",", ";", "|"] if kind == "tsv" else [",", ";", "\t", "|"]
    scores = {}
    for separator in order:
        rows = list(itertools.islice(_rows_of_start(text, separator), _ROWS_LOOKED_AT))
        width = len(rows[0]) if rows else 0
        if width > 1:
            scores[separator] = (sum(len(row) == width for row in rows) / len(rows), width)
    return max(scores, key=scores.__getitem__, default=order[0])


def _rows_of_start(text: str, separator: str) -> Iterator[list[str]]:
    start = text if len(text) <= _START else text[: text.rfind("\n", 0, _START) + 1]
    reader = csv.reader(io.StringIO(start, newline=""), delimiter=separator)
    with contextlib.suppress(csv.Error):  # Told when the file is read with the right separator.
        for row in reader:
            if row:
                yield row


@contextlib.contextmanager
def _long_values() -> Iterator[None]:
    limit = csv.field_size_limit(_LONGEST_VALUE)
    try:
        yield
    finally:
        csv.field_size_limit(limit)
