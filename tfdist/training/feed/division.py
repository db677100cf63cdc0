"""How the records of an epoch fall to the processes that read them, and each step to its shares."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import tensorflow as tf


def even_share(of: Any, parts: int, part: Any) -> tuple[Any, Any]:
    """Returns the first row of ``part``, and how many it has, of ``of`` rows.

    They fall to ``parts`` parts in their order, evenly: the first parts may have one more.

    Args:
        of: int or int [].
        part: int, int [] or an array of them.
    """
    each, more = of // parts, of % parts
    rows = (of + parts - 1 - part) // parts  # ``each``, and one more in the first ``more`` parts.
    return part * rows + (each + 1 - rows) * more, rows


def share_by_speed(of: Any, speeds: Sequence[float], part: int) -> tuple[Any, Any]:
    """Returns what ``even_share`` does where each part has rows as its speed is among all.

    Args:
        of: int64 [].
    """
    import tensorflow as tf

    total = sum(speeds)

    def before(part: int) -> Any:
        rows = tf.cast(of, tf.float64) * (sum(speeds[:part]) / total)
        return tf.cast(tf.floor(rows + 0.5), tf.int64)

    begin = before(part)
    return begin, (of if part + 1 == len(speeds) else before(part + 1)) - begin


def or_padding(begin: Any, rows: Any) -> tuple[Any, Any]:
    """Returns ``rows`` rows from ``begin`` on as [first, last); for none one of padding, the first.

    Args:
        begin, rows: int, then the results are, too; or int [].
    """
    if isinstance(rows, int):
        return (begin, begin + rows) if rows else (0, 1)
    import tensorflow as tf

    return tf.where(rows > 0, begin, 0), tf.where(rows > 0, begin + rows, 1)


def piece(
    batch: Any,
    share: Sequence[Any],
    parts: int,
    part: Any,
    speeds: Sequence[float] | None = None,
) -> tuple[Any, tf.Tensor]:
    """Returns what falls to one of several parts of a batch, at least one row, and its share.

    Args:
        batch: a structure of tensors [rows, ...]; None stands for what is not there.
        share: int64 [2], the true rows of the batch, and those of the global batch.
        part: int or int64 [].
        speeds: of each part, by which they have rows; None: evenly.
    """
    import tensorflow as tf

    if speeds is None:
        begin, rows = even_share(share[0], parts, part)
    else:
        begin, rows = share_by_speed(share[0], speeds, part)
    first, last = or_padding(begin, rows)
    own = tf.nest.map_structure(
        lambda tensor: None if tensor is None else tensor[first:last], batch
    )
    return own, tf.stack([rows, share[1]])


class Division(abc.ABC):
    """How records, taken ``global_batch_size`` at a time, fall to ``parts`` parts."""

    global_batch_size: int
    parts: int

    def rows(self, part: int, of: int) -> int:
        """Returns the rows of ``part`` in a global batch of ``of`` rows."""
        return even_share(of, self.parts, part)[1]

    @property
    @abc.abstractmethod
    def steps(self) -> int:
        """Steps of an epoch, the same for all parts."""

    @property
    @abc.abstractmethod
    def tail(self) -> int:
        """Rows of the last, short step; 0 when the batches divide the records evenly."""

    @abc.abstractmethod
    def record_range(self, part: int) -> tuple[int, int]:
        """Returns the records [start, stop) that ``part`` reads in an epoch."""

    @abc.abstractmethod
    def shares(self, part: int) -> Callable[[tf.Tensor], tf.Tensor]:
        """Returns a function of the step: int64 [2], the rows of ``part`` and of all parts."""


@dataclass(frozen=True)
class EvenDivision(Division):
    """Records that every part can read: shares of a step differ by at most one row."""

    num_records: int
    global_batch_size: int
    parts: int

    @property
    def full_steps(self) -> int:
        return self.num_records // self.global_batch_size

    @property
    def tail(self) -> int:
        return self.num_records % self.global_batch_size

    @property
    def steps(self) -> int:
        return self.full_steps + (self.tail > 0)

    def num_part_records(self, part: int) -> int:
        full = self.full_steps * self.rows(part, self.global_batch_size)
        return full + self.rows(part, self.tail)

    def record_range(self, part: int) -> tuple[int, int]:
        start = sum(self.num_part_records(before) for before in range(part))
        return start, start + self.num_part_records(part)

    def shares(self, part: int) -> Callable[[tf.Tensor], tf.Tensor]:
        import tensorflow as tf

        full = [self.rows(part, self.global_batch_size), self.global_batch_size]
        tail = [self.rows(part, self.tail), self.tail]

        def share(step: tf.Tensor) -> tf.Tensor:
            is_full = step < self.full_steps
            return tf.where(is_full, tf.constant(full, tf.int64), tf.constant(tail, tf.int64))

        return share


@dataclass(frozen=True)
class Held:
    """What each process reads where hosts hold different records.

    Attributes:
        start: first record of this process among those of its host.
        counts: number of records of each process, by rank.
    """

    start: int
    counts: tuple[int, ...]


@dataclass(frozen=True)
class HeldDivision(Division):
    """Records that parts hold: each takes from its own in every step, until it has no more."""

    global_batch_size: int
    held: Held

    @property
    def parts(self) -> int:
        return len(self.held.counts)

    @property
    def steps(self) -> int:
        return len(self._rows_of_all())

    @property
    def tail(self) -> int:
        return int(self._rows_of_all()[-1]) % self.global_batch_size

    def record_range(self, part: int) -> tuple[int, int]:
        return self.held.start, self.held.start + self.held.counts[part]

    def shares(self, part: int) -> Callable[[tf.Tensor], tf.Tensor]:
        import tensorflow as tf

        total = self._rows_of_all()
        table = tf.constant(np.stack([self._rows_of(part, len(total)), total], axis=1))
        return lambda step: table[step]

    def _rows_of_all(self) -> np.ndarray:
        """Returns the rows of each step: int64 [steps]."""
        steps = max(
            -(-count // self.rows(part, self.global_batch_size))
            for part, count in enumerate(self.held.counts)
        )
        return np.sum([self._rows_of(part, steps) for part in range(self.parts)], axis=0)

    def _rows_of(self, part: int, steps: int) -> np.ndarray:
        batch = self.rows(part, self.global_batch_size)
        done = np.arange(steps, dtype=np.int64) * batch
        return np.clip(self.held.counts[part] - done, 0, batch)
