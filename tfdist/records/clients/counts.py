"""How many records each client has, and of which classes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ClientCounts:
    """The records of all clients, counted.

    Attributes:
        ids: the clients.
        num_records: int64 [clients].
        partition: how the records were dealt, "dirichlet:0.3"; None when that is not known.
        class_ids: the ids that occur, and those between that have a name; None without class ids.
        class_names: the name of each, or its id as text.
        counts: int64 [clients, classes], or None; a client that cannot be read has none.
    """

    ids: tuple[str, ...]
    num_records: np.ndarray
    partition: str | None = None
    class_ids: tuple[int, ...] | None = None
    class_names: tuple[str, ...] | None = None
    counts: np.ndarray | None = None

    @property
    def distances(self) -> np.ndarray | None:
        """How far each client's classes are from those of all clients together, float64 [clients].

        The total variation distance of the proportions: 0 when they are the same, near 1 when the
        client has but classes that are rare elsewhere. NaN for a client without records.
        """
        if self.counts is None:
            return None
        everyone = self.counts.sum(axis=0) / self.counts.sum()
        totals = self.counts.sum(axis=1, keepdims=True)
        shares = np.divide(
            self.counts, totals, np.full(self.counts.shape, np.nan), where=totals > 0
        )
        return np.abs(shares - everyone).sum(axis=1) / 2
