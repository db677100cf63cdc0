"""Reading every byte of a folder of shards, and naming what is not as it was written."""

from __future__ import annotations

import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from crc32c import crc32c

from tfdist.errors import CorruptShardError, TfdistError, unknown_choice
from tfdist.records.buckets.cache import local_shards
from tfdist.records.format.encoding import FOOTER_BYTES, HEADER_BYTES, length_in, mask
from tfdist.records.format.examples import values_in
from tfdist.records.format.files import open_regular, unreadable
from tfdist.records.format.manifest import (
    FRAME_BYTES,
    Manifest,
    ShardInfo,
    client_folders,
    has_client_folders,
    load_manifest,
)
from tfdist.records.format.schema import IMAGE_ENCODINGS, Feature

# Of a record, at once: a damaged length may be anything.
_PIECE_BYTES = 1 << 20
_CHUNK_BYTES = {False: 1 << 20, True: 1 << 16}  # of a file, by whether it is compressed
# zlib gives nothing of the piece in which it meets damage, so that pieces are small.
_UNZIPPED_BYTES = 1 << 14
_GZIP_WINDOW_BITS = 31


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a folder of shards.

    Attributes:
        file: name of the file inside the folder, "CLIENT/FILE" when each client has a folder.
        record: number of the record in the file, from 0; None when the fault is the file's.
        offset: byte where that record's frame begins, in the uncompressed file; None likewise.
        reason: what is wrong.
    """

    file: str
    record: int | None
    offset: int | None
    reason: str

    def __str__(self) -> str:
        place = "" if self.record is None else f", record {self.record}, byte {self.offset}"
        return f"{self.file}{place}: {self.reason}"


def check(
    folder: str | Path,
    split: str | None = None,
    *,
    manifest: Manifest | None = None,
    progress: Callable[[int], None] | None = None,
    decode: bool = False,
) -> list[Fault]:
    """Returns all faults of a folder of shards, in the order of the manifest; none when clean.

    Args:
        folder: of shards, or with a folder of shards for each client.
        split: check the shards of this split alone; None checks all, and for files that the
            manifest does not name.
        manifest: that of shards which lie apart from it; None reads the folder's own.
        progress: called with the number of bytes just read.
        decode: whether every image is decoded too.

    Raises:
        DataError: the folder has no manifest that can be read.
    """
    folder = local_shards(folder)
    if manifest is None and has_client_folders(folder):
        return [
            fault
            for client in client_folders(folder)
            for fault in _check_client(client, split, progress, decode)
        ]
    manifest = manifest or load_manifest(folder)
    if split is not None and split not in manifest.splits:
        raise unknown_choice("split", split, list(manifest.splits))
    chosen = manifest.splits if split is None else {split: manifest.splits[split]}
    manifest.shard_folder(folder)  # One line for all shards, where it is missing.
    faults = []
    for info in chosen.values():
        for shard in info.shards:
            faults.extend(check_shard(folder, shard, manifest, progress, decode=decode))
    # Of adopted files the user may have left some aside.
    if split is None and not manifest.is_adopted:
        faults.extend(_foreign(folder, manifest))
    return faults


def damage(folder: Path, shard: ShardInfo, manifest: Manifest) -> CorruptShardError:
    """Returns the error for a shard that was found not to be as it was written."""
    faults = check_shard(folder, shard, manifest)
    return damaged(folder, faults, f"{shard.file}, which changes while it is read")


def damaged(folder: Path, faults: list[Fault], otherwise: str) -> CorruptShardError:
    """Returns the error for shards with these faults; ``otherwise``: what is said without any."""
    return CorruptShardError(
        "shards must be as they were written",
        received=str(faults[0]) if faults else otherwise,
        mend=f"See all faults with `tfdist inspect {folder} --check`",
    )


def _check_client(
    folder: Path, split: str | None, progress: Callable[[int], None] | None, decode: bool
) -> list[Fault]:
    """Returns the faults of one client's folder; files are named from the folder above."""
    try:
        faults = check(folder, split, progress=progress, decode=decode)
    except TfdistError as error:
        return [Fault(folder.name, None, None, str(error))]
    return [replace(fault, file=f"{folder.name}/{fault.file}") for fault in faults]


def _foreign(folder: Path, manifest: Manifest) -> Iterator[Fault]:
    known = {shard.file for split in manifest.splits.values() for shard in split.shards}
    for path in sorted(folder.glob("*.tfrecord*")):
        if path.name not in known:
            yield Fault(path.name, None, None, "the manifest does not name this shard")


class ShardReader:
    """Reads the uncompressed bytes of a shard, and sums the bytes of its file."""

    def __init__(self, path: Path, compressed: bool, progress: Callable[[int], None] | None):
        self.checksum = 0
        self.broken: str | None = None
        self._file = open_regular(path)
        self._chunk_bytes = _CHUNK_BYTES[compressed]
        self._unzip = zlib.decompressobj(_GZIP_WINDOW_BITS) if compressed else None
        self._progress = progress
        self._ready = memoryview(b"")

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def read(self, size: int) -> memoryview:
        """Returns the next ``size`` bytes; fewer at the end."""
        if len(self._ready) < size:
            parts, have = [self._ready], len(self._ready)
            while have < size and (data := self._next()):
                parts.append(data)
                have += len(data)
            self._ready = memoryview(b"".join(parts))
        taken, self._ready = self._ready[:size], self._ready[size:]
        return taken

    def finish(self) -> None:
        """Reads the rest of the file, for its checksum."""
        while self._pull():
            pass

    def _pull(self) -> bytes:
        data = self._file.read(self._chunk_bytes)
        self.checksum = crc32c(data, self.checksum)
        if self._progress is not None and data:
            self._progress(len(data))
        return data

    def _next(self) -> bytes:
        """Returns the next uncompressed bytes; none at the end or behind a damaged place."""
        if self._unzip is None:
            return self._pull()
        while self.broken is None:
            data = self._unzip.unconsumed_tail or self._unzip.unused_data or self._pull()
            if not data:
                if not self._unzip.eof:
                    self.broken = "the gzip stream ends too early"
                return b""
            if self._unzip.eof:  # Files were put together, of which TensorFlow reads all.
                self._unzip = zlib.decompressobj(_GZIP_WINDOW_BITS)
            try:
                if plain := self._unzip.decompress(data, _UNZIPPED_BYTES):
                    return plain
            except zlib.error as error:
                self.broken = f"the gzip stream is damaged ({error})"
        return b""


