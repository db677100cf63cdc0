"""Reading a section of a split: see ``records.reading.section.Section``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.records.format.split_place import find_split
from tfdist.records.reading.section import Section
from tfdist.records.reading.shard_source import ShardSource
from tfdist.records.reading.source import OrderedRecords


class SectionSource(OrderedRecords):
    """The records of a section, numbered from 0.

    Args:
        any_size: see ``ShardSource``.

    Raises:
        DataError: the shards cannot be read; CorruptShardError: one that is needed is not there.
    """

    def __init__(self, section: Section, *, any_size: bool = False):
        folder, split, manifest = find_split(Path(section.path))
        info = manifest.splits[split]
        assert 0 <= section.start < section.stop <= info.records, section
        needed, first, before = [], 0, 0
        for shard in info.shards:
            if before + shard.records <= section.start:
                first = before + shard.records
            elif before < section.stop:
                needed.append(shard)
            before += shard.records
        splits = {split: replace(info, shards=tuple(needed))}
        self._shards = ShardSource(
            folder, split, replace(manifest, splits=splits), is_apart=True, any_size=any_size
        )
        self._skipped = section.start - first
        self.num_records = section.stop - section.start
        self.spec, self.schema, self.apart = (
            self._shards.spec,
            self._shards.schema,
            self._shards.apart,
        )

    @property
    def record_bytes(self) -> int | None:
        return self._shards.record_bytes

    @property
    def failures(self) -> Sequence[TfdistError]:
        return self._shards.failures

    def stream(self, start: int, stop: int, *given: Any) -> tf.data.Dataset:
        return self._shards.stream(start + self._skipped, stop + self._skipped, *given)

    def singles(
        self, start: int, stop: int, *given: Any
    ) -> tuple[tf.data.Dataset, Callable[[Any], Any]]:
        return self._shards.singles(start + self._skipped, stop + self._skipped, *given)

    def numbers(self, start: int, stop: int, order: tf.Tensor | None) -> tf.data.Dataset:
        skipped = self._skipped
        found = self._shards.numbers(start + skipped, stop + skipped, order)
        return found.map(lambda number: number - skipped)

    def lengths(self) -> np.ndarray:
        return self._shards.lengths()[self._skipped : self._skipped + self.num_records]

    def check_can_choose(self) -> None:
        self._shards.check_can_choose()

    def chosen(self, numbers: tf.data.Dataset) -> tf.data.Dataset:
        return self._shards.chosen(numbers.map(lambda of_batch: of_batch + self._skipped))

    def confirm(self) -> None:
        self._shards.confirm()
