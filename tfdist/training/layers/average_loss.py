"""TensorFlow's own words for a replica's part of a loss, in a step of the user's own.

``tf.nn.compute_average_loss`` divides by the rows of the global batch, and
``tf.nn.scale_regularization_loss`` by the replicas, for a sum over replicas to be right. A user's
step runs as on one device, and what it gives is weighted by the replica's part (``losses``): there
both give what that makes the value of one device, and are not divided twice. A tape notes what loss
gradients of weights are asked of, and that these are means over rows as the loss is.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfdist.keras.tensors import all_raw
from tfdist.training.layers.replica_step import running_step

_average_of_all = tf.nn.compute_average_loss
_part_of_term = tf.nn.scale_regularization_loss
_gradient_of = tf.GradientTape.gradient


def take_as_meant() -> None:
    """Has TensorFlow's functions hear of the step that they are called in; outside of one, and for
    others who call them, they stay what they are."""
    tf.nn.compute_average_loss = _average
    tf.nn.scale_regularization_loss = _term
    tf.GradientTape.gradient = _gradient


@tf.autograph.experimental.do_not_convert
@functools.wraps(_average_of_all)
def _average(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
) -> tf.Tensor:
    step = running_step()
    if step is None:
        return _average_of_all(per_example_loss, sample_weight, global_batch_size)
    if global_batch_size is None:
        rows = tf.shape(per_example_loss)[0]
        return _average_of_all(per_example_loss, sample_weight, rows)
    # A batch of fewer rows is divided by as many on one device, too.
    average = _average_of_all(per_example_loss, sample_weight, global_batch_size)
    return step.settle(tf.math.divide_no_nan(average, tf.cast(step.part, average.dtype)), "mean")


@tf.autograph.experimental.do_not_convert
@functools.wraps(_part_of_term)
def _term(regularization_loss: Any) -> tf.Tensor:
    if running_step() is None:
        return _part_of_term(regularization_loss)
    return tf.reduce_sum(regularization_loss)


@functools.wraps(_gradient_of)  # Not do_not_convert: a call that is computed again may ask "if".
def _gradient(tape: tf.GradientTape, target: Any, sources: Any, *args: Any, **options: Any) -> Any:
    gradients = _gradient_of(tape, target, sources, *args, **options)
    if not args and "output_gradients" not in options:  # Else they are parts of another loss.
        _note_losses(target, sources, gradients)
    return gradients


@tf.autograph.experimental.do_not_convert
def _note_losses(target: Any, sources: Any, gradients: Any) -> None:
    step = running_step()
    if step is None:
        return
    if any(isinstance(each, tf.Variable) for each in all_raw(tf.nest.flatten(sources))):
        step.losses += [each for each in tf.nest.flatten(target) if tf.is_tensor(each)]
        for gradient in tf.nest.flatten(gradients):
            if tf.is_tensor(gradient) and not isinstance(gradient, tf.IndexedSlices):
                step.gradients.add(id(gradient))
                step.kept.append(gradient)
