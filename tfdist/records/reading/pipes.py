"""Shards that come through named pipes, one pipe for each pass over them.

A pipe cannot be sought. The shards of a split follow each other there without a mark between them.
Where one ends is known from the manifest: by its number of records when all shards come in its
order, by its checksum when only some come.
"""

from __future__ import annotations

import io
import os
import select
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import tensorflow as tf
from crc32c import crc32c

from tfdist.errors import CorruptShardError, DataError, TfdistError
from tfdist.records.format.encoding import FOOTER_BYTES, HEADER_BYTES, is_summed, length_in
from tfdist.records.format.manifest import Manifest, ShardInfo, SplitInfo
from tfdist.records.reading.shard_source import ShardSource
from tfdist.records.reading.source import Wanted, shuffled_by

# Records that cross from Python into tf.data at once: one at a time would cost more than the step.
_BLOCK_RECORDS = 512
_TIMEOUT_S = 300.0
_BUFFER_BYTES = 1 << 20
_TICK_S = 0.05


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
        passed = read_pipe(self._next_pipe(), shards, some=True)
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

    def _serialized(self, wanted: Wanted) -> tf.data.Dataset:
        """Returns the serialised records in the order in which they come, shuffled within a buffer
        only."""
        start, stop = wanted.start, wanted.stop
        blocks = tf.data.Dataset.from_generator(
            lambda: self._blocks(start, stop), output_signature=tf.TensorSpec([None], tf.string)
        )
        records = shuffled_by(blocks.unbatch(), wanted.order, self._stored_bytes, stop - start)
        return records.skip(wanted.skip)

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
            passed = read_pipe(self._next_pipe(), self._shards, some=False)
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


class PipeFile(io.RawIOBase):
    """The read end of a named pipe, with a limit on every wait.

    Raises:
        DataError: no pipe, or no data, within ``_TIMEOUT_S`` seconds.
    """

    def __init__(self, path: Path):
        super().__init__()
        self._path = path
        deadline = time.monotonic() + _TIMEOUT_S
        while not path.exists():  # The next pass's pipe is made when this one's has been opened.
            if time.monotonic() > deadline:
                raise self._silence("there is no such pipe")
            time.sleep(_TICK_S)
        # A blocking open would wait for a writer without a limit.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        while True:
            # A pipe that no writer has opened yet polls as neither readable nor hung up.
            if not self._poll.poll(_TIMEOUT_S * 1000):
                raise self._silence("nothing came")
            try:
                return os.readv(self._descriptor, [buffer])
            except BlockingIOError:
                continue

    def close(self) -> None:
        if not self.closed and hasattr(self, "_descriptor"):
            os.close(self._descriptor)
        super().close()

    def _silence(self, what: str) -> DataError:
        return DataError(
            f"{self._path} must give data within {_TIMEOUT_S:g} s",
            received=what,
            mend="Check that the channel's input mode is Pipe, and that one process reads it",
        )


def read_pipe(
    path: Path, shards: tuple[ShardInfo, ...], *, some: bool
) -> Iterator[tuple[bytes, ShardInfo | None]]:
    """Yields each record of one pass, and with the last one of a shard that shard.

    Args:
        path: a named pipe that gives the bytes of shards one after the other.
        shards: those that come, in this order; with ``some``, those of which some come, in any.

    Raises:
        CorruptShardError: bytes that are not as they were written, or too few of them; the message
            names the shard, the record and the offset.
        DataError: the pipe does not come or falls silent.
    """
    with PipeFile(path) as raw, io.BufferedReader(raw, _BUFFER_BYTES) as stream:
        left = list(shards)
        while left:
            found = None
            known = left if some else left[:1]
            for record, ended in _read_shard(stream, path, known, may_end=some):
                found = ended
                yield record, ended
            if found is None:  # The stream ended between two shards.
                return
            left.remove(found)
        if stream.read(1):
            raise CorruptShardError(
                f"{path} must end with the last shard of the manifest",
                received="more bytes",
                mend="Check that the channel's prefix holds the shards of this split alone",
            )


def _read_shard(
    stream: io.BufferedReader, path: Path, known: list[ShardInfo], *, may_end: bool
) -> Iterator[tuple[bytes, ShardInfo | None]]:
    record, offset, checksum = 0, 0, 0
    most = max(shard.bytes for shard in known)
    lengths = {shard.records for shard in known}
    longest = max(lengths)
    name = known[0].file if len(known) == 1 else "a shard"

    def corrupt(reason: str) -> CorruptShardError:
        return CorruptShardError(
            f"{path} must give the shards as they were written",
            received=f"{name}, record {record}, byte {offset}: {reason}",
            mend="Check the files with `tfdist inspect DIR --check`, and upload them again",
        )

    while record < longest:
        header = stream.read(HEADER_BYTES)
        if not header and record == 0 and may_end:
            return
        if len(header) < HEADER_BYTES:
            raise corrupt(f"the stream ends ({len(header)} of {HEADER_BYTES} bytes)")
        length = length_in(header)
        if length is None:
            raise corrupt("the length does not match its checksum")
        if length > most:
            raise corrupt(f"the length is {length}, more than any shard has")
        body = stream.read(length + FOOTER_BYTES)
        if len(body) < length + FOOTER_BYTES:
            raise corrupt(f"the stream ends ({len(body)} of {length + FOOTER_BYTES} bytes)")
        data = body[:length]
        if not is_summed(data, body[length:]):
            raise corrupt("the data does not match its checksum")
        checksum = crc32c(body, crc32c(header, checksum))
        record += 1
        offset += HEADER_BYTES + len(body)
        ended = None
        if record in lengths:
            found = (record, offset, f"{checksum:08x}")
            ended = next((s for s in known if (s.records, s.bytes, s.checksum) == found), None)
        yield data, ended
        if ended is not None:
            return
    raise corrupt("these bytes are of no shard of the manifest that is still to come")
