"""The train and test step that every data-parallel engine shares.

Both give one device's numbers on the global batch, whatever the shares of the replicas:

* rows of padding are cut off before loss and metrics, so neither ever sees them;
* each loss is weighted by its true rows over those of the global batch (see ``losses``).

A share can be divided further, into microbatches whose gradients are added up: they are to the
step what replicas are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist import keras
from tfdist.compat import is_keras
from tfdist.errors import ModelError
from tfdist.keras.tensors import mask_of, with_mask
from tfdist.training.engine.binding import Binding
from tfdist.training.engine.options import StepOptions
from tfdist.training.feed.division import piece
from tfdist.training.layers import eager_variables, loss_masks, losses
from tfdist.training.layers.batch_norm import average_statistics, shared_step
from tfdist.training.layers.gradients import added, when_known
from tfdist.training.layers.randomness import Draws, draw_apart
from tfdist.training.layers.shared_embedding_rows import added_up
from tfdist.training.memory import offload
from tfdist.training.memory.offload import Activations
from tfdist.training.memory.recompute import Recomputation
from tfdist.training.memory.sharded_update import ShardedUpdate
from tfdist.training.memory.sharded_weights import ShardedWeights
from tfdist.training.model.logits import changed
from tfdist.training.model.precision import full_type, in_full
from tfdist.training.steps import layer_state

# What Keras calls a loss of its own that cannot be taken of no rows.
_NEED_ROWS = ("ctc",)


class SharedSteps:
    """``train_step``, ``test_step`` and ``predict_step`` of a model on several replicas.

    Data are ``(batch, share)``, as from a ``Feed``; on one replica plain batches.
    """

    def __init__(self, binding: Binding, options: StepOptions):
        self._binding = binding
        model = self._model = binding.model
        self._collective = binding.collective
        self._results = binding.results
        self._options = options
        by_microbatch = options.accumulate_steps > 1
        self._draws = Draws(binding, by_microbatch=by_microbatch)
        self._sharded = binding.sharded and ShardedUpdate(binding, binding.sharded)
        self._recomputation: Recomputation | None = None
        divided = binding.sharded if isinstance(binding.sharded, ShardedWeights) else None
        if options.recomputes or divided is not None:
            self._recomputation = Recomputation(binding, options.recomputed_layers, divided)
        self._activations: Activations | None = None
        if options.offloads_activations:
            self._activations = Activations(options.offload_dir)
        losses.is_sum(model)  # A loss that cannot be shared is refused before the first step.

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        with self._draws.told():
            return self._train_step(data)

    def _train_step(self, data: Any) -> dict[str, tf.Tensor]:
        model, optimizer = self._model, self._model.optimizer
        losses.as_on_one_device(self._binding)  # It may have been compiled anew.
        draw_apart(self._collective.process)
        batch, share = self._batch(data)
        count = self._options.accumulate_steps
        counted = self._counted_by_all(*batch[:2], share) if count > 1 else None
        variables = self._trained()
        gradients: list[Any] = [None] * len(variables)
        of_parts = []
        for number, (part, rows) in enumerate(divide(batch, share, count)):
            with when_known(gradients):
                found, results = self._microbatch(number, part, rows, variables, counted)
                gradients = [added(*pair) for pair in zip(gradients, found, strict=True)]
                of_parts.append((found, rows))
        layer_state.merge(self._binding.moved, losses.part_of(share), self._collective.sum)
        if self._sharded is None:
            if self._binding.noise is not None:
                optimizer = self._binding.noise.optimizer(optimizer, of_parts, share)
            if variables:  # Keras 3 takes no update of nothing.
                self._collective.apply(optimizer, gradients, variables)
        else:
            self._sharded.apply(gradients)
        if self._collective.num_replicas > 1 and not self._options.sync_batch_norm:
            average_statistics(model, self._collective)
        return results

    def _microbatch(
        self, number: int, batch: Any, share: tf.Tensor, variables: list[Any], counted: Any
    ) -> tuple[list[Any], dict[str, tf.Tensor]]:
        """Returns the gradients of ``variables``, parts of those of the step, and the metrics."""
        optimizer = self._model.optimizer
        begun = offload.count()
        with tf.GradientTape() as tape, losses.counted_as(losses.part_of(share)):
            with (
                shared_step(is_real=share[0] > 0, microbatch=number),
                self._recomputed(number),
                keras.seeds.drawing_on(self.replica),
            ):
                y_pred = keras.steps.called(self._model, batch[0], training=True)
            x, y, y_pred, sample_weight = _true_rows(share[0], batch[0], batch[1], y_pred, batch[2])
            loss = self._loss(x, y, y_pred, sample_weight, share, counted)
            keras.losses.show_loss(self._model, loss, share[0])
            loss = self._weigh(loss, share, batch[0])
        turned = offload.count()
        gradients = keras.optimizers.gradients_of(optimizer, loss, variables, tape)
        if self._activations is not None:
            self._activations.move(begun, turned, loss, gradients)
        gradients = added_up(gradients, variables, self._binding.alike_look_ups)
        return gradients, self._metrics(x, y, y_pred, sample_weight, share)

    def _trained(self) -> list[Any]:
        """Returns what gradients are taken of: weights, or this replica's parts of them."""
        weights = self._model.trainable_variables
        return weights if self._sharded is None else self._binding.sharded.trained(weights)

    def _recomputed(self, microbatch: int) -> contextlib.AbstractContextManager:
        if self._recomputation is None:
            return contextlib.nullcontext()
        return self._recomputation.of(self.replica(), microbatch)

    def replica(self) -> Any:
        """Returns another number on each: neither ranks nor replicas are to drop the same units."""
        here = tf.distribute.get_replica_context().replica_id_in_sync_group
        return self._collective.process + here

    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        (x, y, sample_weight), share = self._batch(data)
        losses.as_on_one_device(self._binding)
        with losses.counted_as(losses.part_of(share)):
            y_pred = keras.steps.called(self._model, x, training=False)
            x, y, y_pred, sample_weight = _true_rows(share[0], x, y, y_pred, sample_weight)
            loss = self._loss(x, y, y_pred, sample_weight, share, training=False)
            keras.losses.show_loss(self._model, loss, share[0])
        return self._metrics(x, y, y_pred, sample_weight, share)

    def predict_step(self, data: Any) -> Any:
        (x, _, _), share = self._batch(data)
        y_pred = keras.steps.called(self._model, x, training=False)
        return _true_rows(share[0], y_pred)[0]

    def _batch(self, data: Any) -> tuple[tuple[Any, Any, Any], tf.Tensor]:
        if self._collective.shares_batches:
            batch, share = data
            return tf.keras.utils.unpack_x_y_sample_weight(batch), share
        rows = tf.shape(tf.nest.flatten(data)[0], tf.int64)[0]
        return tf.keras.utils.unpack_x_y_sample_weight(data), tf.stack([rows, rows])

    def _metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, share: tf.Tensor) -> Any:
        model = self._model
        with losses.counted_as(losses.part_of(share)):
            own_kinds = _are_keras_own(keras.losses.compiled_metrics(model), model.compute_metrics)
            own_kinds &= not _gives_one_number(y_pred)
            own_results = keras.layers.written_anew(model, "compute_metrics")
            if own_results and self._binding.own_steps is not None:
                return self._binding.own_steps.results_of(
                    share, lambda: model.compute_metrics(x, y, y_pred, sample_weight)
                )
            if own_kinds or own_results:
                return model.compute_metrics(x, y, y_pred, sample_weight)

            def update() -> tf.Tensor:  # Results are for after it: replicas meet in them.
                keras.losses.update_metrics(model, y, y_pred, sample_weight)
                return tf.constant(True)

            eager_variables.make_metrics(model, y_pred, y)  # They cannot be made within a branch.
            losses.as_on_one_device(self._binding)
            tf.cond(share[0] > 0, update, lambda: tf.constant(False))
            return self._results()

    def _loss(
        self,
        x: Any,
        y: Any,
        y_pred: Any,
        sample_weight: Any,
        share: tf.Tensor,
        counted: list[Any] | None = None,
        *,
        training: bool = True,
    ) -> tf.Tensor:
        model = self._model
        is_own = losses.has_own_compute_loss(model)
        if losses.is_sum(model):
            sample_weight = losses.weights_of_sum(model, y_pred, sample_weight, share)
        elif is_own:
            _refuse_masks(model, y_pred)
        else:
            masks, y = loss_masks.found(model, y, y_pred)
            counted = counted or loss_masks.counted(masks, y_pred, self._collective.sum)
            sample_weight = loss_masks.as_weights(
                model, masks, y_pred, sample_weight, share, counted
            )
            y_pred = loss_masks.without_masks(y_pred)

        def loss() -> tf.Tensor:
            return keras.losses.compute_loss(model, x, y, y_pred, sample_weight, training=training)

        compiled = tf.nest.flatten(keras.losses.compiled_losses(model))
        needs_rows = any(losses.name_of(part) in _NEED_ROWS for part in compiled)
        needs_rows |= _gives_one_number(y_pred)
        if not is_own and not needs_rows and _are_keras_own(compiled, model.compute_loss):
            return loss()
        eager_variables.make_loss(model, y_pred)  # Variables cannot be made within a branch.
        dtype = full_type(tf.nest.flatten(y_pred)[0].dtype)
        # Of no rows, a user's own mean would be NaN, and CTC is an error.
        return tf.cond(share[0] > 0, lambda: tf.cast(loss(), dtype), lambda: tf.zeros([], dtype))

    def _counted_by_all(self, x: Any, y: Any, share: tf.Tensor) -> list[Any] | None:
        """Returns what all microbatches together count, None where each finds it by itself."""
        model = self._model
        if getattr(model, "output", None) is not None and not loss_masks.can_be(model):
            return None
        # TensorFlow computes what the masks need of it, and no more; what layers count of their
        # rows is counted by the microbatches.
        with losses.counted_as(tf.zeros([], tf.keras.backend.floatx())):
            y_pred = keras.steps.called(model, x, training=False)
        y, y_pred = _true_rows(share[0], y, y_pred)
        masks, _ = loss_masks.found(model, y, y_pred)
        return loss_masks.counted(masks, y_pred, self._collective.sum)

    def _weigh(self, loss: tf.Tensor, share: tf.Tensor, x: Any) -> tf.Tensor:
        """Scales a loss to this microbatch's part of the global batch.

        What a layer adds may be a number for each row, or several, of which Keras trains on the
        sum; or means over rows, of which there are as many whatever the rows.
        """
        loss = in_full(loss)
        part = share[0] > 0 if self._is_by_row(loss, x) else losses.part_of(share)
        return loss * tf.cast(part, loss.dtype) * losses.uncounted(self._collective)

    def _is_by_row(self, loss: tf.Tensor, x: Any) -> bool:
        if loss.shape.rank == 0:
            return False
        if self._collective.planned_replicas == 1 and self._options.accumulate_steps == 1:
            return True  # The batch is whole: rows and means count alike.
        first, rows = loss.shape[0], tf.nest.flatten(x)[0].shape[0]
        if first is not None and rows is not None and first % rows == 0:
            adding = [
                f"layer '{layer.name}'"
                for layer in keras.layers.layers_in(self._model)[1:]
                if any(each.shape.rank for each in layer.losses)
            ]
            raise ModelError(
                "numbers that layers add to the loss must be told apart, those of rows and means "
                "over rows, by batches whose rows TensorFlow does not know beforehand",
                received=f"{first} numbers beside {rows} rows, of "
                + (", ".join(adding) or f"model '{self._model.name}'"),
                mend="Add one number, as tf.reduce_mean gives it, or batch without drop_remainder "
                "and run_eagerly",
            )
        return first is None


