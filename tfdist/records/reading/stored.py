"""The names of shards of which some are there, or that lie apart from their manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Shards of one split that lie apart from their manifest, as a cloud delivers them.

    Attributes:
        manifest: the folder of manifest.json.
        split: name of the split.
        folder: the folder of the shards; of pipes, their path without "_<number of the pass>".
        pipes: whether the shards come through named pipes that this process alone reads.
        divided: whether this host has some of the shards, and no other host has these.
        reader: this process among those of its host that share divided shards.
        readers: how many they are.
    """

    manifest: Path
    split: str
    folder: Path
    pipes: bool = False
    divided: bool = False
    reader: int = 0
    readers: int = 1


@dataclass(frozen=True, kw_only=True)
class Section:
    """Records [start, stop) of a split: their shards alone need to be there.

    Attributes:
        path: "DIR/SPLIT", or DIR when it has one split.
    """

    path: str
    start: int
    stop: int
