"""The train, test and predict step of a pipeline: its schedule, unrolled into one graph.

Each task of the schedule is placed on its device and waits, by a control dependency, for the task
before it on that device. So the devices work side by side, and activations live no longer than
the schedule says.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist import keras
from tfdist.errors import ModelError
from tfdist.keras import step_context
from tfdist.keras.graph import nested_outputs
from tfdist.keras.layers import trained_in
from tfdist.keras.tensors import raw
from tfdist.strategies.pipeline.frozen import Frozen
from tfdist.strategies.pipeline.functions import OutputWithoutGradient, function_of, pay
from tfdist.strategies.pipeline.microbatch_passes import Backward, Forward
from tfdist.strategies.pipeline.microbatches import Share, divide, share_of
from tfdist.strategies.pipeline.plan import Plan
from tfdist.training.engine.binding import Binding
from tfdist.training.layers import eager_variables, loss_masks
from tfdist.training.layers.gradients import Sums
from tfdist.training.layers.losses import is_keras_own, is_sum, part_of
from tfdist.training.layers.randomness import Draws, StepSeeds, is_seeded, refuse_unseeded
from tfdist.training.memory.sharded_update import ShardedUpdate
from tfdist.training.memory.update_place import updates_where_weights_lie
from tfdist.training.model.layer_calls import inputs_of
from tfdist.training.steps import layer_state


class PipelineSteps:
    """``train_step``, ``test_step`` and ``predict_step`` of a model in chunks.

    Attributes:
        ranks: those that each hold such a pipeline, or this process alone.
        recompute: whether a backward pass runs the forward pass again.
        seeds: of the layers that draw random numbers; None where none does.
        output_keys: id of each output of the model.
    """

    def __init__(self, binding: Binding, plan: Plan, devices: list[str], frozen: Frozen | None):
        self._binding = binding
        model = self.model = binding.model
        self.ranks = binding.collective
        self._results = binding.results
        self._plan = plan
        self._devices = devices
        self._frozen = frozen
        self.schedule = plan.schedule
        self.recompute = plan.options.recomputes
        self._whole = plan.schedule.whole
        self._normalizing = plan.normalizing
        self._trained: list[list[Any]] | None = None
        self._follow_trainable()
        self.seeds = StepSeeds(model, self.ranks.process) if is_seeded(model) else None
        is_sum(model)  # A loss that cannot be shared is refused before the first step.
        self._losses: tuple[Any, Any] = (self, None)  # Of no compilation: Keras 3's may be None.
        self._draws = Draws(binding, by_microbatch=True)
        self.output_keys = [id(tensor) for tensor in plan.graph.outputs]
        timeline = plan.schedule.timeline()
        self._forward_order = [slot.task for slot in timeline if slot.task.is_forward]
        if not plan.schedule.whole:  # As soon as the chunk before has finished a microbatch.
            self._forward_order.sort(key=lambda task: (task.microbatch + task.chunk, -task.chunk))
        # Of parts, as one may be within several layers that are called.
        self._device_of_part = {
            part: chunk.device
            for chunk in reversed(self.chunks)
            for call in chunk.calls
            for part in keras.layers.layers_in(call.layer)
        }

    def _follow_trainable(self) -> None:
        """Cuts the model anew where other layers are trained than when it was cut last.

        Raises:
            ModelError: one is trained now that was taken for frozen when the model was built.
        """
        plan = self._plan
        trained = [[v.ref() for v in trained_in(call.layer)] for call in plan.calls]
        if trained == self._trained:
            return
        thawed = [n for n in plan.normalizing if n not in self._normalizing]
        if self._frozen is not None:
            thawed += [n for n, variables in enumerate(trained[: plan.num_frozen]) if variables]
        if thawed:
            raise ModelError(
                "frozen layers whose outputs are kept, and a frozen BatchNormalization, must stay "
                "frozen in a pipeline",
                received=f"layer '{plan.calls[thawed[0]].name}', which is trained now",
                mend="Build the model anew with it trainable (set_weights brings what was learned)",
            )
        self._trained = trained
        with tf.init_scope():  # A step may be being traced.
            self.chunks = plan.chunks(self._devices)
            live = () if self._frozen is None else self._frozen.cut()
        #: Chunks that run once in a step, and those with an output that no gradient reaches.
        self.without_function = {
            chunks[number] for chunks in (self.chunks, live) if chunks for number in self._whole
        }

    @property
    def loss_is_sum(self) -> bool:
        """Whether the loss of a batch is that of its microbatches added up."""
        return is_sum(self.model)  # It may have been compiled anew.

    @property
    def loss_is_keras_own(self) -> bool:
        compiled = tf.nest.flatten(keras.losses.compiled_losses(self.model))
        return all(loss is None or is_keras_own(loss) for loss in compiled)

    def gradient_loss(self) -> Any:
        """Returns the compiled loss with metrics of its own: the model's see whole batches.

        To be called once before the step, which would be traced again if it made their variables.
        """
        compiled = keras.losses.compiled_loss(self.model)
        if self._losses[0] is not compiled:
            self._losses = (compiled, keras.losses.untold_loss(self.model))
        return self._losses[1]

    def packed(self, outputs: list[tf.Tensor]) -> Any:
        """Returns outputs in the structure that the model gives them."""
        return tf.nest.pack_sequence_as(nested_outputs(self.model), outputs)

    # Keras' three steps -------------------------------------------------------------------------

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        self._follow_trainable()
        with self._draws.told():
            return self._run(data)

    def _run(self, data: Any) -> dict[str, tf.Tensor]:
        if not pay(self.schedule.num_microbatches):
            return self._train_step(data)
        while True:
            try:
                # In a function of its own: what was traced until it failed must not run.
                return function_of(self._train_step)(data)
            except OutputWithoutGradient as found:
                self.without_function.add(found.chunk)

    def _train_step(self, data: Any) -> dict[str, tf.Tensor]:
        (x, y, sample_weight), share = self._given(data)
        counted = self._counted(y, sample_weight, share)
        forward = self._forward(x, *counted, share, training=True)
        gradients = Sums(self._binding.alike_look_ups)
        backward = Backward(self, forward, share, gradients)
        for slot in self.schedule.timeline():
            task = slot.task
            run = forward.run if task.is_forward else backward.run
            run(task.chunk, task.microbatch)
        if self.recompute and not tf.executing_eagerly():
            graph = tf.compat.v1.get_default_graph()
            refuse_unseeded(graph, graph.get_operations())
        regularization = self._regularize(gradients, backward.scale)
        if self.ranks.shares_batches:
            layer_state.merge(self._binding.moved, part_of(share.told), self.ranks.sum)
        self._apply(gradients)
        return self._metrics(x, y, sample_weight, counted, share, forward, regularization)

    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        (x, y, sample_weight), share = self._given(data)
        counted = self._counted(y, sample_weight, share)
        forward = self._forward(x, y, sample_weight, share, training=False)
        regularization = self._regularize(None, None)
        return self._metrics(x, y, sample_weight, counted, share, forward, regularization)

    def predict_step(self, data: Any) -> Any:
        (x, _, _), share = self._given(data)
        forward = self._forward(x, None, None, share, training=False)
        return share.true_rows(self.packed(forward.outputs()))

    # Their parts --------------------------------------------------------------------------------

    def _given(self, data: Any) -> tuple[tuple[Any, Any, Any], Share]:
        batch, share = share_of(data, self.ranks)
        return tf.keras.utils.unpack_x_y_sample_weight(batch), share

    def _counted(self, y: Any, sample_weight: Any, share: Share) -> tuple[Any, Any]:
        """Returns labels and weights of losses that leave out a class, as means over all rows.

        Which labels of all microbatches, and of all ranks, they count is known before the first.
        """
        if self.loss_is_sum:
            return y, sample_weight
        outputs = nested_outputs(self.model)  # Without masks: they are refused.
        masks, labels = loss_masks.found(self.model, y, outputs)
        if all(mask is None for mask in masks):
            return y, sample_weight
        true_masks, _ = loss_masks.found(self.model, share.true_rows(y), outputs)
        counted = loss_masks.counted(true_masks, outputs, self.ranks.sum)
        rows = tf.shape(tf.nest.flatten(y)[0], tf.int64)[0]
        told = tf.stack([rows, rows]) if share.told is None else share.told
        return labels, loss_masks.as_weights(
            self.model, masks, outputs, sample_weight, told, counted
        )

    def _forward(
        self, x: Any, y: Any, sample_weight: Any, share: Share, *, training: bool
    ) -> Forward:
        """Returns the forward passes of a step; outside of training they have been made."""
        frozen = self._frozen
        if frozen is not None and frozen.is_output(x):
            chunks, given = frozen.chunks, frozen.values(x)
        else:
            tensors = inputs_of(self.model, x)
            named = zip(self.model.inputs, tensors, strict=True)
            chunks, given = self.chunks, {id(symbol): tensor for symbol, tensor in named}
        first = next(iter(given.values()))
        rows = tf.shape(first)[0] if first.shape[0] is None else first.shape[0]
        count = self.schedule.num_microbatches
        parts = divide(rows, y, sample_weight, count, is_real=share.is_real)
        forward = Forward(self, chunks, parts, given, training=training)
        for task in () if training else self._forward_order:
            forward.run(task.chunk, task.microbatch)
        return forward

    def _regularize(self, gradients: Sums | None, scale: tf.Tensor | None) -> list[tf.Tensor]:
        """Returns the losses of weights, each on its layer's device; adds up their gradients."""
        losses: list[tf.Tensor] = []
        told: set[int] = set()
        for part, device in self._device_of_part.items():
            with tf.device(device), tf.GradientTape() as tape:
                own = keras.layers.weight_losses(part, told)
                total = tf.add_n(own) if own else None
            losses += own
            variables = trained_in(part)
            if gradients is not None and own and variables:
                with tf.device(device):
                    found = tape.gradient(total, variables, output_gradients=scale)
                    gradients.add(variables, found)
        return losses

    def _apply(self, gradients: Sums) -> None:
        optimizer, variables = self.model.optimizer, self.model.trainable_variables
        found = [gradients.of(raw(variable)) for variable in variables]
        found = keras.optimizers.without_factor(optimizer, found)
        sharded = self._binding.sharded
        if sharded is None:
            with updates_where_weights_lie(optimizer):
                self.ranks.apply(optimizer, found, variables)
        else:
            ShardedUpdate(self._binding, sharded).apply(found)

    def _metrics(
        self,
        x: Any,
        y: Any,
        sample_weight: Any,
        counted: tuple[Any, Any],
        share: Share,
        forward: Forward,
        regularization: list[tf.Tensor],
    ) -> dict[str, tf.Tensor]:
        """Lets Keras' own metrics, the loss among them, see the whole batch at once."""
        model = self.model
        x, y, y_pred, sample_weight, (labels, weights) = share.true_rows(
            (x, y, self.packed(forward.outputs()), sample_weight, counted)
        )
        added = [*regularization, *forward.activity_losses()]
        if self.loss_is_sum:
            weights = share.weights_of_sum(model, y_pred, sample_weight)

        rows = tf.shape(tf.nest.flatten(y_pred)[0])[0]
        part = 1.0 if share.told is None else part_of(share.told)

        def show() -> None:
            keras.losses.show_losses(model, labels, y_pred, weights, added, rows=rows, part=part)

        def update() -> tf.Tensor:
            show()
            keras.losses.update_metrics(model, y, y_pred, sample_weight)
            return tf.constant(True)

        with step_context.within(part=1.0):  # Of its own batch, whose results it shows.
            if share.is_real is True:
                show()
                return model.compute_metrics(x, y, y_pred, sample_weight)
            eager_variables.make_metrics(model, y_pred, y)  # Not within a branch.
            # Of no rows, a user's own mean would be NaN.
            tf.cond(share.is_real, update, lambda: tf.constant(False))
            return self._results()
