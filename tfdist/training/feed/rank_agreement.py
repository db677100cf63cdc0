"""What each process has seen of batches that all of them make, each for itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import DataError
from tfdist.records.reading.source import fingerprint
from tfdist.training.engine.collective import Collective


class Seen:
    """The batches that this process has read, in their order.

    Attributes:
        rows: of each batch.
    """

    def __init__(self) -> None:
        self.rows: list[int] = []
        self._fingerprints: list[str] = []
        self._checked = 0

    def watched(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the same batches, of which each is noted when it is read."""

        def note(*leaves: np.ndarray) -> np.int64:
            self.rows.append(len(leaves[0]))
            self._fingerprints.append(fingerprint(leaves))
            return np.int64(0)

        def noted(*batch: Any) -> Any:
            done = tf.numpy_function(note, tf.nest.flatten(batch), tf.int64)
            with tf.control_dependencies([done]):
                return tf.nest.map_structure(tf.identity, batch)

        return batches.map(noted)

    def confirm(self, gather: Callable[[Any], list[Any]]) -> None:
        """Returns when all processes have read the same batches so far. All must call it.

        Args:
            gather: see ``Collective.gather``.

        Raises:
            DataError: they have not.
        """
        read = gather(self._fingerprints[self._checked :])
        both = min(map(len, read))  # Some may have read further ahead.
        for rank, found in enumerate(read):
            if found[:both] != read[0][:both]:
                step = next(n for n in range(both) if found[n] != read[0][n])
                raise DataError(
                    "all ranks must read the same batches, whose rows they divide",
                    received=f"other rows on rank {rank} than on rank 0, in batch "
                    f"{self._checked + step}",
                    mend="Give shuffle(..., seed=...) and all else that is drawn a seed, call "
                    "keras.utils.set_random_seed before the data is made, or use strategy.dataset",
                )
        self._checked += both


class SameBatches(tf.keras.callbacks.Callback):
    """Ends a fit whose processes read other batches: in the first step, or after an epoch."""

    def __init__(self, seen: list[Seen], collective: Collective):
        super().__init__()
        self._seen = seen
        self._collective = collective
        self._has_begun = False

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._confirm()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self._confirm()

    def _confirm(self) -> None:
        for seen in self._seen:
            seen.confirm(self._collective.gather)