def divide(batch: Any, share: tf.Tensor, count: int) -> list[tuple[Any, tf.Tensor]]:
    """Returns ``count`` microbatches, the larger ones first: each with its share.

    A microbatch that the uneven tail leaves without a row has one of padding, and a share of zero
    rows: all replicas take as many microbatches, for they may wait for each other in each.

    Args:
        batch: a structure of tensors [rows, ...]; None stands for what is not there.
        share: int64 [2], the true rows of the batch, and those of the global batch.
    """
    if count == 1:
        return [(batch, share)]
    return [piece(batch, share, count, number) for number in range(count)]


def _are_keras_own(parts: list[Any], method: Callable) -> bool:
    """Whether losses or metrics are Keras' own, and so is the method that computes them."""
    own = (losses.is_keras_own(part) for part in parts if part is not None)
    return is_keras(method.__module__) and all(own)


def _refuse_masks(model: tf.keras.Model, y_pred: Any) -> None:
    if any(mask_of(output) is not None for output in tf.nest.flatten(y_pred)):
        raise ModelError(
            "outputs that a compute_loss of your own reads must carry no mask, since a mean over "
            "unmasked positions is no mean over rows",
            received=f"model '{model.name}' whose output carries a mask",
            mend="End the mask before the output (pool, flatten or slice), or give sample weights",
        )


def _gives_one_number(y_pred: Any) -> bool:
    """Whether Keras' own losses and metrics give one number for all rows, and NaN of none."""
    return any(output.shape.rank == 1 for output in tf.nest.flatten(y_pred))


def _true_rows(rows: tf.Tensor, *structures: Any) -> list[Any]:
    """Cuts each tensor to its first ``rows`` rows; a mask that Keras attached goes along."""

    def cut(tensor: Any) -> Any:
        if tensor is None:
            return None
        true = changed(lambda whole: whole[:rows], tensor)
        mask = mask_of(tensor)
        return true if mask is None else with_mask(true, mask[:rows])

    return [tf.nest.map_structure(cut, structure) for structure in structures]
