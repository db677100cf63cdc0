"""``tfdist.all_gather``: rows of all replicas within a user's own step."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.training.running_step import running_step


def all_gather(tensor: Any) -> tf.Tensor:
    """Returns the rows of all replicas, in a ``train_step`` or ``test_step`` of one's own.

    A loss that compares rows with each other, as SimCLR's and CLIP's do, is that of one device when
    it is computed of what this returns. Gradients flow back to the replica that a row came from.
    On one device, and outside of a step, ``tensor`` is all there is, and comes back as it is.

    Args:
        tensor: of the rows of this replica, [rows, ...]; alike on all but for the rows.

    Returns:
        [rows of the global batch, ...], in the same order on every replica.
    """
    tensor = tf.convert_to_tensor(tensor)
    step = running_step()
    if step is None or step.collective.num_replicas == 1:
        return tensor
    around = [list(step.rows_around()), *([[0, 0]] * (tensor.shape.rank - 1))]
    # A replica without rows has one of padding.
    return step.sum(tf.pad(tensor[: step.share[0]], around), step.name("gathered"))