def check_shard(
    folder: Path,
    shard: ShardInfo,
    manifest: Manifest,
    progress: Callable[[int], None] | None = None,
    *,
    decode: bool = False,
) -> list[Fault]:
    """Returns all faults of one shard; see ``check``."""
    images = (
        [f for f in manifest.schema.features if f.encoding in IMAGE_ENCODINGS] if decode else []
    )
    look = (lambda record: _undecodable(images, record)) if images else None
    fixed_bytes = None if manifest.layout is None else manifest.layout.record_bytes
    path = manifest.shard_folder(folder) / shard.file
    try:
        with ShardReader(path, manifest.compression == "gzip", progress) as reader:
            faults, count = check_records(reader, shard.file, fixed_bytes, look)
            reader.finish()
    except FileNotFoundError:
        return [Fault(shard.file, None, None, "this shard of the manifest is missing")]
    except OSError as error:
        return [Fault(shard.file, None, None, unreadable(error).removeprefix("which "))]
    if count is not None and count != shard.records:
        reason = f"has {count} records, the manifest says {shard.records}"
        faults.append(Fault(shard.file, None, None, reason))
    checksum = f"{reader.checksum:08x}"
    # A damaged record spoils the checksum of its file too: that is one fault, not two.
    if not faults and checksum != shard.checksum:
        reason = f"has checksum {checksum}, the manifest says {shard.checksum}"
        faults.append(Fault(shard.file, None, None, reason))
    return faults


def check_records(
    reader: ShardReader,
    file: str,
    fixed_bytes: int | None,
    look: Callable[[bytes], str | None] | None,
) -> tuple[list[Fault], int | None]:
    """Returns the faults of the records, and their number; None when they cannot all be counted.

    Args:
        file: its name in the faults.
        fixed_bytes: of each record; None where they differ.
        look: is given each record whose checksum is right, and returns what else is wrong.
    """
    faults: list[Fault] = []
    record, offset = 0, 0
    while header := reader.read(HEADER_BYTES):
        where = (file, record, offset)
        if len(header) < HEADER_BYTES:
            faults.append(Fault(*where, reader.broken or _truncated(HEADER_BYTES, len(header))))
            return faults, None
        size = length_in(header)
        if size is None:
            faults.append(Fault(*where, "the length does not match its checksum"))
            # Only records that all have one length show where the next one begins.
            if fixed_bytes is None:
                return faults, None
            size = fixed_bytes
        elif fixed_bytes is not None and size != fixed_bytes:
            faults.append(Fault(*where, f"has {size} bytes, the manifest says {fixed_bytes}"))
        data, found, checksum = _body(reader, size, keep=look is not None)
        footer = reader.read(FOOTER_BYTES) if found == size else b""
        if len(footer) < FOOTER_BYTES:
            reason = reader.broken or _truncated(size + FOOTER_BYTES, found + len(footer))
            faults.append(Fault(*where, reason))
            return faults, None
        if struct.unpack("<I", footer)[0] != mask(checksum):
            faults.append(Fault(*where, "the data does not match its checksum"))
        elif look is not None and (reason := look(data)):
            faults.append(Fault(*where, reason))
        record += 1
        offset += FRAME_BYTES + size
    if reader.broken is not None:
        faults.append(Fault(file, record, offset, reader.broken))
        return faults, None
    return faults, record


def _body(reader: ShardReader, size: int, *, keep: bool) -> tuple[bytes, int, int]:
    """Returns the bytes of a record, if they are to be kept, their number and their checksum."""
    pieces, found, checksum = [], 0, 0
    while found < size and (piece := reader.read(min(size - found, _PIECE_BYTES))):
        found += len(piece)
        checksum = crc32c(piece, checksum)
        if keep:
            pieces.append(bytes(piece))
    return b"".join(pieces), found, checksum


def _undecodable(images: list[Feature], record: bytes) -> str | None:
    """Returns what is wrong with the images of a record."""
    from tfdist.records.format.image_bytes import undecodable

    for feature in images:
        try:
            files = values_in(record, feature.name)
        except ValueError:
            return "is no Example"
        if len(files) != 1:
            return f"has {len(files)} images '{feature.name}', not one"
        shape = None if None in feature.shape else feature.shape
        with warnings.catch_warnings(action="ignore"):  # Pillow warns of huge images.
            reason = undecodable(files[0], shape, upright=feature.reading.upright)
        if reason:
            return f"the image '{feature.name}' cannot be decoded ({reason})"
    return None


def _truncated(expected: int, found: int) -> str:
    return f"the file ends inside this record ({found} of {expected} bytes)"
