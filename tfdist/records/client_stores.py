"""Where the records of clients lie: in shards, or in arrays. One client is read at a time."""

from __future__ import annotations

import abc
import dataclasses
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.errors import DataError
from tfdist.records.columns import count_classes
from tfdist.records.manifest import Layout, Manifest, ShardInfo, client_folders, load_manifest
from tfdist.records.schema import Schema
from tfdist.records.skew import Skew, measure_skew


class ClientStore(abc.ABC):
    """The records of some clients, not yet read.

    Attributes:
        ids: the clients.
        spec: of a batch, (x,), (x, y) or (x, y, sample_weight) of tf.TensorSpec.
        class_names: the names of the class ids; None when they have none.
        partition: how the records were dealt, "dirichlet:0.3"; None when that is not known.
    """

    ids: tuple[str, ...]
    class_names: tuple[str, ...] | None = None
    partition: str | None = None

    @property
    @abc.abstractmethod
    def spec(self) -> Any: ...

    @abc.abstractmethod
    def num_records(self, client_id: str) -> int:
        """Returns how many records the client has; 0 when its manifest or arrays cannot be read."""

    @abc.abstractmethod
    def class_counts(self, client_id: str) -> dict[int, int] | None:
        """Returns the number of records of each class id; None without class ids."""

    def skew(self) -> Skew:
        return measure_skew(
            self.ids,
            [self.num_records(client) for client in self.ids],
            [self.class_counts(client) for client in self.ids],
            class_names=self.class_names,
            partition=self.partition,
        )

    @abc.abstractmethod
    def read(self, client_id: str) -> Any:
        """Returns the client's records as tensors of ``spec``. Raises DataError."""


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

    def __init__(self, parts: Mapping[str, _Part | DataError], schema: Schema):
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
        parts = {}
        for client, shards in manifest.splits[split].clients.items():
            counted = [shard.class_counts for shard in shards]
            parts[client] = _Part(folder, manifest, shards, _sum_counts(counted))
        store = cls(parts, manifest.schema)
        store.partition = manifest.splits[split].partition
        return store

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
                        f"{folder} has a split '{name}'", received=", ".join(manifest.splits)
                    )
            except DataError as error:
                parts[folder.name] = error
                continue
            usual[manifest.schema] += 1
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
        return cls(parts, usual.most_common(1)[0][0])

    @property
    def spec(self) -> Any:
        from tfdist.records.decode import batch_spec

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
        if part.manifest.schema != self.schema:
            raise DataError(
                "all clients have the same features",
                received=_difference(part.manifest.schema, self.schema),
            )
        import tensorflow as tf

        from tfdist.records.whole_shards import read_examples, read_rows

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
            self._decoders[key] = self._trace(layout)
        return self._decoders[key]

    def _trace(self, layout: Layout | None) -> Any:
        import tensorflow as tf

        from tfdist.records.decode import decode_rows, make_decoder

        if layout is None:
            return tf.function(
                make_decoder(self.schema, None),
                input_signature=[tf.TensorSpec([None], tf.string)],
                autograph=False,
            ).get_concrete_function()
        return tf.function(
            lambda rows: decode_rows(self.schema, layout, rows),
            input_signature=[tf.TensorSpec([None, layout.record_bytes], tf.uint8)],
            autograph=False,
        ).get_concrete_function()


def _only_split(root: Path, manifest: Manifest) -> str:
    if len(manifest.splits) > 1:
        known = ", ".join(str(root / name) for name in manifest.splits)
        raise DataError(
            "one split of each client is read", received=str(root), mend=f"Choose one of {known}"
        )
    return next(iter(manifest.splits))


def _key(layout: Layout | None) -> Hashable:
    return None if layout is None else (layout.record_bytes, tuple(layout.slots.items()))


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


class RowStore(ClientStore):
    """Clients that have some of the rows of arrays."""

    def __init__(self, arrays: tuple[Any, ...], rows: Mapping[str, np.ndarray]):
        self._arrays = arrays
        self._rows = rows
        self.ids = tuple(rows)
        self._class_ids = class_ids(arrays)

    @property
    def spec(self) -> Any:
        return _spec(self._arrays)

    def num_records(self, client_id: str) -> int:
        return len(self._rows[client_id])

    def class_counts(self, client_id: str) -> dict[int, int] | None:
        if self._class_ids is None:
            return None
        return count_classes(self._class_ids[self._rows[client_id]])

    def read(self, client_id: str) -> Any:
        import tensorflow as tf

        rows = self._rows[client_id]
        return tf.nest.map_structure(lambda array: array[rows], self._arrays)


class ArrayStore(ClientStore):
    """Clients that have arrays of their own."""

    def __init__(self, arrays: Mapping[Any, Any]):
        from tfdist.records.streams import ArraySource

        self._arrays: dict[str, tuple[Any, ...] | DataError] = {}
        for client, given in arrays.items():
            try:
                parts = given if isinstance(given, tuple) else (given,)
                self._arrays[str(client)] = ArraySource(parts).arrays
            except DataError as error:
                self._arrays[str(client)] = error
        if len(self._arrays) != len(arrays):
            raise DataError("each client has a name of its own", received="two of the same name")
        self.ids = tuple(self._arrays)
        specs = [_spec(part) for part in self._arrays.values() if not isinstance(part, DataError)]
        if not specs:
            errors = [part for part in self._arrays.values() if isinstance(part, DataError)]
            raise (
                errors[0] if errors else DataError("there is at least one client", received="none")
            )
        described = Counter(str(spec) for spec in specs)
        usual = described.most_common(1)[0][0]
        self._spec = next(spec for spec in specs if str(spec) == usual)

    @property
    def spec(self) -> Any:
        return self._spec

    def num_records(self, client_id: str) -> int:
        import tensorflow as tf

        part = self._arrays[client_id]
        return 0 if isinstance(part, DataError) else len(tf.nest.flatten(part)[0])

    def class_counts(self, client_id: str) -> dict[int, int] | None:
        part = self._arrays[client_id]
        ids = None if isinstance(part, DataError) else class_ids(part)
        return None if ids is None else count_classes(ids)

    def read(self, client_id: str) -> Any:
        part = self._arrays[client_id]
        if isinstance(part, DataError):
            raise part
        if str(_spec(part)) != str(self._spec):
            raise DataError(
                "all clients have arrays of the same shapes and dtypes",
                received=f"{_described(_spec(part))}, where others have {_described(self._spec)}",
            )
        return part


def _spec(arrays: tuple[Any, ...]) -> Any:
    import tensorflow as tf

    return tf.nest.map_structure(
        lambda array: tf.TensorSpec((None, *array.shape[1:]), tf.as_dtype(array.dtype)), arrays
    )


def _described(spec: Any) -> str:
    import tensorflow as tf

    return str(
        tf.nest.map_structure(lambda leaf: f"{leaf.dtype.name} {leaf.shape[1:].as_list()}", spec)
    )


def class_ids(arrays: tuple[Any, ...]) -> np.ndarray | None:
    """Returns int64 [records] when ``arrays``, (x, y, ...), have one label of class ids."""
    if len(arrays) < 2 or isinstance(arrays[1], Mapping):
        return None
    labels = np.asarray(arrays[1])
    if labels.dtype.kind not in "iu" or labels.shape not in ((len(labels),), (len(labels), 1)):
        return None
    return labels.reshape(-1).astype(np.int64, copy=False)
