"""How the weights of a model are divided among replicas, and travel in buckets.

Each weight is laid out flat, padded with zeros to a multiple of the replicas, and cut into as many
parts of one length. What the weights of a bucket give is laid side by side: a row for each replica.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

#: Larger ones hold more memory at a time, and begin later.
BYTES_OF_A_BUCKET = 4 * 2**20


@dataclass(frozen=True)
class Division:
    """One weight, divided.

    Attributes:
        shape: of the whole.
        num_replicas: that it is divided among.
        dtype: of its elements.
        device: that it lies on, where a process has several; not that of its replicas.
    """

    shape: tuple[int, ...]
    num_replicas: int
    dtype: tf.DType
    device: str = ""

    @property
    def size(self) -> int:
        """Elements of the whole."""
        return math.prod(self.shape)

    @property
    def part_size(self) -> int:
        """Elements of a part, those of padding included."""
        return -(-self.size // self.num_replicas)

    def part(self, whole: Any, replica: int) -> Any:
        """Returns the part of one replica, [part_size], of a tensor of the whole."""
        flat = tf.reshape(whole, [-1])[replica * self.part_size : (replica + 1) * self.part_size]
        missing = self.part_size - flat.shape[0]
        if missing:
            return tf.pad(flat, [[0, missing]])
        # A slice would keep the memory of the whole for as long as a variable has it.
        return tf.raw_ops.DeepCopy(x=flat) if tf.executing_eagerly() else flat

    def rows(self, whole: Any) -> Any:
        """Returns all parts of a tensor, [num_replicas, part_size]."""
        missing = self.num_replicas * self.part_size - self.size
        flat = tf.reshape(whole, [-1])
        flat = tf.pad(flat, [[0, missing]]) if missing else flat
        return tf.reshape(flat, [self.num_replicas, self.part_size])

    def whole(self, rows: Any) -> Any:
        """Returns the tensor whose parts ``rows`` are."""
        return tf.reshape(tf.reshape(rows, [-1])[: self.size], self.shape)

    def whole_array(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the NumPy array that is cut into ``parts``."""
        return np.concatenate(parts)[: self.size].reshape(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Weights of one type, on one device, whose parts travel together.

    Attributes:
        indices: of the weights, in their order.
        divisions: of the same.
    """

    indices: tuple[int, ...]
    divisions: tuple[Division, ...]

    def rows(self, wholes: Sequence[Any]) -> Any:
        """Returns what each replica gets of ``wholes``, [num_replicas, elements]."""
        pairs = zip(self.divisions, wholes, strict=True)
        return tf.concat([division.rows(whole) for division, whole in pairs], 1)

    def split(self, row: Any) -> list[Any]:
        """Returns the parts that lie side by side in the row of one replica, [elements]."""
        return tf.split(row, [division.part_size for division in self.divisions])

    def wholes(self, rows: Any) -> list[Any]:
        """Returns the tensors whose parts lie side by side in the rows of all replicas."""
        blocks = tf.split(rows, [division.part_size for division in self.divisions], axis=1)
        return [d.whole(block) for d, block in zip(self.divisions, blocks, strict=True)]


def buckets(divisions: Sequence[Division], wanted: Sequence[int]) -> list[Bucket]:
    """Returns the weights with the indices ``wanted`` in buckets, in their order.

    A weight that is larger than a bucket has one of its own.
    """

    def size_of(index: int) -> int:
        return divisions[index].size * divisions[index].dtype.size

    def kind_of(index: int) -> Any:
        return divisions[index].dtype, divisions[index].device

    found = in_groups(wanted, size_of, kind_of)
    return [Bucket(tuple(group), tuple(divisions[i] for i in group)) for group in found]


def in_groups(
    items: Iterable[Any],
    size_of: Callable[[Any], int],
    kind_of: Callable[[Any], Any] = lambda _: None,
) -> list[list[Any]]:
    """Divides items into groups that one message carries, each of one kind, in their order."""
    groups: list[list[Any]] = []
    room = 0
    for item in items:
        if not groups or kind_of(item) != kind_of(groups[-1][0]) or size_of(item) > room:
            groups.append([])
            room = BYTES_OF_A_BUCKET
        groups[-1].append(item)
        room -= size_of(item)
    return groups
