"""The train and test step that every data-parallel engine shares.

Both give one device's numbers on the global batch, whatever the shares of the replicas:

* rows of padding are cut off before loss and metrics, so neither ever sees them;
* each replica's loss is weighted by its true rows over those of the global batch;
* losses that do not depend on rows (regularizers) are counted once.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.errors import ModelError
from tfdist.training.batch_norm import shared_step
from tfdist.training.collective import Collective


class SharedSteps:
    """``train_step``, ``test_step`` and ``predict_step`` of a model on several replicas."""

    def __init__(self, model: tf.keras.Model, collective: Collective):
        self._model = model
        self._collective = collective
        self._loss_is_sum = _loss_is_sum(model)

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        model, optimizer = self._model, self._model.optimizer
        x, y, sample_weight, share = _unpack(data)
        with tf.GradientTape() as tape:
            with shared_step(is_real=share[0] > 0):
                y_pred = model(x, training=True)
            x, y, y_pred, sample_weight = _true_rows(share[0], x, y, y_pred, sample_weight)
            loss = model.compute_loss(x, y, y_pred, sample_weight)
            loss = self._weigh(loss, y_pred, share)
        variables = model.trainable_variables
        if hasattr(optimizer, "compute_gradients"):  # It also undoes a loss scale.
            gradients = [g for g, _ in optimizer.compute_gradients(loss, variables, tape)]
        else:
            gradients = tape.gradient(loss, variables)
        self._collective.apply(optimizer, gradients, variables)
        return model.compute_metrics(x, y, y_pred, sample_weight)

    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        model = self._model
        x, y, sample_weight, share = _unpack(data)
        y_pred = model(x, training=False)
        x, y, y_pred, sample_weight = _true_rows(share[0], x, y, y_pred, sample_weight)
        model.compute_loss(x, y, y_pred, sample_weight)
        return model.compute_metrics(x, y, y_pred, sample_weight)

    def predict_step(self, data: Any) -> Any:
        x, _, _, share = _unpack(data)
        return _true_rows(share[0], self._model(x, training=False))[0]

    def _weigh(self, loss: tf.Tensor, y_pred: Any, share: tf.Tensor) -> tf.Tensor:
        """Scales the part of ``loss`` that depends on rows to this replica's part of the batch."""
        collective = self._collective
        if self._loss_is_sum:
            part = float(collective.num_replicas) if collective.gradients_are_averaged else 1.0
        else:
            part = self._part_of_mean(y_pred, share, loss.dtype)
        if not self._model.losses:
            return loss * part
        # Keras has added the regularizers already, divided by its own count of replicas.
        keras_replicas = tf.distribute.get_strategy().num_replicas_in_sync
        regularizers = tf.add_n([tf.cast(term, loss.dtype) for term in self._model.losses])
        regularizers /= keras_replicas
        return (loss - regularizers) * part + regularizers

    def _part_of_mean(self, y_pred: Any, share: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """Returns this replica's weight, such that the mean over replicas is one device's mean."""
        outputs = tf.nest.flatten(y_pred)
        mask = getattr(outputs[0], "_keras_mask", None)
        if mask is not None and len(outputs) == 1:
            # Keras divides a masked loss by the unmasked positions of the batch it sees.
            rows = tf.reduce_sum(tf.cast(mask, dtype))
            of = self._collective.sum(rows, "mask")
        else:
            rows, of = tf.cast(share[0], dtype), tf.cast(share[1], dtype)
        return tf.math.divide_no_nan(rows * self._collective.num_replicas, of)


def _unpack(data: Any) -> tuple[Any, Any, Any, tf.Tensor]:
    batch, share = data
    x, y, sample_weight = tf.keras.utils.unpack_x_y_sample_weight(batch)
    return x, y, sample_weight, share


def _true_rows(rows: tf.Tensor, *structures: Any) -> list[Any]:
    """Cuts each tensor to its first ``rows`` rows; a mask that Keras attached goes along."""

    def cut(tensor: Any) -> Any:
        if tensor is None:
            return None
        true = tensor[:rows]
        mask = getattr(tensor, "_keras_mask", None)
        if mask is not None:
            true._keras_mask = mask[:rows]
        return true

    return [tf.nest.map_structure(cut, structure) for structure in structures]


def _loss_is_sum(model: tf.keras.Model) -> bool:
    """Whether the compiled losses are sums over rows (True) or means (False).

    Raises:
        ModelError: for a loss without reduction, and for sums and means in one model.
    """
    reductions = {
        getattr(loss, "reduction", tf.keras.losses.Reduction.AUTO)
        for loss in tf.nest.flatten(model.loss)
        if loss is not None
    }
    kinds = {str(reduction) for reduction in reductions}
    if tf.keras.losses.Reduction.NONE in kinds:
        raise ModelError(
            "a compiled loss must reduce over the rows of a batch",
            received="a loss with reduction='none'",
            mend="Compile with reduction='sum_over_batch_size' or 'sum'",
        )
    is_sum = tf.keras.losses.Reduction.SUM in kinds
    if is_sum and len(kinds) > 1:
        raise ModelError(
            "the losses of one model must all be sums or all be means",
            received=", ".join(sorted(kinds)),
            mend="Compile all losses with the same reduction",
        )
    return is_sum
