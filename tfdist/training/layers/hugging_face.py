"""Losses that HuggingFace's models compute themselves: means over the positions with a label.

Language models leave out positions whose label is -100, and a replica may have more of them than
others. A step of one's own counts by rows; so such a loss is weighted to count by positions.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfdist import keras
from tfdist.training.engine.binding import Binding
from tfdist.training.layers.replica_step import running_step

#: The method that each of their models computes its loss with.
_LOSS = "hf_compute_loss"
#: Whether it is trained on, and not a loss that was compiled.
_TRAINS_ON_IT = "_using_dummy_loss"
#: The label of a position that no loss counts.
_NO_LABEL = -100


def shared_loss(binding: Binding) -> dict[str, Any]:
    """Returns what has the loss that a model of HuggingFace computes be that of the global batch.

    Name of a method -> what takes its place.
    """
    given = getattr(binding.model, _LOSS, None)
    if given is None:
        return {}

    @functools.wraps(given)
    def loss(labels: Any, *args: Any, **options: Any) -> Any:
        if not getattr(binding.model, _TRAINS_ON_IT):
            return given(labels, *args, **options)
        shown = keras.losses.loss_shown(binding.model)
        return _by_positions(given(labels, *args, **options), labels, shown)

    return {_LOSS: tf.autograph.experimental.do_not_convert(loss)}


def _by_positions(loss: tf.Tensor, labels: Any, shown: Any) -> tf.Tensor:
    """Returns the loss of a replica, which the step weighs by its rows, weighted by positions.

    Args:
        loss: a mean over the positions with a label, or one number for each of them.
        labels: int [batch, positions]; others are of whole rows.
        shown: the metric that the loss is shown by.
    """
    step = running_step()
    if step is None or not tf.is_tensor(labels):
        return loss
    if not labels.dtype.is_integer or labels.shape.rank != 2:
        return loss
    own = tf.reduce_sum(tf.cast(labels != _NO_LABEL, loss.dtype))
    own = tf.where(step.share[0] > 0, own, tf.zeros_like(own))  # Else it is a row of padding.
    of_all = step.sum(own, step.name("positions"))
    part = tf.cast(step.part, loss.dtype)
    # Keras counts a batch once in what an epoch shows, or each of its positions.
    step.loss_weights[id(shown)] = part * (1 if loss.shape.num_elements() == 1 else of_all)
    return loss * tf.math.divide_no_nan(tf.math.divide_no_nan(own, of_all), part)
