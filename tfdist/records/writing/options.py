"""How records become shards, whatever they come from."""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tfdist.errors import OptionError, unknown_choice
from tfdist.records.clients.partition import Partition
from tfdist.records.format.columns import Columns
from tfdist.records.format.manifest import COMPRESSIONS
from tfdist.records.format.schema import Schema
from tfdist.records.parts import Part
from tfdist.records.writing.shard_files import Progress


def cores() -> int:
    """Returns how many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return (os.cpu_count() or 1) if affinity is None else len(affinity(0))


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """What ``writer.write`` was given of the shards; see there.

    Attributes:
        shares: of the splits; None: those of the source, or the default.
        workers: None: one for each core where records hold files of images, else 1.
        partition: how the records of the first split are dealt to clients; None: they are not.
        as_read: returns a schema with the readings of images that are asked for.
        in_order: whether the records of a split stay in the order of the source.
        part: of the shards of all splits, which are written; None: all of them.
        opened: called with the columns of the source before anything is written; None prints what
            is to be told of it.
    """

    shares: Mapping[str, float] | None = None
    num_shards: int | None = None
    stratify: bool = False
    seed: int = 0
    compression: str = "none"
    workers: int | None = None
    clients: int | None = None
    partition: Partition | None = None
    progress: Progress | None = None
    opened: Callable[[Columns], None] | None = None
    as_read: Callable[[Schema], Schema]
    in_order: bool = False
    part: Part | None = None

    def __post_init__(self) -> None:
        """Raises OptionError for what cannot hold."""
        given = {"num_shards": self.num_shards, "workers": self.workers}
        counts = {name: value for name, value in given.items() if value is not None}
        for name, value in {**counts, "seed": self.seed}.items():
            if not isinstance(value, numbers.Integral):
                raise OptionError(
                    f"{name} must be a whole number",
                    received=repr(value),
                    mend="Give it as one, without quotes or a fraction",
                )
        for name, value in counts.items():
            if value < 1:
                raise OptionError(
                    f"{name} must be at least 1", received=value, mend="Choose 1 or more"
                )
        if self.seed < 0:
            raise OptionError("seed must be 0 or more", received=self.seed, mend="Choose 0 or more")
        if self.compression not in COMPRESSIONS:
            raise unknown_choice("compression", self.compression, COMPRESSIONS)

    def needing_all_records(self) -> dict[str, bool]:
        """Returns, by name, whether what cannot be without all records at hand is asked for."""
        return {
            "stratify": self.stratify,
            "clients and partition": self.partition is not None,
            "part": self.part is not None,
        }

    def tell(self, columns: Columns) -> None:
        """Gives the user what there is to know of the source."""
        if self.opened is not None:
            self.opened(columns)
        self.tell_notes(columns.notes)

    def tell_notes(self, notes: Iterable[str]) -> None:
        """Prints them for a program; a caller with ``opened`` shows them itself."""
        for note in notes if self.opened is None else ():
            print(f"tfdist: {note}", flush=True)
