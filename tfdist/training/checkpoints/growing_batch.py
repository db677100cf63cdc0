"""A callback that gives each epoch a global batch of its own; checkpoints remember which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class GrowingBatch(tf.keras.callbacks.Callback):
    """What a fit and its checkpoints know of such a callback.

    Attributes:
        grows: whether it chooses; False leaves each epoch as the data was given.
        first_batch: as the data was given; None before a fit.
        batch: of the epoch that runs or comes.
        gain: what the learning rate is multiplied by for it.
    """

    grows = False
    first_batch: int | None = None
    batch: int | None = None
    gain: float | None = None

    def forget(self) -> None:
        """Has the next fit begin with the batch that its data is given with."""
        self.first_batch = self.batch = self.gain = None


def growing_among(callbacks: Sequence[Any]) -> GrowingBatch | None:
    """Returns the one of ``callbacks`` that chooses batches; None where none does."""
    return next((c for c in callbacks if isinstance(c, GrowingBatch) and c.grows), None)
