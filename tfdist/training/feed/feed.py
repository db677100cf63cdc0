"""From records to the batches of a fit: who reads what, in which order, on how many replicas.

A *global batch* is what one device would see in a step. It is divided into one share per replica;
shares differ by at most one row. Each process reads a range of records of its own (the union of
its shares over an epoch), so every record is read exactly once an epoch on any number of
processes, and all of them take the same number of steps. A replica that the uneven tail leaves
without a row gets one row of padding and a share of zero rows: ``shared_steps`` cuts
it off before loss and metrics, and divides by the true count.

Where each host holds records of its own (``Held``), a process cannot choose: it reads what it
holds, and its share of a step is what it has left. Every record still counts once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.errors import DataError, OptionError
from tfdist.training.feed.division import (
    Division,
    EvenDivision,
    Held,
    HeldDivision,
    even_share,
    or_padding,
    piece,
)

if TYPE_CHECKING:
    import tensorflow as tf

    from tfdist.records.reading.reader import Records


def _as_written(method: Callable[..., tf.data.Dataset]) -> Callable[..., tf.data.Dataset]:
    """Has AutoGraph leave alone what a method gives to tf.data: it is graph-safe as it stands.

    To rewrite it took a third of the first step of a small model. A user's map_fn is rewritten all
    the same: it is a tf.function.
    """

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> tf.data.Dataset:
        import tensorflow as tf

        return tf.autograph.experimental.do_not_convert(method)(*args, **options)

    return call


@dataclass(frozen=True, kw_only=True)
class Feed:
    """What ``strategy.dataset`` returns and the ``fit`` of the same strategy reads.

    Attributes:
        records: the source.
        global_batch_size: rows of one step over all replicas.
        parts: processes that read, each its own records.
        part: the one that this process reads.
        splits: replicas inside one process, among which each of its batches is divided.
        shared: whether batches carry their share; False gives plain ``(x, y[, weight])`` batches.
        shuffle: whether each epoch has an order of its own, drawn from ``seed``.
        class_weight: class -> weight, as in ``Model.fit``, of each class that the records have.
        limit: read only this many records, the first ones; None reads all.
        held: what each process holds, where hosts hold different records.
        speeds: of each process, by which a fit divides each global batch; None: evenly.
        is_bare: whether a batch is x itself, as Keras' fit gives a step what has no labels, and
            not (x,).
    """

    records: Records
    global_batch_size: int
    parts: int = 1
    part: int = 0
    splits: int = 1
    shared: bool = True
    shuffle: bool = False
    seed: int = 0
    class_weight: Mapping[int, float] | None = None
    limit: int | None = None
    held: Held | None = None
    speeds: tuple[float, ...] | None = None
    is_bare: bool = False

    def __post_init__(self) -> None:
        replicas = self.num_replicas
        if self.global_batch_size < replicas:
            raise OptionError(
                f"global_batch_size must be at least the number of replicas, here {replicas}",
                received=self.global_batch_size,
                mend=f"Choose a global batch size of {replicas} or more, or fewer replicas",
            )
        if self.num_records == 0:
            raise DataError(
                "a dataset must have at least one record", received="none", mend="Give more data"
            )

    @property
    def division(self) -> Division:
        if self.held is not None:
            return HeldDivision(self.global_batch_size, self.held)
        return EvenDivision(self.num_records, self.global_batch_size, self.parts)

    @property
    def steps_per_epoch(self) -> int:
        return self.division.steps

    @property
    def num_replicas(self) -> int:
        return self.parts * self.splits

    @property
    def is_in_order(self) -> bool:
        """Whether a fit takes the records as they are given, the first ones in the first batch."""
        return not self.shuffle and self.held is None and not self.records.is_sequential

    @property
    def is_bucketed(self) -> bool:
        """Whether an epoch is one of batches of records of similar lengths: the same ones on any
        number of processes."""
        return self.shuffle and self.records.is_bucketed

    @property
    def num_records(self) -> int:
        if self.held is not None:
            return sum(self.held.counts)
        return self.records.num_records if self.limit is None else self.limit

    @property
    def records_per_epoch(self) -> int:
        return self.num_records

    @property
    def callback_steps(self) -> int:
        """Times that callbacks are told of a step in an epoch."""
        return self.steps_per_epoch

    @property
    def tail(self) -> int:
        """Rows of the uneven last batch of an epoch; 0 when there is none."""
        return self.division.tail

    def __len__(self) -> int:
        return self.steps_per_epoch

    def limited(self, steps: int) -> Feed:
        """Returns a feed of at most ``steps`` steps, the last of them on a third of a batch."""
        tail = max(1, self.global_batch_size // 3)
        if self.held is not None:  # In each step each process takes from its own.
            most = [
                (steps - 1) * even_share(self.global_batch_size, self.parts, part)[1]
                + even_share(tail, self.parts, part)[1]
                for part in range(self.parts)
            ]
            counts = tuple(map(min, self.held.counts, most))
            if not any(counts):  # Those that the last rows fall to hold none.
                counts = tuple(min(count, 1) for count in self.held.counts)
            return replace(self, held=replace(self.held, counts=counts))
        limit = (steps - 1) * self.global_batch_size + tail
        return replace(self, limit=min(limit, self.num_records))

    def first_rows(self, count: int) -> Any:
        """Returns the first records as one batch, without shares; None where they are read once, or
        not the same ones on all processes.

        Fewer than ``count`` where there are not so many.
        """
        if self.held is not None or not self.records.can_be_looked_at:
            return None
        rows = min(count, self.num_records)
        batches = self.records.batches(0, rows, rows, shuffle=False, seed=self.seed, epoch=0)
        if self.class_weight:
            batches = batches.map(self._weigh_by_class)
        return next(iter(batches))

    def in_record_order(self) -> Feed:
        """Returns the same records unshuffled, as evaluation and prediction read them."""
        return replace(self, shuffle=False)

    def on_one_device(self) -> Feed | MergedFeed:
        """Returns the same global batches, in the same order, as plain batches for one device.

        Raises:
            DataError: the hosts hold different records, so no device sees all of them.
        """
        if self.held is not None and self.parts > 1:
            raise DataError(
                "every host must hold all records where one device is compared",
                received="records divided among hosts",
                mend="Give each host the whole data",
            )
        if self.parts == 1 or self.is_in_order or self.is_bucketed:
            return replace(self, parts=1, part=0, splits=1, shared=False)
        return MergedFeed(
            tuple(replace(self, part=part, splits=1, shared=True) for part in range(self.parts))
        )

    def begun_by(self, parts: int) -> Feed | RedividedFeed:
        """Returns the epoch that ``parts`` processes began, for those that go on with it.

        Raises:
            DataError: the records of another process cannot be read by this one.
        """
        if self.speeds is None and (parts == self.parts or self.is_bucketed):
            return self
        if self.held is not None or self.records.is_sequential:
            if self.speeds is not None:
                raise DataError(
                    "device_speeds must divide records that each rank can read",
                    received="records that hosts hold apart, or that come through pipes",
                    mend="Give each host all records as files, or leave device_speeds out",
                )
            raise DataError(
                "an epoch over records that hosts hold apart, or that come through pipes, must be "
                "resumed by as many processes as began it",
                received=f"{self.parts} processes for an epoch that {parts} began",
                mend=f"Resume on {parts} processes, or give each host all records as files",
            )
        before = replace(self, parts=parts, part=0, splits=1, is_bare=False, speeds=None)
        return RedividedFeed(before.on_one_device(), self)

    def evaluated(self, *, is_masked: bool = False) -> Feed | RedividedFeed:
        """Returns the batches of an evaluation.

        Where they are padded to their longest record, what a model says of a record may depend on
        the others: then they are those of one device.

        Args:
            is_masked: whether the loss of a batch is a mean over what a mask leaves of it. Then
                they are, too, where each process can read all records.
        """
        even = replace(self, speeds=None)
        can_be_shared = self.held is None and not self.records.is_sequential
        if self.records.padding is None and not (is_masked and can_be_shared):
            return even
        return even.begun_by(1)

    def in_order_of_records(self, local: Sequence[Any]) -> Any:
        """Returns what ``evaluated`` led to for all records, from what it did on each process.

        Args:
            local: by process arrays [its records, ...], of one structure.
        """
        import tensorflow as tf

        whole = tf.nest.map_structure(lambda *arrays: np.concatenate(arrays), *local)
        if self.parts == 1 or self.records.padding is None:
            return whole  # Each process has a range of records.
        firsts = range(0, self.num_records, self.global_batch_size)
        rows = [min(self.global_batch_size, self.num_records - first) for first in firsts]
        return in_batch_order(whole, rows, self.parts)

    def weighted_by_class(self, class_weight: Mapping[int, float] | None) -> Feed:
        return replace(self, class_weight=class_weight) if class_weight else self

    @_as_written
    def epochs(self, first: int, last: int, *, skip_steps: int = 0) -> tf.data.Dataset:
        """Returns the batches of epochs [first, last), one after the other.

        The order of an epoch depends on ``seed`` and on its number alone, so a fit that is resumed
        sees what the unbroken one would have seen. ``skip_steps`` leaves out the first steps of
        the first epoch.

        Elements: ``(batch, share)`` where batch is ``(x, y[, sample_weight])`` with the rows of
        one replica, and share is int64 [2]: its true rows, and those of the global batch. Plain
        batches when not ``shared``.

        Iterators of it raise DataError where the records of a batch have several shapes.
        """
        import tensorflow as tf

        from tfdist.records.reading.shape_errors import with_shapes_explained

        def one_epoch(epoch: tf.Tensor) -> tf.data.Dataset:
            return self._epoch(epoch, tf.where(epoch == first, skip_steps, 0))

        if last - first == 1:  # A known length spares Keras the search for the end of the data.
            epochs = self._epoch(first, skip_steps)
        else:
            epochs = tf.data.Dataset.range(first, last).flat_map(one_epoch)
        epochs = fetched_ahead(self.bared(epochs))
        if self.records.padding is not None:
            return epochs
        return with_shapes_explained(epochs, self.records.element_spec)

    def _epoch(self, epoch: Any, skip_steps: Any) -> tf.data.Dataset:
        import tensorflow as tf

        division = self.division
        if self.is_bucketed:
            batches = self._bucketed(epoch, skip_steps)
        else:
            batches = self._of_range(epoch, skip_steps)
        if self.class_weight:
            batches = batches.map(self._weigh_by_class)
        if not self.shared:
            return batches
        steps = tf.data.Dataset.range(tf.cast(skip_steps, tf.int64), division.steps)
        shares = steps.map(division.shares(self.part))
        with_share = tf.data.Dataset.zip((batches, shares))
        if self.splits == 1:
            return with_share
        return with_share.flat_map(self.split)

    def _of_range(self, epoch: Any, skip_steps: Any) -> tf.data.Dataset:
        """Returns the batches of the records that this process has."""
        division = self.division
        start, stop = division.record_range(self.part)
        if start == stop:  # Fewer records than parts.
            return self._padding(0, epoch, skip_steps)
        padded = {}
        if self.records.padding is not None:
            padded["longest"] = self._longest(epoch, skip_steps)
        batches = self.records.batches(
            start,
            stop,
            self._local_rows(self.part),
            shuffle=self.shuffle,
            seed=self.seed,
            epoch=epoch,
            part=self.part,
            skip_batches=skip_steps,
            **padded,
        )
        own_steps = self._own_steps(self.part)
        if own_steps < division.steps:
            batches = batches.concatenate(self._padding(own_steps, epoch, skip_steps))
        return batches

    def _local_rows(self, part: int) -> int:
        return self.division.rows(part, self.global_batch_size)

    def _own_steps(self, part: int) -> int:
        """Returns the steps of an epoch for which a process has records."""
        start, stop = self.division.record_range(part)
        return -(-(stop - start) // self._local_rows(part))

    def _padding(self, own_steps: int, epoch: Any, skip_steps: Any) -> tf.data.Dataset:
        """Returns the batches of the steps after the first ``own_steps``, which have no row."""

        # A real row: a row of zeros could send a layer to infinity, and 0 x inf is not 0.
        def row(**padded: Any) -> tf.data.Dataset:
            return self.records.batches(0, 1, 1, shuffle=False, seed=self.seed, epoch=0, **padded)

        if self.records.padding is None:
            return row().repeat(self.division.steps - own_steps)
        import tensorflow as tf

        row()  # Loads it eagerly.
        longest = self._longest(epoch, tf.maximum(tf.cast(skip_steps, tf.int64), own_steps))
        return longest.flat_map(lambda most: row(longest=tf.data.Dataset.from_tensors(most)))

    def _longest(self, epoch: Any, skip_steps: Any) -> tf.data.Dataset:
        """Returns the lengths of the longest records of each global batch, from a step on."""
        import tensorflow as tf

        division = self.division
        none = tf.data.Dataset.from_tensors(self.records.no_length)

        def of_part(part: int) -> tf.data.Dataset:
            start, stop = division.record_range(part)
            if start == stop:
                return none.repeat(division.steps)
            longest = self.records.longest(
                start,
                stop,
                self._local_rows(part),
                shuffle=self.shuffle,
                seed=self.seed,
                epoch=epoch,
                part=part,
                skip_batches=skip_steps,
            )
            return longest.concatenate(none.repeat(division.steps - self._own_steps(part)))

        each = tuple(of_part(part) for part in range(self.parts))
        return tf.data.Dataset.zip(each).map(lambda *of_parts: tf.reduce_max(of_parts, axis=0))

    def _bucketed(self, epoch: Any, skip_steps: Any) -> tf.data.Dataset:
        """Returns the shares of batches of similar lengths, which all processes draw alike."""
        import tensorflow as tf

        division = self.division
        order = self.records.bucketed_order(
            self.num_records, self.global_batch_size, seed=self.seed, epoch=epoch
        )
        rows_before, rows_before_in_tail = (
            tf.constant(even_share(of, self.parts, self.part)[0], tf.int64)
            for of in (self.global_batch_size, self.tail)
        )
        full_steps = self.num_records // self.global_batch_size
        shares = division.shares(self.part)

        def numbers(step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            own, of = tf.unstack(shares(step))
            begin = step * self.global_batch_size
            of_all = order[begin : begin + of]
            first = tf.where(step < full_steps, rows_before, rows_before_in_tail)
            first, last = or_padding(first, own)
            return of_all[first:last], of_all

        steps = tf.data.Dataset.range(tf.cast(skip_steps, tf.int64), division.steps)
        rows = self._local_rows(self.part)
        return self.records.chosen(steps.map(numbers), rows, seed=self.seed, epoch=epoch)

    def bared(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Returns batches of x itself where they are to be bare, with shares if they carry them."""
        if not self.is_bare:
            return batches
        if self.shared:
            return batches.map(lambda batch, share: (batch[0], share))
        return batches.map(lambda *batch: batch[0])

    def own_rows(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Returns of global batches what the replicas of this process take."""
        if self.shared:
            batches = batches.map(self.own_share)
            if self.splits > 1:
                batches = batches.flat_map(self.split)
        return self.bared(batches)

    def own_share(self, *batch: Any) -> tuple[Any, tf.Tensor]:
        """Returns the rows of this process of a global batch, and the share that they are."""
        import tensorflow as tf

        of = tf.shape(tf.nest.flatten(batch)[0], tf.int64)[0]
        return piece(batch, (of, of), self.parts, self.part, self.speeds)

    def split(self, batch: Any, share: tf.Tensor) -> tf.data.Dataset:
        """Divides a batch among the replicas of this process: one element for each."""
        import tensorflow as tf

        replicas = tf.data.Dataset.range(self.splits)
        return replicas.map(lambda replica: piece(batch, share, self.splits, replica))

    def _weigh_by_class(self, x: Any, y: tf.Tensor, weight: tf.Tensor | None = None) -> tuple:
        """Turns class weights into sample weights, as Keras 2 does.

        Args:
            y: classes [batch], [batch, 1] or [batch, tokens, 1], or one-hot [batch, n] or
                [batch, tokens, n]; each token has the weight of its own class.
        """
        import tensorflow as tf

        from tfdist.records.reading.graph_checks import check, listed

        if not isinstance(y, tf.Tensor):
            raise DataError(
                "data for class_weight must have one label a record",
                received=f"{len(tf.nest.flatten(y))} by name or in a list",
                mend="Give one that stands alone, or sample weights instead",
            )
        known = int(max(self.class_weight)) + 1
        table = tf.constant([float(self.class_weight.get(c, math.nan)) for c in range(known)])
        has_last_axis = y.shape.rank is not None and y.shape.rank > 1
        size = y.shape[-1] if has_last_axis else 1

        def numbered() -> tf.Tensor:
            numbers = tf.squeeze(y, -1) if has_last_axis else tf.reshape(y, [-1])
            return tf.cast(tf.round(tf.cast(numbers, tf.float64)), tf.int64)

        if size is None:  # What Python makes is of any size: the batch tells.
            classes = tf.cond(tf.shape(y)[-1] > 1, lambda: tf.argmax(y, -1), numbered)
        else:
            classes = numbered() if size == 1 else tf.argmax(y, -1)
        weights = tf.gather(table, tf.clip_by_value(classes, 0, known - 1))
        is_named = (classes >= 0) & (classes < known) & ~tf.math.is_nan(weights)
        nameless = tf.unique(tf.boolean_mask(classes, ~is_named)).y
        are_named = check(
            tf.reduce_all(is_named),
            "class_weight must have a weight for each class of the data, 1 for one that counts as "
            "without",
            tf.strings.join(["none for class ", listed(nameless)]),
        )
        with tf.control_dependencies([are_named]):
            weights = tf.identity(weights)
        if weight is None:
            return x, y, weights
        weight = tf.cast(weight, tf.float32)
        rank = max(weights.shape.rank, weight.shape.rank)
        both = (w[(..., *[tf.newaxis] * (rank - w.shape.rank))] for w in (weights, weight))
        return x, y, tf.multiply(*both)


@dataclass(frozen=True)
class RedividedFeed:
    """Global batches in the order that another number of processes gives them.

    Which records a process has read of an epoch depends on how many there are. So each process
    reads all of a global batch here, and keeps its own share.
    """

    whole: Feed | MergedFeed
    feed: Feed

    @property
    def steps_per_epoch(self) -> int:
        return self.feed.steps_per_epoch

    @property
    def splits(self) -> int:
        return self.feed.splits

    @_as_written
    def epochs(self, first: int, last: int, *, skip_steps: int = 0) -> tf.data.Dataset:
        """Returns what ``Feed.epochs`` of ``feed`` would, in the other order."""
        return self.feed.own_rows(self.whole.epochs(first, last, skip_steps=skip_steps))


@dataclass(frozen=True)
class MergedFeed:
    """The same global batches, in the same order, as ``parts`` processes see together."""

    feeds: tuple[Feed, ...]

    @property
    def steps_per_epoch(self) -> int:
        return self.feeds[0].steps_per_epoch

    @_as_written
    def epochs(self, first: int, last: int, *, skip_steps: int = 0) -> tf.data.Dataset:
        import tensorflow as tf

        def true_rows(batch: Any, share: tf.Tensor) -> Any:
            return tf.nest.map_structure(lambda tensor: tensor[: share[0]], batch)

        def join(*parts: Any) -> Any:
            batches = [true_rows(batch, share) for batch, share in parts]
            return tf.nest.map_structure(lambda *tensors: tf.concat(tensors, 0), *batches)

        each = [feed.epochs(first, last, skip_steps=skip_steps) for feed in self.feeds]
        return tf.data.Dataset.zip(tuple(each)).map(join)


def fetched_ahead(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the batches, of which two are read while a step runs."""
    import tensorflow as tf

    # A fixed depth: autotune gains nothing here, and ending its thread costs up to 40 ms.
    options = tf.data.Options()
    options.autotune.enabled = False
    return batches.prefetch(2).with_options(options)


def in_batch_order(whole: Any, rows: Sequence[int], parts: int) -> Any:
    """Returns rows in the order of their batches, given in that of the parts that divided them.

    Args:
        whole: arrays [all rows, ...] of one structure: those of the first part, of the second, ...
        rows: of each batch.
    """
    import tensorflow as tf

    each = np.arange(parts)
    part_of = [np.repeat(each, even_share(of, parts, each)[1]) for of in rows]
    numbers = np.argsort(np.concatenate(part_of), kind="stable")  # Of the rows in ``whole``.
    place = np.argsort(numbers)
    return tf.nest.map_structure(lambda array: array[place], whole)
