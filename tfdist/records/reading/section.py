"""The name of some records of a split that follow each other, as if there were no others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Section:
    """Records [start, stop) of a split: their shards alone need to be there.

    Attributes:
        path: "DIR/SPLIT", or DIR when it has one split.
    """

    path: str
    start: int
    stop: int
