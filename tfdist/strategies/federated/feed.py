"""What ``strategy.dataset`` returns to train on: clients, who of them takes part in a round, drawn
from a seed, and how each goes over its records."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import DataError
from tfdist.records.clients.collection import Clients
from tfdist.records.reading.map_fn import spec_of_batch
from tfdist.training.layers.data_errors import class_without_weight


@dataclass(frozen=True)
class Cohort:
    """The clients that a round asks.

    Attributes:
        asked: their ids; all of them get the model.
        dropped: those of them that never answer.
        shares: those of them that are slow -> the share of their local work that they do, 0 to 1.
    """

    asked: tuple[str, ...]
    dropped: frozenset[str] = frozenset()
    shares: dict[str, float] = field(default_factory=dict)

    @property
    def answering(self) -> tuple[str, ...]:
        return tuple(client for client in self.asked if client not in self.dropped)


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Draws the cohort of each round; the same one for the same seed, round and attempt.

    Attributes:
        clients_per_round: how many of the clients; None asks all.
        is_poisson: each client is asked by itself, with the probability that makes
            ``clients_per_round`` the expected number: what the accounting of privacy assumes.
        dropout_rate: probability that a client that was asked never answers.
        straggler_rate: probability that a client does only a part of its local work.
        seed: of all of it.
    """

    clients_per_round: int | None
    is_poisson: bool = False
    dropout_rate: float = 0.0
    straggler_rate: float = 0.0
    seed: int = 0

    def expected(self, num_clients: int) -> int:
        asked = self.clients_per_round
        return num_clients if asked is None else min(asked, num_clients)

    def cohort(self, ids: Sequence[str], round_number: int, attempt: int = 0) -> Cohort:
        """Returns the cohort of a round; a repeated round has another attempt, and another one."""
        rng = np.random.default_rng([self.seed, round_number, attempt])
        expected = self.expected(len(ids))
        if expected == len(ids):
            chosen = np.arange(len(ids))
        elif self.is_poisson:
            chosen = np.flatnonzero(rng.random(len(ids)) < expected / len(ids))
        else:
            chosen = np.sort(rng.choice(len(ids), expected, replace=False))
        asked = tuple(ids[index] for index in chosen)
        drops = rng.random(len(asked)) < self.dropout_rate
        slow = rng.random(len(asked)) < self.straggler_rate
        shares = rng.random(len(asked))
        return Cohort(
            asked,
            frozenset(client for client, drop in zip(asked, drops, strict=True) if drop),
            {
                client: float(share)
                for client, is_slow, share in zip(asked, slow, shares, strict=True)
                if is_slow
            },
        )


