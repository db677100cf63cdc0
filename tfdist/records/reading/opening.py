"""From what a user names as data to the ``OrderedRecords`` that reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import DataError
from tfdist.records.format.manifest import Manifest, SplitInfo, find_split, load_manifest
from tfdist.records.reading.batched import check_dense, single_records
from tfdist.records.reading.pipes import PipeSource
from tfdist.records.reading.rereadable import records_of
from tfdist.records.reading.shard_source import ShardSource, of_section
from tfdist.records.reading.source import ArraySource, DatasetSource, OrderedRecords
from tfdist.records.reading.stored import Section, Stored
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
        return _open_stored(source, any_size=any_size)
    if isinstance(source, Section):
        return of_section(source, any_size=any_size)
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


def _open_stored(stored: Stored, *, any_size: bool) -> ShardSource:
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
        # S3 gives its keys in their order; adopted files are in that of their numbers: 2, 10.
        info = manifest.splits[stored.split]
        shards = tuple(sorted(info.shards, key=lambda shard: shard.file.encode()))
        manifest = replace(manifest, splits={stored.split: replace(info, shards=shards)})
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
