"""Rows of values between separators: .csv and .tsv files."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tfdist.errors import DataError
from tfdist.records.format.large_arrays import Store
from tfdist.records.writing.roles import looks_like_label
from tfdist.records.writing.tables.arrow_texts import Spool, parse_plain
from tfdist.records.writing.tables.table import Complaint, Table, Written
from tfdist.records.writing.text_files import is_large, read_rows, read_text

#: How pandas' first column is called where it has no name.
UNNAMED = "Unnamed: 0"
_SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
_ROWS_LOOKED_AT = 200
_START = 1 << 20
# A number with a comma that can mark no thousands.
_WITH_COMMA = r"[+-]?(?:0,\d+|\d*,\d{1,2}|\d*,\d{4,})(?:e[+-]?\d+)?"
# What Excel writes above the header.
_SAID = re.compile(r'"?sep=(.)"?\r?\n', re.IGNORECASE)
_LONGEST_BLOCK = 1 << 30
# A text may be longer than the 131,072 letters that the csv module takes.
_LONGEST_VALUE = (1 << 31) - 1


class _UnreadError(DataError):
    """A file, or a block of one, that the csv module does not read."""


def read_delimited(path: Path, kind: str, *, in_file: bool = False) -> Table:
    """Returns the rows of a file with a header, whatever separates their values.

    The separator is the one of comma, semicolon, tab and bar that gives the header several names
    and most rows as many values. Between semicolons 1,5 is a number; between tabs and bars where a
    value is written so that no comma can mark thousands.

    Args:
        in_file: whether the values of a large file may stay in one, see ``Table.store``.

    Raises:
        DataError: no table, a header that does not name each column once, or no rows.
    """
    with _long_values():
        if in_file and is_large(path):
            # Beside quotes within a text, nobody can tell from a block where a row ends.
            with contextlib.suppress(_UnreadError):
                return _read(path, kind, *read_rows(path, has_quotes=True), in_file=True)
        text, notes = read_text(path)
        return _read(path, kind, iter([text]), notes, in_file=False)


def _read(
    path: Path, kind: str, blocks: Iterator[str], notes: tuple[str, ...], *, in_file: bool
) -> Table:
    """Returns the rows of text in blocks: of one, unless they are ``in_file``."""
    start = next(blocks, "")
    said = _SAID.match(start)
    line = 0
    if said is not None:
        start, line = start[said.end() :] or next(blocks, ""), 1
    _refuse_comments(path, kind, start)
    separator = _find_separator(start, kind) if said is None else said[1]
    usual = "\t" if kind == "tsv" else ","
    if separator != usual:
        name = _SEPARATORS.get(separator, repr(separator))
        notes = (*notes, f"the values of {path} are separated by {name}s")
    skips_spaces = _skips_spaces(start, separator)
    first, _ = next(_csv_rows(path, start, separator, line, skips_spaces=skips_spaces), ([], line))
    header = _check_header(path, first)
    decimal_comma = separator == ";"
    store = Store() if in_file else None
    spool = None if store is None else Spool(store)
    bad: list[Complaint] = []
    among: set[str] = set()
    looked = 0
    for number, text in enumerate(itertools.chain([start], blocks)):
        has_header = not number
        texts, lines, wrong, line = _columns_of(
            path, text, separator, first, line, has_header, skips_spaces=skips_spaces
        )
        if looked < _ROWS_LOOKED_AT and len(header) > 1:
            for name, column in zip(header, texts, strict=True):
                among |= {name} & set(map(str.strip, column[: _ROWS_LOOKED_AT - looked]))
            looked += len(lines)
        if spool is not None:
            if len(text) > _LONGEST_BLOCK:
                raise _UnreadError(
                    f"the rows of {path} must end with a line feed",
                    received=f"{len(text):,} letters without one",
                    mend="Save it with such line ends",
                )
            spool.add(zip(header, texts, strict=True), lines)
        bad += wrong
        decimal_comma |= separator not in ",;" and _has_commas(text, separator)
    columns = dict(zip(header, texts, strict=True))
    if spool is not None:
        columns, lines = spool.all()
    if not len(lines) and not bad:
        raise DataError(
            f"{path} must have rows below its header",
            received="none",
            mend="Write rows below the names",
        )
    return Table(
        kind=kind,
        place=str(path),
        unit="line",
        columns={
            name: Written(texts, decimal_comma=decimal_comma) for name, texts in columns.items()
        },
        lines=lines,
        bad=tuple(bad),
        notes=(*notes, *_notes_of_header(path, header, among)),
        store=store,
    )


def _columns_of(
    path: Path,
    text: str,
    separator: str,
    first: list[str],
    line: int,
    has_header: bool,
    *,
    skips_spaces: bool,
) -> tuple[Sequence[Sequence[str]], np.ndarray, list[Complaint], int]:
    """Returns the columns of a text, the line of each row, other rows, and how many lines are over.

    Args:
        first: the header, as it is written.
        line: how many lines are before the text.
        has_header: whether it begins with the header.
        skips_spaces: whether spaces behind a separator count nothing.
    """
    width = len(first)
    is_repeated = width > 1 and _is_repeated(first, text, separator, has_header=has_header)
    is_plain = not (is_repeated or skips_spaces)
    plain = parse_plain(text, separator, width, int(has_header)) if is_plain else None
    if plain is not None:
        line += has_header
        lines = np.arange(len(plain[0]), dtype=np.int64) + (line + 1)
        return plain, lines, [], line + len(lines)
    names, rows, lines, bad, end = _names(first), [], [], [], line
    parsed = _csv_rows(path, text, separator, line, skips_spaces=skips_spaces)
    for number, (row, end) in enumerate(parsed):
        if number < has_header:
            continue
        if is_repeated and _names(row) == names:
            bad.append(Complaint(end, "the header", "have values, not the header again"))
        elif len(row) == width:
            rows.append(row)
            lines.append(end)
        elif row:
            bad.append(Complaint(end, str(len(row)), f"have {width} values"))
    # Turned here once, so that each value is kept once.
    columns = list(zip(*rows, strict=True)) if rows else [()] * width
    return columns, np.array(lines, np.int64), bad, end


def _csv_rows(
    path: Path, text: str, separator: str, line: int, *, skips_spaces: bool
) -> Iterator[tuple[list[str], int]]:
    """Yields the rows of a text behind so many lines, and the line that each one ends in."""
    reader = csv.reader(
        io.StringIO(text, newline=""),
        strict=True,
        delimiter=separator,
        skipinitialspace=skips_spaces,
    )
    end = line
    try:
        for row in reader:
            end = reader.line_num + line
            yield row, end
    except csv.Error as error:
        name = _SEPARATORS.get(separator, repr(separator))
        at, why = reader.line_num + line, str(error)
        if "unexpected end" in why:  # Of a value that began in the row behind the last one.
            why, at = "a quote that nothing closes, in the row that begins", end + 1
        raise _UnreadError(
            f"{path} must be a {name}-separated table",
            received=f"an error: {why} in line {at}",
            mend="Mend that line; within a value in quotes, a quote is written twice",
        ) from None


def _has_commas(text: str, separator: str) -> bool:
    end = re.escape(separator)
    return re.search(rf'(?m)(?:^|{end})[ "]*{_WITH_COMMA}[ "]*(?:{end}|\r?$)', text) is not None


def _names(header: Sequence[str]) -> list[str]:
    return [name.strip().removeprefix("\ufeff").strip() for name in header]


def _is_repeated(header: Sequence[str], text: str, separator: str, *, has_header: bool) -> bool:
    """Whether the header stands among the rows once more, as where files were joined.

    A column of words alone may have its own name among them.
    """
    names = _names(header)
    text = text if has_header else f"\n{text}"
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


def _notes_of_header(path: Path, names: list[str], among: set[str]) -> list[str]:
    """Returns what is to be said of names that may be the values of a first row.

    Args:
        among: the names that stand among the first values of their columns, too.
    """
    odd = [name for name in names if _is_number(name)]
    numbers = sorted(int(name) for name in odd if name.isdecimal())
    if numbers and len(numbers) == len(odd):
        are_years = numbers[0] >= 1900 and numbers[-1] <= 2100
        counts = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        if are_years or (counts and (len(numbers) > 1 or numbers == [0])):
            odd = []
    return [
        f"the first line of {path} is taken for the names of its columns, one of which is {name}"
        for name in (*odd, *(n for n in names if n in among and not looks_like_label(n)))[:1]
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
            share = sum(len(row) == width for row in rows) / len(rows)
            # Commas of names stand as in prose, unless those of all values do so, too.
            is_spaced = separator == "," and _are_spaced(rows[:1])
            is_prose = is_spaced and not _are_spaced(rows[1:])
            scores[separator] = (share, not is_prose, width, not is_spaced)
    return max(scores, key=scores.__getitem__, default=order[0])


def _are_spaced(rows: Sequence[Sequence[str]]) -> bool:
    return all(value.startswith(" ") for row in rows for value in row[1:])


def _skips_spaces(text: str, separator: str) -> bool:
    """Whether quotes come behind a space, and can be read so: then they belong to no value."""
    if re.match(rf'[^\n]*{re.escape(separator)} +"', text) is None:
        return False
    start = io.StringIO(text[:_START], newline="")
    rows = csv.reader(start, strict=True, delimiter=separator, skipinitialspace=True)
    try:
        for _ in itertools.islice(rows, _ROWS_LOOKED_AT):
            pass
    except csv.Error as error:
        return "unexpected end" in str(error)  # The text is cut there, or told later.
    return True


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
