"""Which folder, split and manifest a path or URL of shards names."""

from __future__ import annotations

from pathlib import Path

from tfdist.errors import DataError
from tfdist.records.buckets.cache import local_shards
from tfdist.records.format.manifest import MANIFEST_NAME, Manifest, load_manifest


def is_split_beside(path: Path) -> bool:
    """Whether a folder is called as a split of the manifest beside it.

    Files that others wrote may lie in such a folder.
    """
    is_within = not (path / MANIFEST_NAME).is_file() and (path.parent / MANIFEST_NAME).is_file()
    return is_within and path.name in load_manifest(path.parent).splits


def find_split(path: Path) -> tuple[Path, str, Manifest]:
    """Returns the folder, the split and the manifest of "DIR/SPLIT", or of DIR with one split.

    Raises:
        DataError: no such folder, manifest or split.
    """
    path = local_shards(path)
    if path.is_dir() and not is_split_beside(path):
        folder, split = path, None
    else:
        folder, split = path.parent, path.name
        if not (folder / MANIFEST_NAME).is_file():
            folder, split = path, None
    manifest = load_manifest(folder)
    known = ", ".join(str(folder / name) for name in manifest.splits)
    if split is None and len(manifest.splits) > 1:
        raise DataError(
            "one split must be chosen", received=f"only {folder}", mend=f"Choose one of {known}"
        )
    split = split or next(iter(manifest.splits))
    if split not in manifest.splits:
        raise DataError(
            "the split must be one that the manifest names",
            received=f"'{split}'",
            mend=f"Choose one of {known}",
        )
    return folder, split, manifest
