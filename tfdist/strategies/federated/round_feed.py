"""The rounds of clients as the ``fit`` of all strategies reads data."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from tfdist.strategies.federated.feed import ClientFeed
from tfdist.training.feed.feed import Feed
from tfdist.training.feed.keras_feed import GivenRecords


@dataclass(frozen=True, kw_only=True)
class RoundFeed(Feed):
    """The numbers of rounds: each is an epoch of one step, which asks the clients itself.

    Attributes:
        clients: who is asked.
    """

    clients: ClientFeed

    @classmethod
    def of(cls, clients: ClientFeed) -> RoundFeed:
        """Returns the rounds of ``clients``."""
        spec = clients.batch_spec
        return cls(
            records=GivenRecords((spec["x"], spec["y"])),
            global_batch_size=clients.global_batch_size,
            seed=clients.seed,
            clients=clients,
        )

    @property
    def steps_per_epoch(self) -> int:
        return self.clients.callback_steps

    @property
    def num_records(self) -> int:
        return self.clients.num_records

    def begun_by(self, parts: int) -> RoundFeed:
        return self  # Their order is that of each client.

    def epochs(self, first: int, last: int, *, skip_steps: int = 0) -> tf.data.Dataset:
        return tf.data.Dataset.range(first, last)
