"""Distillation: a small model learns from the outputs of a large one.

Distilling the knowledge in a neural network, Hinton et al. 2015, arXiv:1503.02531, section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.errors import ModelError, OptionError
from tfdist.export.models import open_model
from tfdist.export.smaller import tuning
from tfdist.export.smaller.measuring import Comparison, Scale
from tfdist.strategies.base import called
from tfdist.training.engine.options import check_count
from tfdist.training.layers.data_errors import check_labels

_SMALLEST_PROBABILITY = 1e-7


def distill(
    teacher: tf.keras.Model,
    student_fn: Callable[[], tf.keras.Model] | tf.keras.Model,
    data: Any,
    *,
    epochs: int = 5,
    temperature: float = 4.0,
    teacher_share: float = 0.7,
    global_batch_size: int = 64,
    seed: int = 0,
) -> tuple[tf.keras.Model, Comparison]:
    """Trains a small model on the labels and on what the trained model says of each record.

    The loss is (1 - teacher_share) * the student's own loss + teacher_share * the distance to the
    teacher: for classes T**2 * KL of the softmax at temperature T, whether outputs are logits or
    probabilities; for one output a record the mean squared difference.

    Args:
        teacher: trained; of any strategy.
        student_fn: a function that returns the compiled student, or the student itself. It has
            outputs of the teacher's shape.
        data: as in ``prune``.
        epochs: to train for.
        temperature: at which classes are compared, > 0.
        teacher_share: of the loss, 0 to 1.
        global_batch_size, seed: as in ``prune``.

    Returns:
        The student, an ordinary compiled Keras model; and size and quality of the teacher
        (before) and of the student (after).

    Raises:
        ModelError: models that are none, or whose outputs differ in shape. OptionError: a
            temperature or share that cannot be.
    """
    if not isinstance(temperature, (int, float)) or not temperature > 0:
        raise OptionError(
            "temperature must be a number above 0",
            received=temperature,
            mend="Choose for example 4",
        )
    if not isinstance(teacher_share, (int, float)) or not 0 <= teacher_share <= 1:
        raise OptionError(
            "teacher_share must be a share, 0 to 1",
            received=teacher_share,
            mend="Choose for example 0.7",
        )
    check_count("epochs", epochs)
    whole = open_model(teacher).keras
    student = called(student_fn)
    shapes = [tuple(model.output_shape) for model in (whole, student)]
    if shapes[0] != shapes[1] or len(shapes[0]) != 2:
        raise ModelError(
            "teacher and student must have one output of the same shape, [records, values]",
            received=f"{shapes[0]} and {shapes[1]}",
            mend="Give the student's last layer as many units",
        )
    feed = tuning.training_feed(data, global_batch_size=global_batch_size, seed=seed)
    check_labels(student, feed.records.element_spec)
    pupil = _Pupil(whole, student, temperature, teacher_share)
    pupil.compile(optimizer=student.optimizer)
    pupil.fit(
        feed.epochs(0, epochs), epochs=epochs, steps_per_epoch=feed.steps_per_epoch, verbose=0
    )
    scale = Scale(student, data)
    return student, scale.compare("teacher, and student", teacher, student)


class _Pupil(tf.keras.Model):
    """The student, with a step that listens to the teacher."""

    def __init__(
        self,
        teacher: tf.keras.Model,
        student: tf.keras.Model,
        temperature: float,
        teacher_share: float,
    ):
        super().__init__()
        self._teacher = teacher
        self._student = student
        self._temperature = temperature
        self._share = teacher_share

    def train_step(self, batch: Any) -> dict[str, tf.Tensor]:
        x, y, weight = tf.keras.utils.unpack_x_y_sample_weight(batch)
        wanted = self._teacher(x, training=False)
        student = self._student
        with tf.GradientTape() as tape:
            said = student(x, training=True)
            loss = (1 - self._share) * student.compute_loss(x, y, said, weight)
            loss += self._share * self._distance(wanted, said, weight)
        variables = student.trainable_variables
        student.optimizer.minimize(loss, variables, tape=tape)
        return {"loss": loss}

    def _distance(self, wanted: tf.Tensor, said: tf.Tensor, weight: Any) -> tf.Tensor:
        if said.shape[-1] == 1:
            distance = tf.reduce_mean(tf.square(said - wanted), -1)
        else:
            soft = tf.nn.softmax(_logits(wanted) / self._temperature)
            log = tf.nn.log_softmax(_logits(said) / self._temperature)
            hardness = tf.nn.log_softmax(_logits(wanted) / self._temperature)
            distance = tf.reduce_sum(soft * (hardness - log), -1) * self._temperature**2
        if weight is not None:
            distance *= tf.cast(tf.reshape(weight, [-1]), distance.dtype)
        return tf.reduce_mean(distance)


def _logits(outputs: tf.Tensor) -> tf.Tensor:
    """Returns outputs as they are, or the logarithm of those that are probabilities."""
    sums = tf.reduce_sum(outputs, -1)
    are_probabilities = tf.logical_and(
        tf.reduce_all(outputs >= 0), tf.reduce_all(tf.abs(sums - 1) < 1e-3)
    )
    return tf.cond(
        are_probabilities,
        lambda: tf.math.log(tf.maximum(outputs, _SMALLEST_PROBABILITY)),
        lambda: outputs,
    )
