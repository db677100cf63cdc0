"""Reading a small shard in one go, with NumPy alone: every byte is checked against the manifest."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import numpy as np
from crc32c import crc32c

from tfdist.records.format.checking import damage
from tfdist.records.format.encoding import FOOTER_BYTES, HEADER_BYTES
from tfdist.records.format.files import open_regular
from tfdist.records.format.manifest import Manifest, ShardInfo

_GZIP_WINDOW_BITS = 31


def read_rows(folder: Path, shard: ShardInfo, manifest: Manifest) -> np.ndarray:
    """Returns the Examples of a shard with a layout, uint8 [records, record_bytes].

    Raises:
        CorruptShardError: the shard is missing or not as it was written.
    """
    assert manifest.layout is not None
    frame_bytes = HEADER_BYTES + manifest.layout.record_bytes + FOOTER_BYTES
    data = _read(folder, shard, manifest)
    if len(data) != shard.records * frame_bytes:
        raise damage(folder, shard, manifest)
    frames = np.frombuffer(data, np.uint8).reshape(shard.records, frame_bytes)
    return frames[:, HEADER_BYTES:-FOOTER_BYTES]


def read_examples(folder: Path, shard: ShardInfo, manifest: Manifest) -> list[bytes]:
    """Returns the Examples of any shard. Raises as ``read_rows``."""
    data = _read(folder, shard, manifest)
    examples, offset = [], 0
    while offset + HEADER_BYTES <= len(data):
        (size,) = struct.unpack_from("<Q", data, offset)
        start = offset + HEADER_BYTES
        examples.append(data[start : start + size])
        offset = start + size + FOOTER_BYTES
    if len(examples) != shard.records or offset != len(data):
        raise damage(folder, shard, manifest)
    return examples


def _read(folder: Path, shard: ShardInfo, manifest: Manifest) -> bytes:
    """Returns the uncompressed bytes of the file.

    They are what was written when the checksum of the file is: then those of its records need not
    be looked at one by one.
    """
    try:
        with open_regular(manifest.shard_folder(folder) / shard.file) as file:
            is_whole = os.fstat(file.fileno()).st_size == shard.bytes
            data = file.read() if is_whole else b""
    except OSError:
        data = b""
    if f"{crc32c(data):08x}" != shard.checksum or len(data) != shard.bytes:
        raise damage(folder, shard, manifest)
    if manifest.compression == "none":
        return data
    try:
        return zlib.decompress(data, _GZIP_WINDOW_BITS)
    except zlib.error:
        raise damage(folder, shard, manifest) from None
