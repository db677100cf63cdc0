"""What meshes on several ranks add up, where each rank holds one: gradients, and statistics.

Loss and metrics are those of the rank's own rows. A loss counts by the rank's part of the global
batch, so gradients of the ranks add up to those of one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.training.engine.collective import Collective
from tfdist.training.layers import losses


class Ranks:
    """The ranks as one step sees them.

    Args:
        told: int64 [2], the true rows of this rank, and those of the global batch.
    """

    def __init__(self, collective: Collective, told: tf.Tensor):
        self._collective = collective
        self.told = told
        self._num_sums = 0

    @property
    def part(self) -> tf.Tensor:
        """The rows of this rank over those of all, float []."""
        return losses.part_of(self.told)

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the sum over ranks, which all come to their sums in the same order."""
        self._num_sums += 1
        return self._collective.sum(tensor, f"mesh.{self._num_sums}")

    def sum_slices(self, slices: Sequence[tf.Tensor], first_places: Sequence[int]) -> list[Any]:
        """Returns the sums of what the devices hold; those of equal slices are made once.

        Args:
            first_places: for each device the first one that holds the same.
        """
        sums: list[Any] = []
        for place, first in enumerate(first_places):
            sums.append(self.sum(slices[place]) if place == first else sums[first])
        return sums


def true_labels(data: Any, ranks: Collective) -> tuple[Any, Any, Any, Any]:
    """Returns x, y and sample weights of a batch, and the share that they are of a global one.

    A rank that the uneven tail leaves without a row has a row of padding as x, and no labels.
    """
    if not ranks.shares_batches:
        return *tf.keras.utils.unpack_x_y_sample_weight(data), None
    batch, told = data
    x, y, weight = tf.keras.utils.unpack_x_y_sample_weight(batch)
    rows = int(told[0])
    y, weight = tf.nest.map_structure(
        lambda tensor: None if tensor is None else tensor[:rows], (y, weight)
    )
    return x, y, weight, told
