"""Another folder of shards as a source: its records are dealt anew, or the first of them taken.

They stay byte for byte.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from crc32c import crc32c

from tfdist import __version__
from tfdist.errors import DataError
from tfdist.records.format.checking import ShardReader, damage
from tfdist.records.format.columns import Columns
from tfdist.records.format.encoding import FOOTER_BYTES, HEADER_BYTES, cut_frames
from tfdist.records.format.examples import int64_in
from tfdist.records.format.manifest import (
    MANIFEST_NAME,
    Manifest,
    ShardInfo,
    is_split_beside,
    load_manifest,
)
from tfdist.records.format.offsets import write_offsets
from tfdist.records.writing.options import WriteOptions
from tfdist.records.writing.raw_sources import DIGITS
from tfdist.records.writing.shard_files import Counter, shards_for, staging_folder, stop_on_sigterm
from tfdist.records.writing.streams.shards import BUFFER_BYTES, StreamShards, held_bytes
from tfdist.records.writing.streams.writer import mixing_note

_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class ShardFolder:
    """Shards that are there already.

    Attributes:
        manifest: that of the folder, with the splits that are meant alone.
    """

    folder: Path
    manifest: Manifest

    def columns(self, notes: Sequence[str]) -> Columns:
        """Returns what there is to say of the source before it is written; ``notes``: the last."""
        note = "records of shards are written as they are, and shuffled anew"
        return Columns("shards", self.manifest.schema, {}, notes=(note, *notes))


def find_shards(source: object) -> ShardFolder | None:
    """Returns the shards of "DIR" or "DIR/SPLIT"; None of anything else.

    Raises:
        DataError: a manifest that cannot be read, or records that are dealt to clients.
    """
    if not isinstance(source, (str, Path)) or source == DIGITS:
        return None
    path, name = Path(source), None
    if not (path / MANIFEST_NAME).is_file():
        if not is_split_beside(path):
            return None
        path, name = path.parent, path.name
    manifest = load_manifest(path)
    if name is not None:
        if name not in manifest.splits:
            raise DataError(
                f"{path} must have the split '{name}'",
                received=f"splits {', '.join(manifest.splits)}",
                mend=f"Write {path / next(iter(manifest.splits))}, or another of these",
            )
        manifest = replace(manifest, splits={name: manifest.splits[name]})
    for split_name, split in manifest.splits.items():
        if split.has_clients:
            raise DataError(
                "shards that are written anew must not belong to clients",
                received=f"split '{split_name}' of {path}, which is dealt to "
                f"{len(split.clients)} clients",
                mend="Write it from its source again",
            )
    return ShardFolder(path, manifest)


def write_shards_anew(source: ShardFolder, out: Path, options: WriteOptions) -> Manifest:
    """Writes the records of shards into others. Without ``shares`` each stays in its split."""
    manifest, splits = source.manifest, source.manifest.splits
    shares, num_shards, keeps = options.shares, options.num_shards, options.shares is None
    schema = options.as_read(manifest.schema)
    files = manifest.shard_folder(source.folder)
    if manifest.is_adopted and not keeps:
        raise DataError(
            "shards that others wrote must stay in their splits",
            received=f"split {', '.join(shares)} for those of {source.folder}",
            mend="Leave the split out",
        )
    num_bytes = sum(split.bytes for split in splits.values())
    records = sum(split.records for split in splits.values())
    if keeps:
        shares = dict.fromkeys(splits, 1.0)
        sizes = {name: split.bytes for name, split in splits.items()}
    else:
        sizes = {name: share / sum(shares.values()) * num_bytes for name, share in shares.items()}
    per_split = {name: num_shards or shards_for(size) for name, size in sizes.items()}
    counter = Counter(records, options.progress)
    with staging_folder(out) as folder, stop_on_sigterm():
        shards = StreamShards(folder, shares, per_split, options.seed, options.compression)
        for name, split in splits.items():
            for shard in split.shards:
                for frames in _frames(files, shard, manifest):
                    ids = None if keeps else _class_ids(frames, manifest)
                    shards.add(frames, name if keeps else None, ids)
                    counter.add(len(frames))
        infos = shards.finish(is_exact=num_shards is not None)
        if keeps:
            infos = {
                name: replace(info, class_counts=splits[name].class_counts)
                for name, info in infos.items()
            }
        is_whole = held_bytes(num_bytes, records) <= BUFFER_BYTES
        mixing = mixing_note(num_bytes / records, sum(per_split.values()))
        written = replace(
            manifest,
            schema=schema,
            shards_in=None,
            splits=infos,
            seed=options.seed,
            stratified=manifest.stratified and keeps,
            compression=options.compression,
            written_by=f"tfdist {__version__}",
            mixing=None if is_whole else mixing,
        )
        write_offsets(folder, written)
        written.save(folder)
    return written


def _frames(folder: Path, shard: ShardInfo, manifest: Manifest) -> Iterator[list[bytes]]:
    """Yields the framed records of a shard, some at a time; it must be as it was written."""
    rest, records = b"", 0
    try:
        with ShardReader(folder / shard.file, manifest.compression == "gzip", None) as reader:
            while data := reader.read(_READ_BYTES):
                rest += data
                frames, at = cut_frames(rest)
                rest = rest[at:]
                records += len(frames)
                if records > shard.records:
                    break
                yield frames
            reader.finish()
    except OSError:
        raise damage(folder, shard, manifest) from None
    is_whole = not rest and reader.broken is None and records == shard.records
    if not is_whole or f"{reader.checksum:08x}" != shard.checksum:
        raise damage(folder, shard, manifest)


def _class_ids(frames: list[bytes], manifest: Manifest) -> np.ndarray | None:
    label = manifest.schema.class_label
    if label is None:
        return None
    ids = [int64_in(frame[HEADER_BYTES:-FOOTER_BYTES], label.name)[0] for frame in frames]
    return np.array(ids, np.int64)


def write_head(
    paths: Sequence[Path], manifest: Manifest, split: str, count: int, folder: Path
) -> list[bytes]:
    """Writes a new folder of shards. Returns its records.

    Args:
        paths: the shards of the split, in their order.
        manifest: which describes them.
        count: of the records, at most.
    """
    frames, records = b"", []
    for path in paths:
        with ShardReader(path, manifest.compression == "gzip", None) as reader:
            while len(records) < count and (header := bytes(reader.read(HEADER_BYTES))):
                (size,) = struct.unpack("<Q", header[:8])
                body = bytes(reader.read(size + FOOTER_BYTES))
                frames += header + body
                records.append(body[:-FOOTER_BYTES])
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
