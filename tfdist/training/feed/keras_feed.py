"""The batches that a fit was given as they are: the replicas divide the rows of each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.records.reading.elementwise import begun_anew
from tfdist.records.reading.graph_checks import check
from tfdist.training.feed.feed import Feed, fetched_ahead, in_batch_order
from tfdist.training.feed.rank_agreement import Seen

ENDLESS = 2**62


@dataclass(frozen=True)
class GivenRecords:
    """What is known of data whose records nobody has counted.

    Attributes:
        element_spec: of a batch, (x[, y[, sample_weight]]) of tf.TensorSpec.
    """

    element_spec: tuple[Any, ...]
    has_map_fn = False
    padding = None
    padding_code = 0
    is_sequential = False
    is_bucketed = False
    fingerprint = None


class GivenBatches:
    """Batches for evaluation: each pass begins anew, as Keras begins its own.

    Args:
        dataset: of batches.
        begins_before: whether another pass is begun before each, which draws a shuffle's order.
    """

    def __init__(self, dataset: tf.data.Dataset, *, begins_before: bool = False):
        self.dataset = dataset
        self._begins_before = begins_before

    def first(self) -> Any:
        """Returns the first batch where that changes nothing of what is read, else None."""

    def read(self, first: int, count: int | None) -> tf.data.Dataset:
        """Returns ``count`` batches from number ``first`` on; None is all."""
        batches = self.dataset.skip(first)
        if count is not None:
            batches = lasting(batches).take(count)

        def begun(_: tf.Tensor) -> tf.data.Dataset:
            if self._begins_before:
                iter(self.dataset)
            return batches

        # Of no known length: Keras would begin the whole twice.
        return tf.data.Dataset.range(1).flat_map(begun)


class GivenStream(GivenBatches):
    """The batches of one fit, of which each is read once: Keras' fit does not go back.

    So a second fit on the same dataset goes on with its random numbers where this one ended.

    Args:
        dataset: of all batches of all epochs.
        begun_at: the number of the first one.
    """

    def __init__(self, dataset: tf.data.Dataset, begun_at: int):
        super().__init__(dataset)
        self._next = begun_at
        self._iterator: Any = None

    def first(self) -> Any:
        if self._iterator is None and self.dataset.cardinality() != 0:
            of_all = _begun(self.dataset)
            first = of_all.get_next()
            others = tf.data.Dataset.range(ENDLESS).map(lambda _: of_all.get_next())
            self.dataset = tf.data.Dataset.from_tensors(first).concatenate(others)
            return first
        return None

    def read(self, first: int, count: int) -> tf.data.Dataset:
        if self._iterator is None:
            # A fit that is resumed reads again what lies before: it may be drawn at random.
            skipped = first - self._next
            self._iterator = _begun(self.dataset.skip(skipped))
            self._next = first
        assert first == self._next, (first, self._next)
        self._next += count
        return tf.data.Dataset.range(count).map(lambda _: self._iterator.get_next())


def _begun(dataset: tf.data.Dataset) -> Any:
    """Returns an iterator that begins no pass before one of its batches is asked for."""
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return iter(lasting(dataset).with_options(options))


def passes(
    dataset: tf.data.Dataset, steps: int, is_read: Callable[[tf.Tensor], Any]
) -> tf.data.Dataset:
    """Returns the first ``steps`` batches of pass after pass, each an iterator as Keras' epoch is.

    A shuffle goes on with what it draws, a map draws the same again; not so in ``repeat``.

    Args:
        dataset: of batches.
        is_read: of the number of a pass, whether it is more than begun.
    """

    dataset = lasting(dataset)

    def one_pass(number: tf.Tensor) -> tf.data.Dataset:
        return begun_anew(dataset, tf.where(is_read(number), tf.constant(steps, tf.int64), 0))

    return tf.data.Dataset.range(ENDLESS).flat_map(one_pass)


def lasting(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset followed by an error, so that no training ends early and unnoticed."""
    rule = "batches must last for all steps, or come with .repeat() or fewer steps"
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        return dataset
    spec = dataset.element_spec

    def nothing(_: tf.Tensor) -> Any:
        ended = check(tf.constant(False), rule, tf.constant("data that ended before"))
        with tf.control_dependencies([ended]):
            return _no_rows(spec)

    # Again and again: whoever asks after the first error must not be told of an end.
    return dataset.concatenate(tf.data.Dataset.range(1).repeat().map(nothing))


