"""``tfdist.all_gather`` and ``tfdist.reduce``: what all replicas have, in a user's own step."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.errors import unknown_choice
from tfdist.training.layers.replica_step import running_step


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


def reduce(tensor: Any, how: str = "mean") -> tf.Tensor:
    """Returns one number of all replicas, in a step of one's own; differentiable.

    On one device, and outside of a step, ``tensor`` is all there is, and comes back as it is.

    Args:
        tensor: computed of the rows of this replica, floating; of one shape on all.
        how: "mean" of what is a mean over rows: each replica counts by its rows. "sum" of what is
            a sum over rows: a replica without rows counts nothing.

    Raises:
        OptionError: another ``how``.
    """
    if how not in ("mean", "sum"):
        raise unknown_choice("way to reduce", how, ("mean", "sum"))
    tensor = tf.convert_to_tensor(tensor)
    step = running_step()
    if step is None or step.collective.num_replicas == 1:
        return tensor
    counted = step.part if how == "mean" else tf.cast(step.share[0] > 0, step.part.dtype)
    weighted = tf.math.multiply_no_nan(tensor, tf.cast(counted, tensor.dtype))
    return step.sum(weighted, step.name("reduced"))
