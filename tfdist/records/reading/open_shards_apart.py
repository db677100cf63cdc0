"""Opening shards that lie apart from their manifest: see ``records.reading.stored.Stored``."""

from __future__ import annotations

from dataclasses import replace

from tfdist.errors import DataError
from tfdist.records.format.manifest import Manifest, SplitInfo, load_manifest
from tfdist.records.reading.pipes import PipeSource
from tfdist.records.reading.shard_source import ShardSource
from tfdist.records.reading.stored import Stored


def open_stored(stored: Stored, *, any_size: bool = False) -> ShardSource:
    """Returns the source of shards that a cloud delivers.

    Args:
        any_size: see ``ShardSource``.

    Raises:
        DataError: no manifest or split, or this host has none of the shards.
    """
    manifest = replace(load_manifest(stored.manifest), shards_in=None)
    if stored.split not in manifest.splits:
        raise DataError(
            "the split must be one that the manifest names",
            received=f"'{stored.split}'",
            mend=f"Choose one of {', '.join(manifest.splits)}",
        )
    given = {
        "any_size": any_size,
        "readers": (stored.reader, stored.readers) if stored.divided else None,
    }
    if stored.pipes:
        return PipeSource(stored.folder, stored.split, manifest, some=stored.divided, **given)
    if stored.divided:
        manifest = _only_present(manifest, stored)
    return ShardSource(stored.folder, stored.split, manifest, is_apart=True, **given)


def _only_present(manifest: Manifest, stored: Stored) -> Manifest:
    shards = manifest.splits[stored.split].shards
    present = tuple(shard for shard in shards if (stored.folder / shard.file).is_file())
    if not present:
        raise DataError(
            f"every host must have at least one shard of split '{stored.split}'",
            received=f"none in {stored.folder}",
            mend="Write more shards with `tfdist shard --num-shards`, or use fewer hosts",
        )
    return replace(manifest, splits={stored.split: SplitInfo(shards=present)})
