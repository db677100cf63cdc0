"""Texts of a table that pyarrow holds: parsed in all cores, numbers without objects of Python.

Those of a large table lie in a temporary file, and are read some rows at a time.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tfdist.records.format.large_arrays import LargeArray, LargeTexts, Store

_BLOCK_BYTES = 1 << 24
_FIRST_ROWS = 1000


class ArrowTexts(Sequence[str]):
    """The texts of a column.

    Args:
        blocks: pyarrow's arrays of them, one after the other: a list, or those of a ``Spool``.
        lengths: rows of each block.
        chosen: int64 [n], the numbers of the rows that are meant, in their order; None for all.
        blank: bool [n], which of these are ""; None for none but those that are.

    Attributes:
        in_file: whether the blocks are read from a file whenever they are asked for.
    """

    def __init__(
        self,
        blocks: Sequence[Any],
        lengths: Sequence[int],
        chosen: np.ndarray | None = None,
        blank: np.ndarray | None = None,
    ):
        self.in_file = isinstance(blocks, _Blocks)
        self._blocks, self._ends = blocks, np.cumsum([0, *lengths])
        self._chosen, self._blank = chosen, blank

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._chosen is None else len(self._chosen)

    def __getitem__(self, row: Any) -> Any:
        """Returns a text, or, given int64 [n] in their order or a slice, those rows as objects."""
        if isinstance(row, slice):
            row = np.arange(*row.indices(len(self)))
        if isinstance(row, np.ndarray):
            return np.fromiter(self.taken(row), object, len(row))
        return next(iter(self.taken(np.array([row]))))

    def __iter__(self) -> Iterator[str]:
        return itertools.chain.from_iterable(self.parts())

    def parts(self) -> Iterator[list[str]]:
        """Yields them some at a time; what stands in many rows of a part is one object."""
        for texts in self.arrays():
            found = texts.dictionary_encode()
            yield np.array(found.dictionary.to_pylist(), object)[np.asarray(found.indices)].tolist()

    def taken(self, rows: np.ndarray) -> ArrowTexts:
        """Returns some rows, int64 [n] in their order."""
        chosen = rows if self._chosen is None else self._chosen[rows]
        blank = None if self._blank is None else self._blank[rows]
        return ArrowTexts(self._blocks, np.diff(self._ends), chosen, blank)

    def blanked(self, blank: np.ndarray) -> ArrowTexts:
        """Returns the rows, of which those that are True in ``blank``, bool [rows], are ""."""
        return ArrowTexts(self._blocks, np.diff(self._ends), self._chosen, blank)

    def arrays(self) -> Iterator[Any]:
        """Yields pyarrow's arrays of the rows that are meant; only what has some is read."""
        import pyarrow
        from pyarrow import compute

        done = 0
        for number, (start, end) in enumerate(itertools.pairwise(self._ends.tolist())):
            rows = slice(start, end)
            if self._chosen is not None:
                rows = slice(*np.searchsorted(self._chosen, [start, end]).tolist())
            if rows.start == rows.stop:
                continue
            texts = self._blocks[number]
            if self._chosen is not None:
                texts = texts.take(pyarrow.array(self._chosen[rows] - start))
            if self._blank is not None:
                blank = pyarrow.array(self._blank[done : done + len(texts)])
                texts = compute.if_else(blank, "", texts)
            done += len(texts)
            yield texts

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

        # Pages of zeros that nobody has written to take no memory.
        values, gone = np.zeros(len(self), np.int64), np.zeros(len(self), bool)
        has_code, is_whole, has_points, start = False, True, False, 0
        for texts in self.arrays():
            rows = slice(start, start + len(texts))
            present, found = _present(texts, missing), None
            if cast(present[:_FIRST_ROWS], pyarrow.float64()) is None:
                return None  # Of all rows it takes long to say so.
            points = _any_like(present, "[.eEn]")
            # As int64, 0x1F is a number, and -0 loses its sign.
            if values.dtype == np.int64 and not points and not _any_like(present, "[xX]|^-0+$"):
                found = cast(present, pyarrow.int64())
            if found is None:
                found = cast(present, pyarrow.float64())
                there = None if found is None else np.asarray(found.drop_null())
                if there is None or np.isnan(there).any():
                    return None
                if values.dtype == np.int64:
                    values = values.astype(np.float64) if start else np.zeros(len(self))
                with np.errstate(invalid="ignore"):
                    is_whole &= bool((there == np.floor(there)).all())
                has_points |= is_whole and points
            values[rows] = np.asarray(found.fill_null(0))
            if present.null_count:
                gone[rows] = np.asarray(present.is_null())
            has_code |= _any_like(present, "^[+-]?0[0-9]")
            start = rows.stop
        if gone.all() or (values.dtype == np.float64 and is_whole and not has_points):
            return None  # Such as +5, or beyond int64.
        return values, gone, has_code

    def put_in(self, store: Store) -> LargeTexts:
        """Returns the rows as such of which any can be read at once."""
        return store.texts(lambda: map(_bytes_of, self.arrays()))


def _present(texts: Any, missing: frozenset[str]) -> Any:
    """Returns pyarrow's array of texts without space around them, null where one is missing."""
    import pyarrow
    from pyarrow import compute

    stripped = compute.ascii_trim_whitespace(texts)
    gone = compute.is_in(compute.ascii_lower(stripped), pyarrow.array(sorted(missing)))
    none = pyarrow.scalar(None, pyarrow.string())
    return compute.if_else(gone, none, stripped) if compute.any(gone).as_py() else stripped


