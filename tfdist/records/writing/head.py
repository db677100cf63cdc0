"""The first records of a split, as shards of their own."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from crc32c import crc32c

from tfdist.records.format.checking import ShardReader
from tfdist.records.format.encoding import FOOTER_BYTES, HEADER_BYTES
from tfdist.records.format.manifest import Manifest, ShardInfo


def write_head(
    paths: Sequence[Path], manifest: Manifest, split: str, count: int, folder: Path
) -> list[bytes]:
    """Writes a new folder of shards. Returns its records.

    Args:
        paths: the shards of the split, in their order.
        manifest: which describes them.
        count: of the records, at most.
    """
    frames, records = _first(paths, manifest, count)
    checksum = f"{crc32c(frames):08x}"
    own = ShardInfo(
        file="first.tfrecord", records=len(records), bytes=len(frames), checksum=checksum
    )
    info = replace(manifest.splits[split], shards=(own,), class_counts=None, partition=None)
    folder.mkdir()
    (folder / own.file).write_bytes(frames)
    alone = replace(manifest, splits={split: info}, compression="none", shards_in=None)
    alone.save(folder)
    return records


def _first(paths: Sequence[Path], manifest: Manifest, count: int) -> tuple[bytes, list[bytes]]:
    """Returns the frames of the first records, and these."""
    frames, records = b"", []
    for path in paths:
        with ShardReader(path, manifest.compression == "gzip", None) as reader:
            while len(records) < count and (header := bytes(reader.read(HEADER_BYTES))):
                (size,) = struct.unpack("<Q", header[:8])
                body = bytes(reader.read(size + FOOTER_BYTES))
                frames += header + body
                records.append(body[:-FOOTER_BYTES])
    return frames, records
