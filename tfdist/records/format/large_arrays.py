"""Arrays that need not fit into memory, in files or in several parts: read when asked for."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any

import numpy as np

from tfdist.errors import DataError

_CHUNK_BYTES = 16 << 20
_VALUES_AT_ONCE = 1 << 22
# What lies between two places that are read at once, which takes less time than to read twice; and
# where what is read at once begins anew.
_GAP_BYTES, _READ_BYTES = 1 << 14, 8 << 20
# A map of less than this may be in memory as a whole.
_SMALL_BYTES = 128 << 20
# The system maps up to this much around each place that is read; what is mapped counts as memory.
_MAPPED_AROUND = 2 << 20


class LargeArray:
    """The rows of several arrays as those of one, [rows, ...], never copied as a whole.

    Args:
        parts: arrays with the same shape of a row, numbers of one dtype, maps of files among them.
        dtype: what rows are converted to when they are read; None keeps theirs.
    """

    def __init__(
        self, parts: Sequence[np.ndarray | LargeArray | _Part], dtype: np.dtype | None = None
    ):
        self.parts: list[_Part] = []
        for part in parts:
            own = part.parts if isinstance(part, LargeArray) else [part]
            self.parts.extend(each if isinstance(each, _Part) else _Part(each) for each in own)
        first = self.parts[0].array
        self._ends = np.cumsum([len(part.array) for part in self.parts])
        self.dtype = first.dtype if dtype is None else np.dtype(dtype)
        self.shape = (int(self._ends[-1]), *first.shape[1:])
        self.ndim = len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, rows: np.ndarray | slice) -> np.ndarray:
        """Returns a copy of the rows of the given numbers, int64 [n], or of a slice."""
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(len(self)))
        values = np.empty((len(rows), *self.shape[1:]), self.dtype)
        part_of = np.searchsorted(self._ends, rows, side="right")
        for number in np.unique(part_of):
            chosen, part = part_of == number, self.parts[number]
            values[chosen] = part.read(rows[chosen] - (self._ends[number] - len(part.array)))
        return values

    def astype(self, dtype: Any, *, copy: bool = True) -> LargeArray:
        """Returns the same rows in another dtype, converted when they are read."""
        del copy  # Nothing is ever copied.
        return LargeArray(self.parts, np.dtype(dtype))

    def min(self) -> Any:
        return min(chunk.min() for _, chunk in chunks(self))

    def max(self) -> Any:
        return max(chunk.max() for _, chunk in chunks(self))


class Store:
    """A temporary file without a name for many arrays, which goes with the last of them."""

    def __init__(self):
        self._file = tempfile.TemporaryFile()  # noqa: SIM115

    def put(self, block: np.ndarray) -> int:
        """Writes what lies in a row, and returns where."""
        place = self._file.seek(0, os.SEEK_END)
        self._file.write(block.reshape(-1).view(np.uint8))
        self._file.flush()
        return place

    def get(self, place: int, num_bytes: int) -> bytes:
        return _read(self._file.fileno(), place, num_bytes)

    def rows(
        self, blocks: Iterable[np.ndarray], dtype: Any, shape: Sequence[int] = ()
    ) -> LargeArray:
        """Returns rows that come some at a time, [n, *shape]; one at least."""
        offset, count = self._file.seek(0, os.SEEK_END), 0
        for block in blocks:
            self.put(np.ascontiguousarray(block, dtype))
            count += len(block)
        like = np.broadcast_to(np.zeros((), dtype), (count, *shape))
        return LargeArray([_Part(like, self._file, offset)])

    def texts(self, blocks: Callable[[], Iterable[tuple[np.ndarray, np.ndarray]]]) -> LargeTexts:
        """Returns texts that come some at a time.

        Args:
            blocks: yields the bytes of some texts, one after the other, uint8 [n], and where each
                begins and the last one ends, int [texts + 1]; it is called twice.
        """
        first = self._file.seek(0, os.SEEK_END)
        for data, _ in blocks():
            self.put(data)

        def bounds() -> Iterator[np.ndarray]:
            start = first
            for _, edges in blocks():
                # Not start - edges[0]: a place in a large file is beyond int32.
                places = edges.astype(np.int64) - edges[0] + start
                start = places[-1]
                yield np.stack([places[:-1], places[1:]], axis=-1)

        return LargeTexts(self._file, self.rows(bounds(), np.int64, [2]))


class LargeTexts:
    """Texts in a file, [rows], as bytes; any row can be read at once.

    Args:
        bounds: where each begins and ends, int64 [rows, 2].
    """

    def __init__(self, file: IO[bytes], bounds: LargeArray):
        self._file, self._bounds = file, bounds
        self.shape = bounds.shape[:1]

    def __len__(self) -> int:
        return len(self._bounds)

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        """Returns the texts of the given numbers, int64 [n], as objects."""
        texts = np.empty(len(rows), object)
        starts, ends = self._bounds[rows].T
        for places in near(starts, ends):
            first = int(starts[places[0]])
            data = _read(self._file.fileno(), first, int(ends[places[-1]]) - first)
            for place in places.tolist():
                texts[place] = data[starts[place] - first : ends[place] - first]
        return texts


def _read(file: int, start: int, num_bytes: int) -> bytes:
    parts = [os.pread(file, num_bytes, start)]
    while parts[-1] and (left := num_bytes - sum(map(len, parts))):  # Of more than 2 GB.
        parts.append(os.pread(file, left, start + num_bytes - left))
    return parts[0] if len(parts) == 1 else b"".join(parts)


def near(starts: np.ndarray, ends: np.ndarray) -> Iterator[np.ndarray]:
    """Yields which places in a file are read at once, int64 [n] in the order of the file.

    Args:
        starts, ends: where each place begins and ends, int64 [places]; they do not overlap, but
            for those that are the same.
    """
    # Of those that begin alike the ones without a byte come first, so that the last one ends last.
    order = np.lexsort((ends, starts))
    starts, ends = starts[order], ends[order]
    is_far = starts[1:] - ends[:-1] > _GAP_BYTES
    is_long = np.diff(starts // _READ_BYTES) > 0
    yield from np.split(order, np.flatnonzero(is_far | is_long) + 1) if len(order) else ()


class _Part:
    """An array, of which a file is read and not mapped where it is larger than a little.

    Args:
        file: where its rows are, from ``offset`` on, of which ``array`` is no more than the shape
            and the dtype; None: its rows are those of ``array``.
    """

    def __init__(self, array: np.ndarray, file: IO[bytes] | None = None, offset: int = 0):
        self.array = array
        self._map = None
        self._file, self._offset = None if file is None else file.fileno(), offset
        self._owner = file
        self._mapped = 0
        if file is None and array.nbytes > _SMALL_BYTES:
            self._map = _map_of(array)
        if self._map is not None and array.flags.c_contiguous:
            self._open()

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Returns the rows of the given numbers, int64 [n]."""
        if self._file is not None:
            return self._read_file(rows)
        values = np.asarray(self.array)[rows]
        if self._map is not None:
            self._mapped += len(rows) * _MAPPED_AROUND
            if self._mapped > _SMALL_BYTES:
                self._mapped = 0
                self._map.madvise(mmap.MADV_DONTNEED)
        return values

    def _open(self) -> None:
        """Opens the file of the map, if that is still the one which is mapped."""
        mapped = self.array
        while not isinstance(mapped, np.memmap):
            mapped = mapped.base
        start = np.frombuffer(self._map, np.uint8).__array_interface__["data"][0]
        first = mapped.offset - mapped.offset % mmap.ALLOCATIONGRANULARITY
        self._offset = self.array.__array_interface__["data"][0] - start + first
        with contextlib.suppress(OSError, TypeError, DataError):
            self._file = os.open(mapped.filename, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
            some = np.unique(np.linspace(0, len(self.array) - 1, 9).astype(np.int64))
            if self._read_file(some).tobytes() == np.asarray(self.array)[some].tobytes():
                return
        self._file = None

    def _read_file(self, rows: np.ndarray) -> np.ndarray:
        values = np.empty((len(rows), *self.array.shape[1:]), self.array.dtype)
        row_bytes = self.array.nbytes // len(self.array)
        if (np.diff(rows) == 1).all() and len(rows):
            self._read_run(int(rows[0]) * row_bytes, values)
            return values
        starts = rows * row_bytes
        for places in near(starts, starts + row_bytes):
            chosen = rows[places]
            first, last = int(chosen[0]), int(chosen[-1])
            run = np.empty((last - first + 1, *values.shape[1:]), values.dtype)
            self._read_run(first * row_bytes, run)
            values[places] = run[chosen - first]
        return values

    def _read_run(self, start: int, run: np.ndarray) -> None:
        """Reads what lies from there on in the array."""
        wanted, at = memoryview(run.reshape(-1).view(np.uint8)), self._offset + start
        while wanted:
            got = os.preadv(self._file, [wanted], at)
            if not got:
                raise DataError(
                    "the file of an array must stay as it is while it is written",
                    received="one that has become shorter",
                    mend="Write again when nothing else changes the file",
                )
            wanted, at = wanted[got:], at + got


def large(values: Any) -> LargeArray | None:
    """Returns the rows of a map of a file with numbers in rows; None for all that is small."""
    if isinstance(values, LargeArray):
        return values
    is_rows = isinstance(values, np.memmap) and values.ndim > 1 and values.dtype.kind in "biuf"
    return LargeArray([values]) if is_rows and len(values) else None


def slices(rows: int, width: int = 1) -> Iterator[slice]:
    """Yields some rows at a time, of so many in all with so many values each."""
    step = max(1, _VALUES_AT_ONCE // width)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def chunks(array: np.ndarray | LargeArray) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (first row, rows) of parts of an array that fit into memory well."""
    rows = max(1, _CHUNK_BYTES // max(1, array.nbytes // max(1, len(array))))
    for start in range(0, len(array), rows):
        yield start, array[start : start + rows]


def _map_of(array: np.ndarray) -> mmap.mmap | None:
    """Returns the map that an array is a view of, if what is read may be dropped from it."""
    shared = False
    while array is not None:
        if isinstance(array, mmap.mmap):
            return array if shared and hasattr(mmap, "MADV_DONTNEED") else None
        if isinstance(array, np.memmap):
            # Of a private copy, mode "c", the user's changes would be lost.
            shared = getattr(array, "mode", "c") in ("r", "r+", "w+")
        array = getattr(array, "base", None)
    return None
