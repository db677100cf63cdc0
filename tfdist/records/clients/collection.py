"""The clients of federated learning: who they are, what each one has, and its records as arrays.

``open_clients`` opens them; a client is read only when it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import DataError, OptionError
from tfdist.records.buckets.cache import local_shards
from tfdist.records.clients.partition import (
    Partition,
    check_num_clients,
    deal,
    parse_partition,
    take_column,
)
from tfdist.records.clients.shard_store import ShardStore
from tfdist.records.clients.skew import Skew
from tfdist.records.clients.stores import ArrayStore, ClientStore, RowStore, class_ids
from tfdist.records.format.columns import first_unfinite
from tfdist.records.format.manifest import find_split, has_client_folders
from tfdist.records.format.schema import Schema
from tfdist.records.reading.graph_checks import failed_check
from tfdist.records.reading.map_fn import MapFn, checked, spec_after, spec_of_one
from tfdist.records.reading.opening import open_source
from tfdist.records.reading.reader import Records
from tfdist.records.reading.record_fn import PerRecord, RecordFn, seeds_of
from tfdist.records.reading.source import ArraySource, order_seed


def open_clients(
    source: Any,
    *,
    clients: int | None = None,
    partition: str = "iid",
    seed: int = 0,
    map_fn: MapFn | None = None,
    record_fn: RecordFn | None = None,
    batched: bool | None = None,
) -> Clients:
    """Opens the clients of a source.

    Args:
        source: "DIR/SPLIT", or DIR when it has one split, of shards that ``tfdist shard
            --clients`` wrote; a folder with a folder of shards for each client, also with /SPLIT;
            a dict of arrays ``(x, y)`` or ``(x, y, sample_weight)`` by client; or what
            ``open_records`` takes, which is held in memory and dealt to ``clients``.
        clients: how many clients to deal the records to; None when the source has clients, and for
            by:COLUMN.
        partition: "iid"; "dirichlet:ALPHA" and "shards:K" skew the labels, see ``partition``;
            "by:COLUMN" makes a client of each value of an input or the label. An input that names
            the clients is no longer an input then, the label stays one.
        seed: of the partition, and of the random numbers of ``record_fn``.
        map_fn: takes all records of a client, ``map_fn(x, y)`` or ``map_fn(x, y, sample_weight)``
            of tensors [records, ...], and returns as many items with the same number of rows.
        record_fn: changes each record before, as for ``open_records``; its random numbers are
            others in each epoch that a client is loaded for.
        batched: as for ``open_records``.

    Raises:
        OptionError: an unknown partition, or a number of clients that cannot be.
        DataError: the source cannot be read. A damaged client is found when it is loaded.
    """
    chosen = parse_partition(partition)
    store = _existing(source)
    if store is None:
        check_num_clients(chosen, clients)
        store = _dealt(source, chosen, clients, seed, batched)
    elif clients is not None or partition != "iid":
        raise OptionError(
            "clients and partition must be left out, since the data is divided into "
            f"{len(store.ids)} clients already",
            received=f"clients={clients}, partition='{partition}'",
            mend="Leave both options out",
        )
    return Clients(store, map_fn, record_fn, seed)


def _existing(source: Any) -> ClientStore | None:
    """Returns the clients that a source has by itself; None when it has none."""
    if isinstance(source, Mapping):
        return ArrayStore(source)
    if not isinstance(source, (str, Path)):
        return None
    path = local_shards(source)
    root, split = (path, None) if path.is_dir() else (path.parent, path.name)
    if has_client_folders(root):
        return ShardStore.of_folders(root, split)
    folder, name, manifest = find_split(path)
    if not manifest.splits[name].has_clients:
        return None
    return ShardStore.of_split(folder, name, manifest)


def _dealt(
    source: Any, partition: Partition, num_clients: int | None, seed: int, batched: bool | None
) -> ClientStore:
    opened = open_source(source, batched)
    if opened.note is not None:
        print(f"tfdist: {opened.note}", flush=True)
    if isinstance(opened, ArraySource):
        arrays = opened.arrays
    else:
        loaded = Records(opened, map_fn=None, cache="auto").load(0, opened.num_records)
        arrays = tf.nest.map_structure(lambda tensor: tensor.numpy(), loaded)
    label, names = "label", None
    if opened.schema is not None:
        _refuse_packed(opened.schema, partition.column)
        feature = opened.schema.class_label
        if feature is not None:
            label, names = feature.name, feature.classes
    values = None
    if partition.column is not None:
        values, arrays = _without_column(arrays, partition.column, label)
        if partition.column == label and names is not None:
            values = np.array(names, object)[values]
    rows = deal(
        partition,
        opened.num_records,
        num_clients,
        seed=seed,
        class_ids=class_ids(arrays),
        values=values,
    )
    return RowStore(arrays, rows, class_names=names, partition=str(partition))


def _refuse_packed(schema: Schema, column: str | None) -> None:
    """Columns of a .csv are packed into one input, where they are numbers without a name."""
    for feature in schema.of_role("input"):
        if column in (feature.columns or ()):
            raise DataError(
                "a column of a .csv that names the clients must be chosen when shards are written",
                received=f"by:{column} of shards that hold it as a feature",
                mend=f"Write them anew: `tfdist shard SOURCE.csv OUT --partition by:{column}`",
            )


def _without_column(
    arrays: tuple[Any, ...], column: str, label: str
) -> tuple[np.ndarray, tuple[Any, ...]]:
    """Returns the values of the column that names the clients, and the arrays without it."""
    x, *others = arrays
    y = others[0] if others else {}
    named_x = x if isinstance(x, Mapping) else {"x": x}
    values, inputs = take_column(column, named_x, y if isinstance(y, Mapping) else {label: y})
    # One input is a tensor, as when the records have been written and are read.
    return values, (inputs if len(inputs) > 1 else next(iter(inputs.values())), *others)


class Clients:
    """Clients, whose records are read one client at a time.

    Attributes:
        ids: the clients, in the order of the source.
        element_spec: of one record, after ``record_fn`` and ``map_fn``: (x, y) or
            (x, y, sample_weight) of tf.TensorSpec without a batch dimension.
        has_weights: whether each record has a sample weight.
        class_names: the names of the class ids; None when they have none.
        partition: how the records were dealt, "dirichlet:0.3"; None when that is not known.
    """

    def __init__(
        self,
        store: ClientStore,
        map_fn: MapFn | None,
        record_fn: RecordFn | None = None,
        seed: int = 0,
    ):
        self._store = store
        self._map = self._each = None
        self.ids = store.ids
        self._numbers = {client: number for number, client in enumerate(store.ids)}
        self.class_names = store.class_names
        self.partition = store.partition
        spec = store.spec
        if record_fn is not None:
            self._per_record = PerRecord(record_fn, spec)
            self._each, self._seed = _over_all(self._per_record, spec), seed
            spec = self._per_record.spec
        self.has_weights = len(spec) == 3
        if map_fn is not None:
            traced = tf.function(map_fn)
            # Traced once, here: finding a trace takes as long as mapping a small client.
            mapped = tf.function(checked(traced), input_signature=spec, autograph=False)
            self._map = mapped.get_concrete_function()
            spec = spec_after(traced, spec)
        self.element_spec = spec_of_one(spec)

    def __len__(self) -> int:
        return len(self.ids)

    def num_records(self, client_id: str) -> int:
        """Returns how many records the client has; 0 when its manifest or arrays cannot be read."""
        return self._store.num_records(self._known(client_id))

    def label_counts(self, client_id: str) -> dict[int, int] | None:
        """Returns the number of records of each class id, before ``map_fn``; None without ids."""
        return self._store.class_counts(self._known(client_id))

    def load(self, client_id: str, *, epoch: int = 0) -> tuple[Any, ...]:
        """Returns the client's records after both functions: (x, y) or (x, y, sample_weight).

        Each is an array [records, ...], or a dict of such by name.

        Args:
            epoch: on which the random numbers of ``record_fn`` depend.

        Raises:
            DataError: the client has no records, other features than most clients, or values that
                are NaN or infinite; CorruptShardError: a shard is missing or damaged.
        """
        self._known(client_id)
        try:
            records = self._changed(self._store.read(client_id), client_id, epoch)
            return _to_numpy(tuple(records))
        except DataError as error:
            raise type(error)(
                f"client '{client_id}': {error.rule}", received=error.received, mend=error.mend
            ) from error

    def describe(self) -> Skew:
        """Returns how many records, and of which classes, each client has; prints as tables."""
        return self._store.skew()

    def _changed(self, records: Any, client_id: str, epoch: int) -> Any:
        try:
            if self._each is not None:
                leaves = tf.nest.flatten(tf.nest.map_structure(tf.convert_to_tensor, records))
                first = self._numbers[client_id] * _APART
                numbers = tf.range(first, first + len(leaves[0]), dtype=tf.int64)
                seeds = seeds_of(numbers, order_seed(self._seed, epoch))
                changed = tf.nest.flatten(self._each(*leaves, seeds))
                records = tf.nest.pack_sequence_as(self._per_record.spec, changed)
            if self._map is None:
                return records
            return self._map(*tf.nest.map_structure(tf.convert_to_tensor, records))
        except tf.errors.InvalidArgumentError as error:
            failed = failed_check(str(error.message))
            if failed is None:
                raise
            raise failed from error

    def _known(self, client_id: str) -> str:
        if client_id not in self._numbers:
            shown = ", ".join(self.ids[:10])
            raise DataError(
                "the client must be one of the data's",
                received=repr(client_id),
                mend=f"There are {len(self.ids)}: {shown}{', ...' if len(self.ids) > 10 else ''}",
            )
        return client_id


def _to_numpy(records: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the records as arrays. Raises DataError for a value that is not finite."""
    arrays = tf.nest.map_structure(
        lambda leaf: leaf.numpy() if isinstance(leaf, tf.Tensor) else leaf, records
    )
    for position, item in enumerate(arrays):
        for array in tf.nest.flatten(item):
            place = first_unfinite(array) if array.dtype.kind == "f" else None
            if place is not None:
                raise DataError(
                    "all values must be finite",
                    received=f"{array[place]} in {('x', 'y', 'sample_weight')[position]}, "
                    f"record {place[0]}",
                    mend="Replace it, as in map_fn: tf.where(tf.math.is_finite(x), x, 0.)",
                )
    return arrays


# Records of a client are counted from a number of the client's: nobody has so many.
_APART = 1 << 32


def _over_all(per_record: PerRecord, spec: Any) -> Any:
    """Returns a traced function that changes all records of a client, each with a seed of its own:
    the same in each try of the same round. It takes the parts of the records in a row, and seeds.
    """
    of_one = spec_of_one(per_record.spec)

    def changed(records: Any, seeds: tf.Tensor) -> Any:
        return tf.map_fn(lambda one: per_record(*one), (records, seeds), fn_output_signature=of_one)

    signature = (tuple(spec), tf.TensorSpec([None, 2], tf.int32))
    traced = tf.function(changed, input_signature=signature, autograph=False)
    return traced.get_concrete_function()
