"""Cross-validation: folders that call a part of the training's shards its validation."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from tfdist.errors import OptionError, spelt
from tfdist.records.buckets.urls import refuse_url


def write(data: str, folds: int, folder: Path) -> list[str]:
    """Returns a folder of shards for each fold; the shards themselves stay where they are.

    Shard n of the training is validated on in fold n modulo ``folds``, and trained on in all
    others.

    Args:
        data: a folder of shards with the split train, or "DIR/SPLIT".
        folder: where they are made.

    Raises:
        OptionError: there are fewer shards than folds, or shards of clients.
    """
    from tfdist.records.format.manifest import SplitInfo, load_manifest
    from tfdist.runs.training import find_splits

    refuse_url(data, "the data of a cross-validation")
    place = Path(find_splits(data)["train"])
    manifest = load_manifest(place.parent)
    split = manifest.splits[place.name]
    if len(split.shards) < folds or split.has_clients:
        clients = ", divided into clients" if split.has_clients else ""
        raise OptionError(
            "a cross-validation must have a shard for each fold, of data without clients",
            received=f"{len(split.shards)} shards{clients} with {spelt('folds', folds)}",
            mend="Write more with `tfdist shard --num-shards N`, or choose fewer folds",
        )
    shards_in = manifest.shard_folder(place.parent).resolve()
    made = []
    for fold in range(folds):
        held_out = tuple(split.shards[fold::folds])
        others = tuple(shard for shard in split.shards if shard not in held_out)
        path = folder / str(fold)
        path.mkdir(parents=True, exist_ok=True)
        splits = {"train": SplitInfo(shards=others), "validation": SplitInfo(shards=held_out)}
        replace(manifest, splits=splits, shards_in=os.path.relpath(shards_in, path.resolve())).save(
            path
        )
        made.append(str(path))
    return made
