"""manifest.offsets: where each record of a shard begins, so that reading can start at any of them.

Records of one layout need no such file: all have one length. Of others it holds the length of every
record. It is a help only: what does not fit a shard is made anew from the frames of the shard, and
whoever reads at an offset compares the checksums that stand there.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from crc32c import crc32c

from tfdist.records.format.encoding import HEADER_BYTES, length_in
from tfdist.records.format.files import open_regular
from tfdist.records.format.manifest import FRAME_BYTES, Manifest, ShardInfo

OFFSETS_NAME = "manifest.offsets"
_MAGIC = b"tfdist offsets 1"
# Behind the magic: the number of shards, the crc32c of their table, both little-endian uint32.
_COUNTS = struct.Struct("<II")
# A shard is known by what the manifest says of it, so that an index of other shards fits none.
# Its lengths, uint32, are at ``position``, with a crc32c of their own.
_ROW = np.dtype(
    [
        ("checksum", "<u4"),
        ("lengths_checksum", "<u4"),
        ("bytes", "<u8"),
        ("records", "<u8"),
        ("position", "<u8"),
    ]
)
_LENGTH = np.dtype("<u4")
_SMALL_BYTES = 4096
_WINDOW_BYTES = 1 << 16
# Kept in memory: 32 MB. What a shuffle buffer holds comes from few shards.
_KEPT_RECORDS = 4 << 20


def needs_offsets(manifest: Manifest) -> bool:
    """Whether records begin where only an index, or the frames before them, can tell."""
    return manifest.layout is None and manifest.compression == "none"


def write_offsets(
    folder: Path, manifest: Manifest, known: Mapping[str, Sequence[int]] | None = None
) -> None:
    """Writes the index of a folder beside its manifest; none where it is not needed.

    Args:
        folder: of the manifest.
        known: by file, the lengths of its records; None reads them from the frames.

    Raises:
        OSError: it cannot be written.
    """
    if not needs_offsets(manifest):
        return
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    files = manifest.shard_folder(folder)
    table = np.zeros(len(shards), _ROW)
    path = folder / OFFSETS_NAME
    if os.path.lexists(path) and not _is_index(path):
        return  # Of another program.
    partial = folder / f".{OFFSETS_NAME}-{uuid.uuid4().hex}"
    try:
        with open(partial, "xb") as out:
            position = len(_MAGIC) + _COUNTS.size + table.nbytes
            out.seek(position)
            for row, shard in zip(table, shards, strict=True):
                lengths = known[shard.file] if known else lengths_in(files / shard.file, shard)
                lengths = np.asarray([] if lengths is None else lengths)
                if len(lengths) != shard.records or lengths.max() > np.iinfo(_LENGTH).max:
                    return
                content = lengths.astype(_LENGTH).tobytes()
                out.write(content)
                row["checksum"] = int(shard.checksum, 16)
                row["lengths_checksum"] = crc32c(content)
                row["bytes"], row["records"] = shard.bytes, shard.records
                row["position"] = position
                position += len(content)
            out.seek(0)
            out.write(_MAGIC + _COUNTS.pack(len(shards), crc32c(table.tobytes())))
            out.write(table.tobytes())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def lengths_in(path: Path, shard: ShardInfo) -> np.ndarray | None:
    """Returns the lengths of the records of a shard, int64 [records], from its frames.

    Returns:
        None when the frames do not follow each other up to the end of the file.

    Raises:
        OSError: no regular file, or one that cannot be read.
    """
    if shard.records * FRAME_BYTES > shard.bytes:
        return None
    lengths = np.empty(shard.records, np.int64)
    # One read for many small records; of large ones nothing but their headers.
    at_once = _WINDOW_BYTES if shard.bytes < shard.records * _SMALL_BYTES else HEADER_BYTES
    offset, window, begin = 0, b"", 0
    with open_regular(path) as file:
        descriptor = file.fileno()
        for number in range(shard.records):
            if offset + HEADER_BYTES > begin + len(window):
                window, begin = os.pread(descriptor, at_once, offset), offset
            header = window[offset - begin : offset - begin + HEADER_BYTES]
            if len(header) < HEADER_BYTES:
                return None
            size = length_in(header)
            if size is None or offset + FRAME_BYTES + size > shard.bytes:
                return None
            lengths[number] = size
            offset += FRAME_BYTES + size
        return lengths if offset == shard.bytes == os.fstat(descriptor).st_size else None


class Offsets:
    """Where the records of uncompressed shards begin.

    Args:
        folder: of the manifest.
    """

    def __init__(self, folder: Path, manifest: Manifest):
        self._path = folder / OFFSETS_NAME
        self._files = manifest.shard_folder(folder)
        self._layout = manifest.layout
        self._lock = threading.Lock()
        self._table: dict[tuple[int, int, int], np.void] | None = None
        self._kept: OrderedDict[str, np.ndarray] = OrderedDict()

    def of(
        self, shard: ShardInfo, rows: np.ndarray, *, anew: bool = False
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns where the frames of some records of a shard begin and end.

        Args:
            rows: numbers of records in the shard, int64 [n].
            anew: whether to look at the frames, as what the index says was found not to be.

        Returns:
            Two arrays int64 [n]; None when the frames do not follow each other.

        Raises:
            OSError: the shard cannot be read.
        """
        if self._layout is not None:
            return rows * self._layout.frame_bytes, (rows + 1) * self._layout.frame_bytes
        with self._lock:
            if anew or shard.file not in self._kept:
                lengths = None if anew else self._indexed(shard)
                if lengths is None:
                    lengths = lengths_in(self._files / shard.file, shard)
                if lengths is None:
                    return None
                self._kept[shard.file] = _begins(lengths)
            self._kept.move_to_end(shard.file)
            while len(self._kept) > 1 and sum(map(len, self._kept.values())) > _KEPT_RECORDS:
                self._kept.popitem(last=False)
            begins = self._kept[shard.file]
            return begins[rows], begins[rows + 1]

    def _indexed(self, shard: ShardInfo) -> np.ndarray | None:
        """Returns the lengths that the index has of a shard; None when it has none that fit."""
        with contextlib.suppress(OSError), open_regular(self._path) as file:
            if self._table is None:
                self._table = {_key(row): row for row in _table(file.fileno())}
            row = self._table.get((int(shard.checksum, 16), shard.bytes, shard.records))
            if row is None:
                return None
            size = shard.records * _LENGTH.itemsize
            content = os.pread(file.fileno(), size, int(row["position"]))
            if len(content) == size and crc32c(content) == row["lengths_checksum"]:
                lengths = np.frombuffer(content, _LENGTH).astype(np.int64)
                if _begins(lengths)[-1] == shard.bytes:
                    return lengths
        return None


def _is_index(path: Path) -> bool:
    with open_regular(path) as file:
        return file.read(len(_MAGIC)) == _MAGIC


def _begins(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths + FRAME_BYTES)])


def _key(row: np.void) -> tuple[int, int, int]:
    return int(row["checksum"]), int(row["bytes"]), int(row["records"])


def _table(descriptor: int) -> Iterable[np.void]:
    """Returns the table of an index; an empty one when it is damaged, or no index at all."""
    head = os.pread(descriptor, len(_MAGIC) + _COUNTS.size, 0)
    if len(head) < len(_MAGIC) + _COUNTS.size or not head.startswith(_MAGIC):
        return []
    count, checksum = _COUNTS.unpack_from(head, len(_MAGIC))
    size = count * _ROW.itemsize
    if size > os.fstat(descriptor).st_size:
        return []
    content = os.pread(descriptor, size, len(head))
    return np.frombuffer(content, _ROW) if crc32c(content) == checksum else []
