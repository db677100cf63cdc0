"""Where the records of clients lie. One client is read at a time; here from arrays."""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfdist.errors import DataError
from tfdist.records.clients.skew import Skew, measure_skew
from tfdist.records.format.columns import count_classes


class ClientStore(abc.ABC):
    """The records of some clients, not yet read.

    Attributes:
        ids: the clients.
        spec: of a batch, (x,), (x, y) or (x, y, sample_weight) of tf.TensorSpec.
        class_names: the names of the class ids; None when they have none.
        partition: how the records were dealt, "dirichlet:0.3"; None when that is not known.
    """

    ids: tuple[str, ...]
    spec: Any
    class_names: tuple[str, ...] | None = None
    partition: str | None = None

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


class RowStore(ClientStore):
    """Clients that have some of the rows of arrays."""

    def __init__(
        self,
        arrays: tuple[Any, ...],
        rows: Mapping[str, np.ndarray],
        *,
        class_names: tuple[str, ...] | None,
        partition: str,
    ):
        from tfdist.records.reading.source import spec_of_rows

        self.spec = spec_of_rows(arrays)
        self.class_names = class_names
        self.partition = partition
        self._arrays = arrays
        self._rows = rows
        self.ids = tuple(rows)
        self._class_ids = class_ids(arrays)

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
        from tfdist.records.reading.source import ArraySource

        self._sources: dict[str, ArraySource | DataError] = {}
        for client, given in arrays.items():
            try:
                parts = given if isinstance(given, tuple) else (given,)
                self._sources[str(client)] = ArraySource(parts)
            except DataError as error:
                self._sources[str(client)] = error
        if len(self._sources) != len(arrays):
            raise DataError(
                "each client must have a name of its own",
                received="two of the same name",
                mend="Rename one of them: 1 and '1' are the same name",
            )
        self.ids = tuple(self._sources)
        found = list(self._sources.values())
        specs = [source.spec for source in found if not isinstance(source, DataError)]
        if not specs:
            none = DataError(
                "there must be at least one client",
                received="none",
                mend="Give one or more: {'a name': (x, y)}",
            )
            raise found[0] if found else none
        described = Counter(str(spec) for spec in specs)
        usual = described.most_common(1)[0][0]
        self.spec = next(spec for spec in specs if str(spec) == usual)

    def num_records(self, client_id: str) -> int:
        source = self._sources[client_id]
        return 0 if isinstance(source, DataError) else source.num_records

    def class_counts(self, client_id: str) -> dict[int, int] | None:
        source = self._sources[client_id]
        ids = None if isinstance(source, DataError) else class_ids(source.arrays)
        return None if ids is None else count_classes(ids)

    def read(self, client_id: str) -> Any:
        source = self._sources[client_id]
        if isinstance(source, DataError):
            raise source
        if str(source.spec) != str(self.spec):
            raise DataError(
                "all clients must have arrays of the same shapes and dtypes",
                received=f"{_described(source.spec)}, where others have {_described(self.spec)}",
                mend="Convert its arrays to the shapes and dtypes of the others",
            )
        return source.arrays


def _described(spec: Any) -> str:
    import tensorflow as tf

    return str(
        tf.nest.map_structure(lambda leaf: f"{leaf.dtype.name} {leaf.shape[1:].as_list()}", spec)
    )


def class_ids(arrays: tuple[Any, ...]) -> np.ndarray | None:
    """Returns int64 [records] when ``arrays``, (x, y, ...), have one label of class ids."""
    if len(arrays) < 2 or isinstance(arrays[1], (Mapping, tuple)):
        return None
    labels = np.asarray(arrays[1])
    if labels.dtype.kind not in "iu" or labels.shape not in ((len(labels),), (len(labels), 1)):
        return None
    return labels.reshape(-1).astype(np.int64, copy=False)
