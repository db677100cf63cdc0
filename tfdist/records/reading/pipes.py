"""Shards that come through named pipes, one pipe for each pass over them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import DataError, TfdistError
from tfdist.records.format.frame_reader import read_pipe
from tfdist.records.format.manifest import Manifest, SplitInfo
from tfdist.records.reading.shard_source import ShardSource
from tfdist.records.reading.source import shuffled_by

# Records that cross from Python into tf.data at once: one at a time would cost more than the step.
_BLOCK_RECORDS = 512
_TIMEOUT_S = 300.0


class PipeSource(ShardSource):
    """One split, streamed: the n-th pass over it reads the pipe ``<prefix>_<n>``.

    A pass is always read to its end, so that all checksums are verified.

    Args:
        prefix: path of the pipes without "_<n>"; this process alone reads them.
        some: whether only some shards of the split come through; the first pipe is then read once
            to learn which.
    """

    is_sequential = True
    failures: tuple[TfdistError, ...] = ()
    _gives_frames = False

    def __init__(
        self,
        prefix: Path,
        split: str,
        manifest: Manifest,
        *,
        some: bool,
        any_size: bool = False,
        readers: tuple[int, int] | None = None,
    ):
        if manifest.compression != "none":
            raise DataError(
                "shards that come through pipes must not be compressed",
                received=manifest.compression,
                mend="Write them without compression, or choose input mode File or FastFile",
            )
        self._prefix = prefix
        self._passes = 0
        self._lock = threading.Lock()
        self._first: bytes | None = None
        if some:
            manifest = self._only_those_that_come(manifest, split)
        super().__init__(prefix, split, manifest, is_apart=True, any_size=any_size, readers=readers)
        self.apart = None  # There is no file to look into.

    def _watched(self, manifest: Manifest) -> None:
        """A pipe is looked at as it is read."""

    def _only_those_that_come(self, manifest: Manifest, split: str) -> Manifest:
        shards = manifest.splits[split].shards
        passed = read_pipe(self._next_pipe(), shards, some=True, timeout_s=_TIMEOUT_S)
        found = tuple(ended for _, ended in passed if ended is not None)
        if not found:
            raise DataError(
                f"{self._prefix} must give at least one shard",
                received="none",
                mend="Check that the channel's prefix has a shard of this split for each instance",
            )
        return replace(manifest, splits={split: SplitInfo(shards=found)})

    def _next_pipe(self) -> Path:
        with self._lock:
            number, self._passes = self._passes, self._passes + 1
        return Path(f"{self._prefix}_{number}")

    def _serialized(
        self, start: int, stop: int, order: tf.Tensor | None, skip_records: Any
    ) -> tf.data.Dataset:
        """Returns the serialised records in the order in which they come, shuffled by ``order``
        within a buffer only."""
        blocks = tf.data.Dataset.from_generator(
            lambda: self._blocks(start, stop), output_signature=tf.TensorSpec([None], tf.string)
        )
        records = shuffled_by(blocks.unbatch(), order, self._stored_bytes, stop - start)
        return records.skip(skip_records)

    def numbers(self, start: int, stop: int, order: tf.Tensor | None) -> tf.data.Dataset:
        """As of ``_serialized``: shards come in their own order."""
        numbers = tf.data.Dataset.range(start, stop)
        return shuffled_by(numbers, order, self._stored_bytes, stop - start)

    def _blocks(self, start: int, stop: int) -> Iterator[np.ndarray]:
        if (start, stop) == (0, 1) and self._first is not None:
            # Padding wants a real record: not worth a pass.
            yield np.array([self._first], object)
            return
        block: list[bytes] = []
        try:
            passed = read_pipe(self._next_pipe(), self._shards, some=False, timeout_s=_TIMEOUT_S)
            for number, (record, _) in enumerate(passed):
                if number == 0:
                    self._first = record
                if not start <= number < stop:
                    continue
                # Not before the next one came: what ends a shard that is wrong is not given.
                if len(block) == _BLOCK_RECORDS:
                    yield np.array(block, object)
                    block = []
                block.append(record)
        except TfdistError as error:
            self.failures = (error,)  # TensorFlow hands on a text only.
            raise
        if block:
            yield np.array(block, object)
