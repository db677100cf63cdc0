"""Several simulated clients as one of TFF's: their records and their order, in a file of a round.

TFF pays for a dataset, its serialization and calls of executors for each of its clients. So a group
of simulated clients is one of them, which trains them one after the other, and what they train on
lies in a file, read a part at a time: memory does not grow with the number of clients.
"""

from __future__ import annotations

import heapq
import os
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import cannot_write

# A part of the file is read at once; a larger client is a part of its own.
_PART_BYTES = 8 << 20
_LOCAL_WORK = OrderedDict(
    order=tf.TensorSpec([None], tf.int32),
    steps=tf.TensorSpec([None], tf.int32),
    widths=tf.TensorSpec([None], tf.int32),
    slots=tf.TensorSpec([None], tf.int32),
)


def group_of_each(work: Sequence[int], num_groups: int) -> list[int]:
    """Returns the group of each client, longest first to the group with the least to do."""
    loads = [(0, group) for group in range(num_groups)]
    groups = [0] * len(work)
    for client in sorted(range(len(work)), key=lambda client: -work[client]):
        load, group = loads[0]
        heapq.heapreplace(loads, (load + work[client], group))
        groups[client] = group
    return groups


@dataclass
class _Group:
    clients: list[tuple[OrderedDict, np.ndarray, int]] = field(default_factory=list)
    num_bytes: int = 0
    #: Of each part, where its tensors are in the file: offset and length.
    parts: list[list[tuple[int, int]]] = field(default_factory=list)


class RoundFile:
    """What the clients of a round train on, by groups; its file has no name, and so leaves none.

    Args:
        num_groups: TFF's clients.
        with_empty: whether one without simulated clients stays one.
    """

    def __init__(self, num_groups: int, *, with_empty: bool):
        self.num_groups = num_groups
        self._with_empty = with_empty
        self._groups = [_Group() for _ in range(num_groups)]
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> RoundFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def add(self, group: int, arrays: OrderedDict, order: np.ndarray, slot: int) -> None:
        """Adds a client.

        Args:
            arrays: its records, by the names of ``batch_spec``.
            order: int32 [steps, batch], the records of each step; -1 is none.
            slot: its place in the round.

        Raises:
            WriteError: the file cannot be written.
        """
        into = self._groups[group]
        if into.clients and _shapes(arrays) != _shapes(into.clients[0][0]):
            self._write(into)  # Clients may have sequences of other lengths, as map_fn pads them.
        into.clients.append((arrays, order, slot))
        into.num_bytes += order.nbytes + sum(map(_num_bytes, tf.nest.flatten(arrays)))
        if into.num_bytes >= _PART_BYTES or not self._with_empty:
            self._write(into)

    def datasets(self, clipping: Sequence[float]) -> list[tf.data.Dataset]:
        """Returns what TFF gives its clients: where their records are, and how to clip updates."""
        for group in self._groups:
            if group.clients:
                self._write(group)
        size = np.int64(os.fstat(self._file.fileno()).st_size)
        path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        spec = group_spec(len(clipping))
        datasets = []
        for group in self._groups:
            if group.parts or self._with_empty:
                parts = np.array(group.parts or np.zeros([0, 0, 2]), np.int64)
                given = [tf.constant(clipping, tf.float32, [len(clipping)]), parts, path, size]
                # Made of a raw operation: tf.data takes milliseconds for each.
                variant = tf.raw_ops.TensorDataset(
                    components=given, output_shapes=[np.shape(item) for item in given]
                )
                datasets.append(tf.data.experimental.from_variant(variant, spec))
        return datasets

    def _write(self, group: _Group) -> None:
        clients, group.clients, group.num_bytes = group.clients, [], 0
        arrays = tf.nest.map_structure(
            lambda *each: np.concatenate(each), *(arrays for arrays, _, _ in clients)
        )
        orders, first = [], 0
        for records, order, _ in clients:
            # Counted within the part.
            orders.append(np.where(order < 0, -1, order + first).reshape(-1))
            first += len(tf.nest.flatten(records)[0])
        work = OrderedDict(
            order=np.concatenate(orders).astype(np.int32),
            steps=np.array([order.shape[0] for _, order, _ in clients], np.int32),
            widths=np.array([order.shape[1] for _, order, _ in clients], np.int32),
            slots=np.array([slot for _, _, slot in clients], np.int32),
        )
        part = []
        try:
            for leaf in tf.nest.flatten((arrays, work)):
                content = tf.io.serialize_tensor(leaf).numpy()
                part.append((self._file.tell(), self._file.write(content)))
            self._file.flush()
        except OSError as error:
            place = f"the records of a round in {tempfile.gettempdir()}, or the folder of TMPDIR,"
            raise cannot_write(place, error) from None
        group.parts.append(part)


def _shapes(arrays: OrderedDict) -> list[tuple[int, ...]]:
    return [array.shape[1:] for array in tf.nest.flatten(arrays)]


def _num_bytes(array: np.ndarray) -> int:
    """Returns what an array takes in the file: of texts more than the places of their pointers."""
    return sum(map(len, array.flat)) if array.dtype.kind == "O" else array.nbytes


def group_spec(num_clipping: int) -> OrderedDict:
    """Returns the spec of what a group is given."""
    return OrderedDict(
        clipping=tf.TensorSpec([num_clipping], tf.float32),
        parts=tf.TensorSpec([None, None, 2], tf.int64),
        path=tf.TensorSpec([], tf.string),
        size=tf.TensorSpec([], tf.int64),
    )


def given_to(data: tf.data.Dataset) -> OrderedDict:
    """Returns what a group is given, in a graph of TFF's."""
    return data.with_options(_plain()).get_single_element()


def part_of(given: OrderedDict, number: tf.Tensor, batch_spec: OrderedDict) -> Any:
    """Returns a part of a group, in a graph of TFF's: (records, order, steps and slots)."""
    spec = (batch_spec, _LOCAL_WORK)
    places = given["parts"][number]
    offset, length = places[0, 0], tf.reduce_sum(places[:, 1])
    content = (
        tf.data.FixedLengthRecordDataset(
            given["path"], length, offset, given["size"] - offset - length
        )
        .with_options(_plain())
        .get_single_element()
    )
    leaves = []
    for index, leaf in enumerate(tf.nest.flatten(spec)):
        own = tf.strings.substr(content, places[index, 0] - offset, places[index, 1])
        leaves.append(tf.ensure_shape(tf.io.parse_tensor(own, leaf.dtype), leaf.shape))
    return tf.nest.pack_sequence_as(spec, leaves)


def _plain() -> tf.data.Options:
    """Returns options without tf.data's own optimizations, which take longer than the reading."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    return options
