"""The train and test step that every data-parallel engine shares.

Both give one device's numbers on the global batch, whatever the shares of the replicas:

* rows of padding are cut off before loss and metrics, so neither ever sees them;
* each replica's loss is weighted by its true rows over those of the global batch;
* regularizers of weights are counted once, those of activations like the loss.
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
        loss_is_sum(model)  # A loss that cannot be shared is refused before the first step.

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        model, optimizer = self._model, self._model.optimizer
        batch, share = self._batch(data)
        with tf.GradientTape() as tape:
            with shared_step(is_real=share[0] > 0):
                y_pred = model(batch[0], training=True)
            x, y, y_pred, sample_weight = _true_rows(share[0], batch[0], batch[1], y_pred, batch[2])
            loss = self._loss(x, y, y_pred, sample_weight, share)
            loss = self._weigh(loss, share)
        variables = model.trainable_variables
        if hasattr(optimizer, "compute_gradients"):  # It also undoes a loss scale.
            gradients = [g for g, _ in optimizer.compute_gradients(loss, variables, tape)]
        else:
            gradients = tape.gradient(loss, variables)
        self._collective.apply(optimizer, gradients, variables, share[1])
        return self._metrics(x, y, y_pred, sample_weight)

    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        (x, y, sample_weight), share = self._batch(data)
        y_pred = self._model(x, training=False)
        x, y, y_pred, sample_weight = _true_rows(share[0], x, y, y_pred, sample_weight)
        self._loss(x, y, y_pred, sample_weight, share)
        return self._metrics(x, y, y_pred, sample_weight)

    def predict_step(self, data: Any) -> Any:
        (x, _, _), share = self._batch(data)
        return _true_rows(share[0], self._model(x, training=False))[0]

    def _batch(self, data: Any) -> tuple[tuple[Any, Any, Any], tf.Tensor]:
        batch, share = data
        return tf.keras.utils.unpack_x_y_sample_weight(batch), share

    def _metrics(self, *batch: Any) -> dict[str, tf.Tensor]:
        with self._model.get_metrics_result.within_step():
            return self._model.compute_metrics(*batch)

    def _loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, share: tf.Tensor) -> tf.Tensor:
        if not loss_is_sum(self._model):
            y_pred, sample_weight = self._masks_as_weights(y_pred, sample_weight, share)
        return self._model.compute_loss(x, y, y_pred, sample_weight)

    def _masks_as_weights(self, y_pred: Any, sample_weight: Any, share: tf.Tensor) -> Any:
        """Returns outputs without Keras' masks, and sample weights that say the same.

        Keras divides a masked loss by the unmasked positions of the batch it sees. The weights
        divide by those of the global batch.
        """
        outputs = tf.nest.flatten(y_pred)
        masks = [getattr(output, "_keras_mask", None) for output in outputs]
        if all(mask is None for mask in masks):
            return y_pred, sample_weight
        given = [sample_weight] * len(outputs)
        if len(tf.nest.flatten(sample_weight)) == len(outputs):
            given = tf.nest.flatten(sample_weight)
        weights = []
        for index, (mask, weight) in enumerate(zip(masks, given, strict=True)):
            if mask is None:
                weights.append(weight)
                continue
            valid = tf.cast(mask, outputs[index].dtype)
            all_valid = self._collective.sum(tf.reduce_sum(valid), f"mask.{index}")
            positions = tf.reduce_prod(tf.shape(mask)[1:]) * tf.cast(share[1], tf.int32)
            own = valid * tf.cast(positions, valid.dtype) / all_valid
            if weight is not None:
                missing = own.shape.rank - weight.shape.rank
                shape = tf.concat([tf.shape(weight), tf.ones([missing], tf.int32)], 0)
                own *= tf.reshape(tf.cast(weight, own.dtype), shape)
            weights.append(own)
        bare = [tf.identity(output) for output in outputs]
        return tuple(tf.nest.pack_sequence_as(y_pred, flat) for flat in (bare, weights))

    def _weigh(self, loss: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
        """Scales what depends on rows to this replica's part of the global batch."""
        collective = self._collective
        rows, of = tf.cast(share[0], loss.dtype), tf.cast(share[1], loss.dtype)
        # Such that the mean over replicas is one device's mean.
        of_mean = rows * collective.num_replicas / of
        part = of_mean
        if loss_is_sum(self._model):
            part = float(collective.num_replicas) if collective.gradients_are_averaged else 1.0
        of_rows, of_weights = self._added_losses(loss.dtype)
        return (loss - of_rows - of_weights) * part + of_rows * of_mean + of_weights

    def _added_losses(self, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the sums of ``model.losses`` that Keras has added: those of rows, of weights.

        A regularizer of weights is computed anew whenever ``losses`` is read; what a forward pass
        added (an activity regularizer, ``add_loss`` in a layer) is the same tensor each time.
        Keras has divided both by its own count of replicas.
        """
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        of_rows = of_weights = tf.zeros([], dtype)
        for once, again in zip(self._model.losses, self._model.losses, strict=True):
            if once is again:
                of_rows += tf.cast(once, dtype) / replicas
            else:
                of_weights += tf.cast(once, dtype) / replicas
        return of_rows, of_weights


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


def loss_is_sum(model: tf.keras.Model) -> bool:
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
