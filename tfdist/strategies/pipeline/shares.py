"""What one rank has of a global batch where each rank holds a pipeline.

Its microbatches divide its own rows. A loss is that of these rows, so its gradient counts by the
rank's part of the global batch, and the ranks' gradients add up to those of one device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.training.engine.collective import Collective
from tfdist.training.layers import losses
from tfdist.training.model.logits import changed


@dataclass(frozen=True)
class Share:
    """The rows of one rank, or of one process that is all.

    Attributes:
        is_real: bool or bool [], False when the batch is a row of padding.
        of_mean: float or float []: what the gradient of a mean over the rows is multiplied by.
        of_sum: float: the same of a sum over them.
        told: int64 [2], what the feed says: the true rows, and those of the global batch; None
            where one process has all.
    """

    is_real: Any = True
    of_mean: Any = 1.0
    of_sum: float = 1.0
    told: Any = None

    def true_rows(self, structure: Any) -> Any:
        """Returns tensors without padding, with the logits that a loss looks for."""
        if self.told is None:
            return structure
        rows = self.told[0]
        return tf.nest.map_structure(
            lambda tensor: None if tensor is None else changed(lambda t: t[:rows], tensor),
            structure,
        )

    def weights_of_sum(self, sample_weight: Any) -> Any:
        """Returns weights with which the sum over the rows is shown as part of that of all."""
        if self.told is None:
            return sample_weight
        return losses.weights_of_sum(sample_weight, self.told)


def share_of(data: Any, ranks: Collective) -> tuple[Any, Share]:
    """Returns the batch in what a feed has given, and the share that it is."""
    if not ranks.shares_batches:
        return data, Share()
    batch, told = data
    factor = losses.uncounted(ranks)
    part = losses.part_of(told)
    return batch, Share(told[0] > 0, part * factor, factor, told)
