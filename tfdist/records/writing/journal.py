"""A file of what is done, a line each, from which nothing is lost but the line that was cut."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

from crc32c import crc32c


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
