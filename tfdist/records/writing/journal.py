"""A file of what is done, a line each, from which nothing is lost but the line that was cut.

And what was found in files that were looked at, in blocks: noted in such a file, so that no one
looks again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from crc32c import crc32c

from tfdist.records.parts import Part
from tfdist.records.writing.shard_files import said_of

# As many journals are opened each second, however many parts there are.
_OPENED_A_SECOND = 20


def whole_lines(content: bytes) -> tuple[list[Any], int]:
    """Returns what the lines say, up to the first one that is not whole, and where they end."""
    entries, end = [], 0
    for line in content.splitlines(keepends=True):
        checksum, _, text = line.rstrip(b"\n").partition(b" ")
        if not line.endswith(b"\n") or checksum != b"%08x" % crc32c(text):
            break
        entries.append(json.loads(text))
        end += len(line)
    return entries, end


class Journal:
    """Lines that are read back up to the first one that is not whole, and added to.

    Args:
        path: the file; made with the first line that is added.

    Attributes:
        entries: what was written before.

    Raises:
        OSError: it is there and cannot be read.
    """

    def __init__(self, path: Path):
        self._path = path
        self._lock = threading.Lock()
        content = path.read_bytes() if path.exists() else b""
        self.entries, self._end = whole_lines(content)

    def add(self, entry: Any) -> None:
        """Writes one line more; any thread may. Raises OSError."""
        text = json.dumps(entry).encode()
        line = b"%08x %s\n" % (crc32c(text), text)
        with self._lock:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                os.ftruncate(descriptor, self._end)
                if os.pwrite(descriptor, line, self._end) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._end += len(line)
            finally:
                os.close(descriptor)


class LookedAt:
    """Blocks of files, each by the number of its first file, and what was found in them.

    All parts of a job array look at them, each block once, whoever is there to do it. Each part
    begins with blocks of its own, and then takes what no other has noted yet: none waits for
    another, which may not have been started. Two look at the same block where they take it at
    almost the same time.

    Args:
        path: of the journal.
        begin: called before a line is written: makes the folder that the journal is in.
        out: what is to be written in the end.
        of: the part that this is; of one that writes all, "1/1".
        others: the journals of the other parts, which may be there or not.
        key: what tells files and options from others; each line has it.

    Raises:
        OSError: the journal is there and cannot be read.
    """

    def __init__(
        self,
        path: Path,
        begin: Callable[[], None],
        out: Path,
        *,
        of: Part,
        others: Sequence[Path],
        key: str,
    ):
        self._journal, self._begin, self._out = Journal(path), begin, out
        self._of, self._key = of, key
        self._ends = dict.fromkeys(others, 0)
        self._lock, self._again_at = threading.Lock(), 0.0
        self._found: dict[int, Any] = {}
        self._take(self._journal.entries)

    def in_turn(self, firsts: Sequence[int]) -> Sequence[int]:
        """Returns the blocks in the order in which to look at them."""
        start, stop = self._of.range_of(len(firsts))
        rest = [*firsts[:start], *firsts[stop:]]
        # Parts that are done with their own must not go on with the same one.
        random.Random(self._of.number).shuffle(rest)
        return [*firsts[start:stop], *rest]

    def found(self) -> dict[int, Any]:
        """Returns what is known by now, by block; any thread may ask."""
        with self._lock:
            if time.monotonic() >= self._again_at:
                for path in self._ends:
                    self._read(path)
                self._again_at = time.monotonic() + len(self._ends) / _OPENED_A_SECOND
        return self._found

    def add(self, first: int, told: Any) -> None:
        """Notes what was found in a block; any thread may. Raises DataError."""
        with said_of(self._out):
            self._begin()
            self._journal.add((self._key, first, told))

    def _read(self, path: Path) -> None:
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(self._ends[path])
            entries, size = whole_lines(file.read())
            self._ends[path] += size
            self._take(entries)

    def _take(self, entries: Iterable[Any]) -> None:
        self._found.update(found for key, *found in entries if key == self._key)
