"""From what a user names as data to the ``OrderedRecords`` that reads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import DataError
from tfdist.records.buckets.cache import local_shards
from tfdist.records.format.manifest import MANIFEST_NAME, Manifest, load_manifest
from tfdist.records.reading.batched import check_dense, single_records
from tfdist.records.reading.open_shards_apart import open_stored
from tfdist.records.reading.rereadable import records_of
from tfdist.records.reading.shard_source import ShardSource
from tfdist.records.reading.source import ArraySource, DatasetSource, OrderedRecords
from tfdist.records.reading.stored import Stored
from tfdist.records.sources.dataframes import is_frame
from tfdist.records.sources.recognise import called, recognise, refuse_batched


def open_source(
    source: Any, batched: bool | None = None, *, any_size: bool = False
) -> OrderedRecords:
    """Returns the source of what ``reader.open_records`` takes.

    Args:
        any_size: see ``ShardSource``.
    """
    found = called(recognise(source))
    if found.kind == "dataset":
        check_dense(found.given.element_spec)
        return DatasetSource(single_records(found.given, batched))
    if found.kind == "iterator":
        raise DataError(
            "data must be readable again in each epoch",
            received=f"a {type(source).__name__} object, which can be read only once",
            mend="Give the function that makes it, strategy.dataset(read), where it says "
            "strategy.dataset(read()), or arrays, or a tf.data.Dataset",
        )
    if found.kind == "huggingface" and isinstance(found.given, Mapping):
        names = list(found.given)
        raise DataError(
            "one split must be chosen",
            received=f"a dict of {', '.join(map(repr, names))}",
            mend=f"Give one of its datasets: data[{names[0]!r}]",
        )
    if found.read is not None:
        return DatasetSource(records_of(found, batched))
    refuse_batched(batched, source)
    if isinstance(source, Stored):
        return open_stored(source, any_size=any_size)
    if isinstance(source, (str, Path)):
        return ShardSource(*find_split(Path(source)), any_size=any_size)
    if isinstance(source, tuple):
        return ArraySource(source)
    if isinstance(source, (Mapping, np.ndarray, tf.Tensor)) or is_frame(source):
        return ArraySource((source,))
    raise DataError(
        "data must be a folder of shards, arrays or tables (x, y), a tf.data.Dataset, a "
        "keras.utils.Sequence, or a function that yields records or batches",
        received=f"a {type(source).__name__}",
        mend="Give one of these, such as (x, y)",
    )


def find_split(path: Path) -> tuple[Path, str, Manifest]:
    """Returns the folder, the split and the manifest of "DIR/SPLIT", or of DIR with one split.

    Raises:
        DataError: no such folder, manifest or split.
    """
    path = local_shards(path)
    # Files that others wrote may lie in a folder that is called as their split.
    is_within = not (path / MANIFEST_NAME).is_file() and (path.parent / MANIFEST_NAME).is_file()
    if path.is_dir() and not (is_within and path.name in load_manifest(path.parent).splits):
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
