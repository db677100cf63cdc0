"""Writing a stream: one pass, in memory that does not grow with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np

from tfdist import __version__
from tfdist.records.format.columns import Columns
from tfdist.records.format.encoding import (
    cut_frames,
    make_framer,
    make_layout,
    varint_width,
)
from tfdist.records.format.manifest import Manifest
from tfdist.records.format.offsets import write_offsets
from tfdist.records.wording import no_record
from tfdist.records.writing.images.options import ImageOptions
from tfdist.records.writing.options import WriteOptions
from tfdist.records.writing.shard_files import (
    STREAM_NUM_SHARDS,
    Counter,
    frame_bytes,
    shards_for,
    staging_folder,
    stop_on_sigterm,
)
from tfdist.records.writing.streams.features import StreamFeatures
from tfdist.records.writing.streams.shards import BUFFER_BYTES, StreamShards
from tfdist.records.writing.streams.stream import Chunk, Stream, chunk_bytes

# Records that are read before anything is written; a stream of no more is written as arrays are.
HEAD_BYTES = 128 << 20
# What Python needs for each value that is an object.
_OBJECT_BYTES = 64


@dataclass
class Head:
    """The first records of a stream.

    Attributes:
        chunks: (split, records) as they came.
        is_whole: whether there are no more.
    """

    chunks: list[tuple[str | None, Chunk]]
    is_whole: bool
    features: StreamFeatures

    def columns(self) -> Columns:
        """Returns the columns of all records. Only of a stream that is whole."""
        assert self.is_whole
        columns = self.features.columns()
        names = {split for split, _ in self.chunks}
        if names == {None}:
            return columns
        of = np.repeat(
            [split for split, _ in self.chunks], [_length(chunk) for _, chunk in self.chunks]
        )
        splits = {name: np.flatnonzero(of == name) for name in dict.fromkeys(of.tolist())}
        return replace(columns, splits=splits)


def read_head(stream: Stream, images: ImageOptions) -> Head:
    """Reads the first records of a stream. Raises DataError when there are none.

    Args:
        images: what is said of those among its values.
    """
    chunks, size, is_whole = [], 0, True
    for split, chunk in stream.chunks:
        chunks.append((split, chunk))
        objects = sum(not isinstance(values, np.ndarray) for values in chunk.values())
        size += chunk_bytes(chunk) + objects * _length(chunk) * _OBJECT_BYTES
        if size > HEAD_BYTES:
            is_whole = False
            break
    if not chunks:
        raise no_record("none", "a source")
    features = StreamFeatures(stream, [chunk for _, chunk in chunks], images)
    return Head(chunks, is_whole, features)


def write_stream(
    stream: Stream, head: Head, out: Path, options: WriteOptions, *, keeps_splits: bool
) -> Manifest:
    """Writes a stream that its head is only the beginning of; see ``writer.write``.

    Args:
        keeps_splits: whether records stay in the splits of the stream, which are those of
            ``options.shares``.
    """
    shares, as_read, features = options.shares, options.as_read, head.features
    as_read(features.schema())  # What cannot be is told before anything is written.
    framer = _Framer(features)
    per_split = _num_shards(stream, framer.first_bytes, shares, options.num_shards)
    counter = Counter(stream.total, options.progress)
    features.forget_head()
    framed = (
        (split if keeps_splits else None, frames, class_ids)
        for split, chunk in chain(_emptied(head.chunks), _of_source(stream.chunks))
        for frames, class_ids in framer.frames(chunk)
    )
    with staging_folder(out) as folder, stop_on_sigterm():
        shards = StreamShards(folder, shares, per_split, options.seed, options.compression)
        for split, frames, class_ids in framed:
            shards.add(frames, split, class_ids)
            counter.add(len(frames))
        manifest = Manifest(
            splits=shards.finish(is_exact=options.num_shards is not None),
            schema=as_read(features.schema()),
            layout=framer.layout,
            source=stream.kind,
            seed=options.seed,
            stratified=False,
            compression=options.compression,
            written_by=f"tfdist {__version__}",
            mixing=mixing_note(framer.mean_bytes, sum(per_split.values())),
            left_out=dict(stream.left_out),
        )
        write_offsets(folder, manifest)
        manifest.save(folder)
    stream.notes += features.notes()
    stream.notes.append(f"the records, more than fit into memory, were {manifest.mixing}")
    return manifest


class SourceFailedError(Exception):
    """An OSError of the source, which says nothing of the folder that is written."""


def _of_source(
    chunks: Iterator[tuple[str | None, Chunk]],
) -> Iterator[tuple[str | None, Chunk]]:
    try:
        yield from chunks
    except OSError as error:
        raise SourceFailedError from error


def mixing_note(record_bytes: float, num_shards: int) -> str:
    """Returns how well the records of a stream are mixed, for the manifest and the user."""
    held = f"{int(BUFFER_BYTES / max(1, record_bytes)):,} records"
    return f"dealt to {num_shards} shards at random, and mixed by a buffer of about {held}"


class _Framer:
    """Frames the records of chunks, and numbers them."""

    def __init__(self, features: StreamFeatures):
        self._features = features
        self._schema = features.schema()
        self._widths = features.widths()
        self._framer = make_framer(self._schema, self._widths)
        # That all records have; None when they have none in common.
        self.layout = make_layout(self._schema, self._widths)
        self._records = self._bytes = 0
        self.first_bytes = frame_bytes(features.columns(), self._widths, 64)

    @property
    def mean_bytes(self) -> float:
        return self._bytes / max(1, self._records)

    def frames(self, chunk: Chunk) -> Iterator[tuple[list[bytes], np.ndarray | None]]:
        """Yields the framed records of a chunk, some at a time, and their class ids."""
        block = self._features.block(chunk, self._records)
        self._widen(block)
        label = self._schema.class_label
        length, step = _length(chunk), self._framer.block_records
        for start in range(0, length, step):
            part = {name: values[start : start + step] for name, values in block.items()}
            framed, _ = cut_frames(self._framer.frame(part))
            frames = [bytes(frame) for frame in framed]  # The framer uses its block again.
            self._bytes += sum(map(len, frames))
            yield frames, None if label is None else part[label.name]
        self._records += length

    def _widen(self, block: Mapping[str, object]) -> None:
        """Makes room for numbers larger than all before; records then have no common layout."""
        needed = {name: varint_width(block[name]) for name in self._widths}
        if any(needed[name] > width for name, width in self._widths.items()):
            self._widths = {name: max(needed[name], self._widths[name]) for name in needed}
            self._framer = make_framer(self._schema, self._widths)
            self.layout = None


def _num_shards(
    stream: Stream, record_bytes: float, shares: Mapping[str, float], num_shards: int | None
) -> dict[str, int]:
    if num_shards is not None:
        return dict.fromkeys(shares, num_shards)
    parts = {name: share / sum(shares.values()) for name, share in shares.items()}
    if stream.splits is None and stream.total is not None:
        size = stream.total * record_bytes
        return {name: shards_for(part * size) for name, part in parts.items()}
    largest = max(parts.values())
    return {
        name: max(shards_for(0), round(STREAM_NUM_SHARDS * part / largest))
        for name, part in parts.items()
    }


def _emptied(chunks: list[tuple[str | None, Chunk]]) -> Iterator[tuple[str | None, Chunk]]:
    """Yields chunks, each of which is then held by nobody else."""
    chunks.reverse()
    while chunks:
        yield chunks.pop()


def _length(chunk: Chunk) -> int:
    return len(next(iter(chunk.values())))
