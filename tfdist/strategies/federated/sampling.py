"""Who takes part in a round, drawn from a seed: cohorts, drop-outs and stragglers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


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
