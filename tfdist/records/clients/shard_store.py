"""Clients whose records are shards. TensorFlow is needed to read them, not to count them."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.errors import DataError
from tfdist.records.clients.stores import ClientStore
from tfdist.records.format.checking import ShardReader, damage
from tfdist.records.format.encoding import FOOTER_BYTES, HEADER_BYTES, cut_frames
from tfdist.records.format.manifest import (
    Layout,
    Manifest,
    ShardInfo,
    client_folders,
    load_manifest,
)
from tfdist.records.format.schema import Feature, Schema


@dataclass(frozen=True)
class _Part:
    """The shards of one client."""

    folder: Path
    manifest: Manifest
    shards: tuple[ShardInfo, ...]
    class_counts: Mapping[int, int] | None


class ShardStore(ClientStore):
    """Clients whose records are shards: of one folder, or of a folder for each client.

    Attributes:
        schema: that of most clients.
        errors: why the manifests of some clients cannot be read.
    """

    def __init__(
        self,
        parts: Mapping[str, _Part | DataError],
        schema: Schema,
        *,
        partition: str | None = None,
    ):
        self.partition = partition
        self._parts = parts
        self.schema = schema
        self.errors = {name: part for name, part in parts.items() if isinstance(part, DataError)}
        self._decoders: dict[Hashable, Any] = {}
        self.ids = tuple(parts)
        label = schema.class_label
        self.class_names = None if label is None else label.classes

    @classmethod
    def of_split(cls, folder: Path, split: str, manifest: Manifest) -> ShardStore:
        """Returns the clients of a split whose shards have clients."""
        info = manifest.splits[split]
        parts = {
            client: _Part(folder, manifest, shards, _sum_counts([s.class_counts for s in shards]))
            for client, shards in info.clients.items()
        }
        return cls(parts, manifest.schema, partition=info.partition)

    @classmethod
    def of_folders(cls, root: Path, split: str | None) -> ShardStore:
        """Returns a client for each folder in ``root``.

        A folder that cannot be read is a client that cannot be read.

        Args:
            split: read this split of each; None for the only one.

        Raises:
            DataError: no folder can be read, or they have several splits and none is chosen.
        """
        parts: dict[str, _Part | DataError] = {}
        # Most manifests say the same: what is equal is kept once.
        schemas: dict[Schema, Schema] = {}
        usual: Counter[Schema] = Counter()
        layouts: dict[Hashable, Layout | None] = {}
        for folder in client_folders(root):
            try:
                manifest = load_manifest(folder)
                name = _only_split(root, manifest) if split is None else split
                if name not in manifest.splits:
                    raise DataError(
                        f"{folder} must have a split '{name}'",
                        received=f"only {', '.join(manifest.splits)}",
                        mend="Choose a split that all clients have, or move this folder away",
                    )
            except DataError as error:
                parts[folder.name] = error
                continue
            usual[_of_any_size(manifest.schema)] += 1
            info = manifest.splits[name]
            shared = dataclasses.replace(
                manifest,
                schema=schemas.setdefault(manifest.schema, manifest.schema),
                layout=layouts.setdefault(_key(manifest.layout), manifest.layout),
                splits={},
            )
            parts[folder.name] = _Part(folder, shared, info.shards, info.class_counts)
        if not usual:
            # More likely a folder that does not exist than a split that no client has.
            if split is not None:
                load_manifest(root / split)
            raise next(iter(parts.values()))
        wanted = usual.most_common(1)[0][0]
        alike = []
        for name, part in parts.items():
            if not isinstance(part, _Part):
                continue
            found = _of_any_size(part.manifest.schema)
            if found == wanted:
                alike.append(part.manifest.schema)
                continue
            parts[name] = DataError(
                f"all clients in {root} must have the same features, and {name} those of most",
                received=_difference(found, wanted),
                mend="Write its shards again from the same columns, or move its folder away",
            )
        return cls(parts, _of_all_lengths(alike))

    @property
    def spec(self) -> Any:
        from tfdist.records.reading.decode import batch_spec
        from tfdist.records.reading.images import check_one_size

        check_one_size(self.schema)
        return batch_spec(self.schema)

    def num_records(self, client_id: str) -> int:
        part = self._parts[client_id]
        return 0 if isinstance(part, DataError) else sum(shard.records for shard in part.shards)

    def class_counts(self, client_id: str) -> dict[int, int] | None:
        part = self._parts[client_id]
        if isinstance(part, DataError) or part.class_counts is None:
            return None
        return dict(part.class_counts)

    def read(self, client_id: str) -> Any:
        part = self._parts[client_id]
        if isinstance(part, DataError):
            raise part
        import tensorflow as tf

        if part.manifest.layout is None:
            examples = [
                example
                for shard in part.shards
                for example in read_examples(part.folder, shard, part.manifest)
            ]
            return self._decoder(None)(tf.constant(examples))
        rows = [read_rows(part.folder, shard, part.manifest) for shard in part.shards]
        return self._decoder(part.manifest.layout)(
            tf.constant(rows[0] if len(rows) == 1 else np.concatenate(rows))
        )

    def _decoder(self, layout: Layout | None) -> Any:
        """Returns a traced function, one for each layout."""
        key = _key(layout)
        if key not in self._decoders:
            import tensorflow as tf

            from tfdist.records.reading.decode import decode_rows, make_decoder

            def decode(rows: tf.Tensor) -> Any:
                return decode_rows(self.schema, layout, rows)

            if layout is None:
                decode, given = make_decoder(self.schema, None), tf.TensorSpec([None], tf.string)
            else:
                given = tf.TensorSpec([None, layout.record_bytes], tf.uint8)
            traced = tf.function(decode, input_signature=[given], autograph=False)
            self._decoders[key] = traced.get_concrete_function()
        return self._decoders[key]


def _only_split(root: Path, manifest: Manifest) -> str:
    if len(manifest.splits) > 1:
        known = ", ".join(str(root / name) for name in manifest.splits)
        raise DataError(
            "one split of each client must be chosen",
            received=f"only {root}",
            mend=f"Choose one of {known}",
        )
    return next(iter(manifest.splits))


def _key(layout: Layout | None) -> Hashable:
    return None if layout is None else (layout.record_bytes, tuple(layout.slots.items()))


def _of_any_size(schema: Schema) -> Schema:
    """Returns a schema without the sizes that may differ from client to client."""

    return Schema(
        tuple(
            dataclasses.replace(feature, longest=1) if feature.is_ragged else _any_image(feature)
            for feature in schema.features
        )
    )


def _any_image(feature: Feature, *, upright: bool = False) -> Feature:
    """Returns a feature that reads images of any size, when they are read in one.

    Args:
        upright: whether those of some client are turned; the others have nothing to be turned.
    """
    if feature.is_image:
        reading = dataclasses.replace(feature.reading, upright=upright)
        feature = dataclasses.replace(feature, reading=reading)
    if feature.is_image and feature.reading.size is not None:
        return dataclasses.replace(feature, shape=(None, None, feature.shape[2]))
    return feature


def _of_all_lengths(schemas: Sequence[Schema]) -> Schema:
    """Returns a schema that reads the longest record of any client whole."""
    features = zip(*(schema.features for schema in schemas), strict=True)
    return Schema(
        tuple(
            dataclasses.replace(same[0], longest=max(feature.longest for feature in same))
            if same[0].is_ragged
            else _any_image(same[0], upright=any(f.reading.upright for f in same))
            for same in features
        )
    )


def _difference(schema: Schema, wanted: Schema) -> str:
    """Returns the first feature that differs."""
    ours = {feature.name: feature for feature in schema.features}
    for feature in wanted.features:
        found = ours.pop(feature.name, None)
        if found is None:
            return f"no feature '{feature.name}'"
        if found != feature:
            return (
                f"'{feature.name}' of {found.dtype} {list(found.shape)}, where others have "
                f"{feature.dtype} {list(feature.shape)}"
                if (found.dtype, found.shape) != (feature.dtype, feature.shape)
                else f"'{feature.name}' with other class names, column names or encoding"
            )
    return f"a feature '{next(iter(ours))}'" if ours else "the features in another order"


def _sum_counts(counts: list[Mapping[int, int] | None]) -> dict[int, int] | None:
    if None in counts:
        return None
    total: Counter[int] = Counter()
    for of_shard in counts:
        total.update(of_shard)
    return dict(sorted(total.items()))


# Reading a small shard in one go, with NumPy alone: every byte is checked against the manifest.


def read_rows(folder: Path, shard: ShardInfo, manifest: Manifest) -> np.ndarray:
    """Returns the Examples of a shard with a layout, uint8 [records, record_bytes].

    Raises:
        CorruptShardError: the shard is missing or not as it was written.
    """
    assert manifest.layout is not None
    data = _read(folder, shard, manifest)
    if len(data) != shard.records * manifest.layout.frame_bytes:
        raise damage(folder, shard, manifest)
    frames = np.frombuffer(data, np.uint8).reshape(shard.records, -1)
    return frames[:, HEADER_BYTES:-FOOTER_BYTES]


def read_examples(folder: Path, shard: ShardInfo, manifest: Manifest) -> list[bytes]:
    """Returns the Examples of any shard. Raises as ``read_rows``."""
    data = _read(folder, shard, manifest)
    frames, end = cut_frames(data)
    if len(frames) != shard.records or end != len(data):
        raise damage(folder, shard, manifest)
    return [bytes(frame[HEADER_BYTES:-FOOTER_BYTES]) for frame in frames]


def _read(folder: Path, shard: ShardInfo, manifest: Manifest) -> memoryview:
    """Returns the uncompressed bytes of the file.

    They are what was written when the checksum of the file is: then those of its records need not
    be looked at one by one.
    """
    path = manifest.shard_folder(folder) / shard.file
    with contextlib.suppress(OSError):
        if path.stat().st_size == shard.bytes:
            with ShardReader(path, manifest.compression == "gzip", None) as reader:
                data = reader.read(sys.maxsize)
            if reader.broken is None and f"{reader.checksum:08x}" == shard.checksum:
                return data
    raise damage(folder, shard, manifest)