def counted(dataset: tf.data.Dataset, steps: int, option: str) -> tf.data.Dataset:
    """Returns the dataset, with an error before the last batch where ``steps`` are not all of them.

    Args:
        option: what spares to count them.
    """
    rule = f"data must give as many batches in each pass as at first, or come with {option}"
    nothing = _no_rows(dataset.element_spec)

    def one_behind(state: tuple[tf.Tensor, Any], given: Any, is_there: tf.Tensor) -> Any:
        number, before = state
        received = tf.where(is_there, "more batches", "fewer batches, or none")
        known = check(is_there == (number < steps), rule, received)
        with tf.control_dependencies([known]):
            return (number + 1, given), tf.nest.map_structure(tf.identity, before)

    end = tf.data.Dataset.from_tensors((nothing, False)).repeat()
    with_end = dataset.map(lambda *batch: (batch, True)).concatenate(end)
    initial = tf.constant(0), nothing
    return with_end.scan(initial, lambda state, item: one_behind(state, *item)).skip(1).take(steps)


def _no_rows(spec: Any) -> Any:
    return tf.nest.map_structure(
        lambda leaf: tf.zeros([size or 0 for size in leaf.shape], leaf.dtype), spec
    )


@dataclass(frozen=True, kw_only=True)
class GivenFeed(Feed):
    """A feed of global batches as they were given, read by every process.

    Attributes:
        batches: what is read.
        steps: of an epoch; None where it is read to its end.
        seen: what this process has read.
        global_batch_size: rows of a batch, where they are known; otherwise 0.
    """

    batches: GivenBatches
    steps: int | None
    seen: Seen = field(default_factory=Seen)
    global_batch_size: int = 0

    def __post_init__(self) -> None:
        """Nothing is known of sizes: a batch may have fewer rows than there are replicas."""

    @property
    def steps_per_epoch(self) -> int | None:
        return self.steps

    @property
    def num_records(self) -> int:
        return self.global_batch_size  # Nobody has counted them.

    @property
    def tail(self) -> int:
        return 0

    def begun_by(self, parts: int) -> GivenFeed:
        return self

    def evaluated(self, *, is_masked: bool = False) -> GivenFeed:
        return replace(self, speeds=None)

    def specimen(self) -> GivenFeed:
        """Returns a feed of the same kind that gives nothing, for a step to be traced with."""
        none = GivenBatches(self.batches.dataset.take(0))
        return replace(self, batches=none, steps=0, seen=Seen(), speeds=None)

    def first_rows(self, count: int) -> Any:
        batch = self.batches.first()
        if batch is not None and self.class_weight:
            batch = self._weigh_by_class(*batch)
        return tf.nest.map_structure(lambda tensor: tensor[:count], batch)

    def in_order_of_records(self, local: Sequence[Any]) -> Any:
        whole = tf.nest.map_structure(lambda *arrays: np.concatenate(arrays), *local)
        return whole if self.parts == 1 else in_batch_order(whole, self.seen.rows, self.parts)

    def epochs(self, first: int, last: int, *, skip_steps: int = 0) -> tf.data.Dataset:
        if self.steps is None:
            batches = self.batches.read(0, None)
        else:
            begin = first * self.steps + skip_steps
            batches = self.batches.read(begin, last * self.steps - begin)
        if self.parts > 1:
            batches = self.seen.watched(batches)
        if self.class_weight:
            batches = batches.map(self._weigh_by_class)
        return fetched_ahead(self.own_rows(batches))
