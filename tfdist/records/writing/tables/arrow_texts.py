"""Texts of a table that pyarrow holds: parsed in all cores, numbers without objects of Python."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

_BLOCK_BYTES = 1 << 24


class ArrowTexts(Sequence[str]):
    """The texts of a column, as pyarrow's array of them."""

    def __init__(self, texts: Any):
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, row: Any) -> Any:
        return self._texts[row].as_py()

    def __iter__(self) -> Iterator[str]:
        """Yields them; what stands in many rows is one object."""
        found = self._texts.dictionary_encode()
        return iter(np.array(found.dictionary.to_pylist(), object)[np.asarray(found.indices)])

    def numbers(self, missing: frozenset[str]) -> tuple[np.ndarray, np.ndarray, bool] | None:
        """Returns what they are as numbers, where all that are not ``missing`` are one.

        A number is what it is to Python, but written without a mark ("_") or letters of other
        alphabets: whoever gets None has to look at each.

        Returns:
            int64 [rows] where all are written as whole numbers that fit, else float64 [rows], 0
            where one is missing; bool [rows], where one is missing; and whether one begins with a
            0 that a number loses. None for anything else.
        """
        import pyarrow
        from pyarrow import compute

        stripped = compute.ascii_trim_whitespace(self._texts)
        gone = compute.is_in(compute.ascii_lower(stripped), pyarrow.array(sorted(missing)))
        none = pyarrow.scalar(None, pyarrow.string())
        present = compute.if_else(gone, none, stripped) if compute.any(gone).as_py() else stripped
        try:
            values = compute.cast(present, pyarrow.float64())
        except pyarrow.ArrowInvalid:
            return None
        there = np.asarray(values.drop_null())
        if not len(there) or np.isnan(there).any():
            return None
        with np.errstate(invalid="ignore"):
            is_whole = bool((there == np.floor(there)).all())
        codes = compute.match_substring_regex(present, "^[+-]?0[0-9]")
        has_code = bool(compute.any(codes).as_py())
        if is_whole:
            try:
                values = compute.cast(present, pyarrow.int64())
            except pyarrow.ArrowInvalid:
                if not compute.any(compute.match_substring_regex(present, "[.eEn]")).as_py():
                    return None  # Such as +5, or beyond int64.
        return np.array(values.fill_null(0)), np.array(gone), has_code


def parse_plain(text: str, separator: str, width: int) -> list[ArrowTexts] | None:
    """Returns the columns of the lines below the first one.

    Returns:
        None for what the csv module has to read: without pyarrow, rows that are not whole or not a
        line each, and quotes that are no value's first and last letter.
    """
    try:
        import pyarrow
        from pyarrow import csv
    except ImportError:
        return None
    has_quotes = '"' in text
    if text.count("\r") != text.count("\r\n") or (has_quotes and not _are_whole(text, separator)):
        return None
    names = [str(column) for column in range(width)]
    try:
        table = csv.read_csv(
            pyarrow.BufferReader(text.encode()),
            csv.ReadOptions(column_names=names, skip_rows=1, block_size=_BLOCK_BYTES),
            csv.ParseOptions(delimiter=separator, quote_char='"' if has_quotes else False),
            csv.ConvertOptions(
                column_types=dict.fromkeys(names, pyarrow.string()), check_utf8=False
            ),
        )
        columns = [ArrowTexts(column.combine_chunks()) for column in table.columns]
    except (pyarrow.ArrowInvalid, ValueError):  # As of a separator of no ASCII, or above 2 GB.
        return None
    is_whole = table.num_rows == text.count("\n") - text.endswith("\n")
    return columns if table.num_rows and is_whole else None


def _are_whole(text: str, separator: str) -> bool:
    """Whether each quote belongs to a value that is in quotes, on one line."""
    end = re.escape(separator)
    quoted = rf'(?m:^|(?<={end}))"(?:[^"\r\n]|"")*"(?={end}|[\r\n]|\Z)'
    return '"' not in re.sub(quoted, "", text)