def _any_like(present: Any, pattern: str) -> bool:
    from pyarrow import compute

    return bool(compute.any(compute.match_substring_regex(present, pattern)).as_py())


def cast(present: Any, kind: Any) -> Any:
    """Returns pyarrow's array as numbers; None where a value is none of the kind."""
    import pyarrow
    from pyarrow import compute

    try:
        return compute.cast(present, kind)
    except pyarrow.ArrowInvalid:
        return None


def _bytes_of(texts: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes of pyarrow's array of texts, uint8 [n], and the edges of each there."""
    _, offsets, data = texts.buffers()
    edges = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1]
    return np.frombuffer(b"" if data is None else data, np.uint8)[edges[0] : edges[-1]], edges


class Spool:
    """The columns of a large table in a file, some rows at a time."""

    def __init__(self, store: Store):
        self._store = store
        self._lengths: list[int] = []
        self._lines: list[LargeArray] = []
        self._columns: dict[str, _Blocks] = {}

    def add(self, columns: Iterable[tuple[str, Sequence[str]]], lines: np.ndarray) -> None:
        """Adds some rows, by column, and the lines that they are in, int64 [rows].

        In rows that come without a column, each of its texts is "null".
        """
        if len(lines):
            self._lengths.append(len(lines))
            self._lines.append(self._store.rows([lines], np.int64))
        for name, texts in columns:
            blocks = self._columns.setdefault(name, _Blocks(self._store, self._lengths))
            if len(lines):
                blocks.put(texts)

    def all(self) -> tuple[dict[str, ArrowTexts], np.ndarray | LargeArray]:
        """Returns all columns, and lines, when all rows have been added."""
        texts = {name: ArrowTexts(own, self._lengths) for name, own in self._columns.items()}
        return texts, LargeArray(self._lines) if self._lines else np.empty(0, np.int64)


class _Blocks(Sequence[Any]):
    """The texts of a column as pyarrow's arrays, each of which is read when it is asked for.

    Args:
        lengths: how many texts each has.
    """

    def __init__(self, store: Store, lengths: Sequence[int]):
        self._store, self._lengths = store, lengths
        self._places: dict[int, tuple[int, int]] = {}

    def put(self, texts: Any) -> None:
        """Writes the last block, given its texts or pyarrow's array of them."""
        import pyarrow

        array = texts
        if isinstance(texts, ArrowTexts):
            (array,) = texts.arrays()
        elif not isinstance(texts, pyarrow.Array):
            array = pyarrow.array(texts, pyarrow.string())
        data, edges = _bytes_of(array)
        place = self._store.put(edges - edges[0])
        self._store.put(data)
        self._places[len(self) - 1] = place, len(data)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, number: Any) -> Any:
        import pyarrow

        rows = self._lengths[number]
        if number not in self._places:
            return pyarrow.repeat("null", rows)
        place, num_bytes = self._places[number]
        edges = 4 * (rows + 1)
        found = pyarrow.py_buffer(self._store.get(place, edges + num_bytes))
        return pyarrow.StringArray.from_buffers(rows, found[:edges], found[edges:])


def spooled(parts: Iterable[Any], store: Store) -> ArrowTexts:
    """Returns the texts of a column in a file, given some at a time, as ``_Blocks`` takes them."""
    blocks = _Blocks(store, lengths := [])
    for texts in parts:
        lengths.append(len(texts))
        blocks.put(texts)
    return ArrowTexts(blocks, lengths)


def parts_of(values: np.ndarray | ArrowTexts) -> Iterable[list[Any]]:
    """Returns values some at a time."""
    return values.parts() if isinstance(values, ArrowTexts) else [values.tolist()]


def parse_plain(text: str, separator: str, width: int, skip_rows: int) -> list[ArrowTexts] | None:
    """Returns the columns of the lines behind the first ``skip_rows`` ones.

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
    if text.startswith("\ufeff") or text.count("\r") != text.count("\r\n"):
        return None  # Pyarrow takes the mark away.
    if has_quotes and not _are_whole(text, separator):
        return None
    names = [str(column) for column in range(width)]
    try:
        table = csv.read_csv(
            pyarrow.BufferReader(text.encode()),
            csv.ReadOptions(column_names=names, skip_rows=skip_rows, block_size=_BLOCK_BYTES),
            csv.ParseOptions(delimiter=separator, quote_char='"' if has_quotes else False),
            csv.ConvertOptions(
                column_types=dict.fromkeys(names, pyarrow.string()), check_utf8=False
            ),
        )
        columns = [column.combine_chunks() for column in table.columns]
        found = [ArrowTexts([column], [len(column)]) for column in columns]
    except (pyarrow.ArrowInvalid, ValueError):  # As of a separator of no ASCII, or above 2 GB.
        return None
    num_rows = text.count("\n") + (not text.endswith("\n")) - skip_rows
    return found if table.num_rows and table.num_rows == num_rows else None


def _are_whole(text: str, separator: str) -> bool:
    """Whether each quote belongs to a value that is in quotes, on one line."""
    end = re.escape(separator)
    quoted = rf'(?m:^|(?<={end}))"(?:[^"\r\n]|"")*"(?={end}|[\r\n]|\Z)'
    return '"' not in re.sub(quoted, "", text)
