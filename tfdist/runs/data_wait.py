"""What is said of the time that a training has waited for its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tfdist.errors import TfdistError

# A share of the steps' time: below it, other things are worth a look first.
MUCH = 0.2
_SMALL_SHARD_BYTES = 1 << 20
_KEPT_BYTES = 512 << 20


def told(summary: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """Returns lines for people: what share it was, and what to change where it was much.

    Args:
        summary: of the training, as in metrics.json.
        config: what it was asked for.
    """
    share = summary.get("data_wait")
    if share is None:
        return [
            "waiting was not measured: an execution of several steps (steps_per_execution) fetches "
            "its batches itself"
        ]
    lines = [f"steps waited {share:.0%} of their time for data"]
    if share > MUCH:
        lines.append(f"to wait less: {', or '.join(_remedies(config))}")
    return lines


def _remedies(config: dict[str, Any]) -> list[str]:
    from tfdist.records.format.manifest import load_manifest

    found = ["give each process more cores"]
    if config.get("augment"):
        found.append("change less with --augment")
    try:
        manifest = load_manifest(Path(config["splits"]["train"]).parent)
    except TfdistError:
        return found
    shards = [shard for info in manifest.splits.values() for shard in info.shards]
    images = [feature for feature in manifest.schema.features if feature.is_image]
    if any(feature.reading.size is not None for feature in images):
        found.append("write images in the size they are read in: tfdist shard --write-resized")
    if sum(shard.bytes for shard in shards) < _KEPT_BYTES:
        return found  # After the first epoch nothing is read any more.
    if manifest.compression != "none" and not images:
        found.append("write shards that are not compressed: tfdist shard --compression none")
    if len(shards) > len(manifest.splits) and all(s.bytes < _SMALL_SHARD_BYTES for s in shards):
        found.append("write fewer, larger shards: tfdist shard --num-shards")
    return found