@dataclass(frozen=True, kw_only=True)
class ClientFeed:
    """Clients with the local work of each round.

    Attributes:
        clients: whose records these are; ``clients.describe()`` shows who has what.
        sampler: who takes part in which round.
        local_batch_size: records of one step on a client; None takes all of a client's at once.
        local_epochs: times that a client goes over its records in a round.
        num_replicas: clients expected in a round.
        seed: of the order of the records on the clients.
        class_weight: class -> weight, as in ``Model.fit``.
        limit: records of each client that are used, the first ones; None uses all.
    """

    clients: Clients
    sampler: Sampler
    local_batch_size: int | None
    local_epochs: int
    num_replicas: int
    seed: int = 0
    class_weight: Mapping[int, float] | None = None
    limit: int | None = None

    # What the command line, checkpoints and ``tfdist.verify`` ask of any training data -----------

    @functools.cached_property
    def num_records(self) -> int:
        return sum(self._num_used(client) for client in self.clients.ids)

    @property
    def records_per_epoch(self) -> int:
        """Records that a round is expected to compute on."""
        share = self.num_replicas / len(self.clients.ids)
        return max(1, round(self.num_records * share * self.local_epochs))

    @property
    def global_batch_size(self) -> int:
        return self.num_replicas * (self.local_batch_size or self._most)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the client that takes most of them in a round."""
        return self.local_epochs * self._steps(self._most)

    @property
    def callback_steps(self) -> int:
        """Times that callbacks are told of a step in an epoch: a round is one."""
        return 1

    @property
    def tail(self) -> int:
        """Rows of the last, short step of a local epoch of the largest client; 0 when even."""
        return 0 if self.local_batch_size is None else self._most % self.local_batch_size

    def __len__(self) -> int:
        return self.steps_per_epoch

    def weighted_by_class(self, class_weight: Mapping[int, float] | None) -> ClientFeed:
        return replace(self, class_weight=class_weight) if class_weight else self

    def limited(self, steps: int) -> ClientFeed:
        """Returns a feed of at most ``steps`` steps a round, the last on an uneven batch."""
        if self.local_batch_size is None:
            return self
        steps = max(1, steps // self.local_epochs)
        tail = max(1, self.local_batch_size // 3)
        limit = min((steps - 1) * self.local_batch_size + tail, self._most)
        return replace(self, limit=limit)

    def on_one_device(self) -> _OneDevice:
        """Returns the records as one device takes them: step k of all clients is its step k."""
        return _OneDevice(self)

    # What a round needs --------------------------------------------------------------------------

    @functools.cached_property
    def batch_spec(self) -> OrderedDict:
        """Of a client's batch: x, y, and w where records have weights."""
        batched = spec_of_batch(self.clients.element_spec)
        if len(batched) < 2:
            raise DataError(
                "a federated fit must have labels",
                received="records of inputs alone",
                mend="Give the labels beside the inputs: (x, y)",
            )
        spec = OrderedDict(zip(("x", "y", "w"), _by_name(batched), strict=False))
        if self.class_weight:
            given = spec.get("w")
            shape = given.shape if isinstance(given, tf.TensorSpec) else [None]
            spec["w"] = tf.TensorSpec(shape, tf.float32)
        return spec

    def load(self, client: str, round_number: int) -> OrderedDict:
        """Returns the records of a client in a round as arrays by the names of ``batch_spec``.

        Raises:
            DataError: they cannot be read, or not be trained on.
        """
        loaded = self.clients.load(client, epoch=round_number)
        if self.limit is not None:
            loaded = tf.nest.map_structure(lambda array: array[: self.limit], loaded)
        arrays = OrderedDict(zip(("x", "y", "w"), _by_name(loaded), strict=False))
        if self.class_weight:
            arrays["w"] = _weigh_by_class(arrays["y"], arrays.get("w"), self.class_weight)
        return arrays

    def order(
        self, rows: int, slot: int, round_number: int, share: float | None = None
    ) -> np.ndarray:
        """Returns which records each step of a client's local work takes.

        Args:
            rows: of the client.
            slot: the place of the client in the round.
            round_number: counted from 0; the order of the records depends on it.
            share: of the steps that the client does; None does all.

        Returns:
            int32 [steps, batch], numbers of records; -1 is none, at the end of a short batch.
        """
        batch_size = min(self.local_batch_size or rows, rows)
        rng = np.random.default_rng([self.seed, round_number, slot])
        epochs = np.full([self.local_epochs, self._steps(rows) * batch_size], -1, np.int32)
        for epoch in epochs:
            epoch[:rows] = rng.permutation(rows) if batch_size < rows else np.arange(rows)
        order = epochs.reshape(-1, batch_size)
        return order if share is None else order[: max(1, int(share * len(order)))]

    def _steps(self, rows: int) -> int:
        return -(-rows // (self.local_batch_size or rows or 1))

    def work_of(self, client: str) -> int:
        """Returns what a client has to do in a round, as far as its records can be counted: steps,
        or records where all of them are one step."""
        used = self._num_used(client)
        return used if self.local_batch_size is None else self.local_epochs * self._steps(used)

    def _num_used(self, client: str) -> int:
        count = self.clients.num_records(client)
        return count if self.limit is None else min(count, self.limit)

    @functools.cached_property
    def _most(self) -> int:
        return max((self._num_used(client) for client in self.clients.ids), default=0)


@dataclass(frozen=True)
class _OneDevice:
    """The rounds of a feed as batches for one device; nobody drops out and nobody is slow."""

    feed: ClientFeed

    @property
    def steps_per_epoch(self) -> int:
        return self.feed.steps_per_epoch

    def epochs(self, first: int, last: int) -> tf.data.Dataset:
        rounds = [self._round(number) for number in range(first, last)]
        return functools.reduce(lambda done, more: done.concatenate(more), rounds)

    def _round(self, number: int) -> tf.data.Dataset:
        feed = self.feed
        cohort = feed.sampler.cohort(feed.clients.ids, number)
        each = [feed.load(client, number) for client in cohort.asked]
        orders = [feed.order(num_rows(arrays), slot, number) for slot, arrays in enumerate(each)]

        def steps() -> Any:
            for step in range(feed.steps_per_epoch):
                parts = [
                    _taken(arrays, order[step])
                    for arrays, order in zip(each, orders, strict=True)
                    if step < len(order)
                ]
                if parts:
                    joined = tf.nest.map_structure(lambda *rows: np.concatenate(rows), *parts)
                    yield tuple(joined.values())

        spec = tuple(feed.batch_spec.values())
        return tf.data.Dataset.from_generator(steps, output_signature=spec)


def _taken(arrays: OrderedDict, rows: np.ndarray) -> OrderedDict:
    return tf.nest.map_structure(lambda array: array[rows[rows >= 0]], arrays)


def num_rows(arrays: OrderedDict) -> int:
    """Returns the number of records of what ``load`` returned."""
    return len(tf.nest.flatten(arrays["x"])[0])


def _by_name(structure: Any) -> Any:
    """Returns inputs, labels and weights with their dicts in the order of names: TFF takes no
    other."""
    if isinstance(structure, Mapping):
        return OrderedDict((name, _by_name(structure[name])) for name in sorted(structure))
    return tuple(map(_by_name, structure)) if isinstance(structure, tuple) else structure


def _weigh_by_class(
    y: Any, weight: np.ndarray | None, class_weight: Mapping[int, float]
) -> np.ndarray:
    """Returns sample weights, float32 [records]; y: classes [records] or one-hot [records, n]."""
    if not isinstance(y, np.ndarray) or y.ndim > 2:
        several = tf.nest.flatten(y)
        shape = list(several[0].shape[1:])
        raise DataError(
            "data for class_weight must have one label a record",
            received=f"{len(several)} labels" if several[1:] else f"labels of the shape {shape}",
            mend="Give sample weights instead",
        )
    classes = y.argmax(-1) if y.ndim > 1 and y.shape[-1] != 1 else y.reshape(-1)
    nameless = np.setdiff1d(classes, list(class_weight))
    if nameless.size:
        raise class_without_weight(", ".join(f"{int(c)}" for c in nameless[:8]))
    weights = np.ones(len(classes), np.float32)
    for number, value in class_weight.items():
        weights[classes == number] = value
    if weight is None:
        return weights
    weight = np.asarray(weight, np.float32)
    # There may be one for each label: [records, 1].
    return weights.reshape(-1, *[1] * (weight.ndim - 1)) * weight
