"""The steps of training, evaluation and prediction as programs on the mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist import keras
from tfdist.errors import ModelError
from tfdist.strategies.mesh.context import Context, has_batch
from tfdist.strategies.mesh.conversion import SEPARABLE_REGULARIZERS, convert
from tfdist.strategies.mesh.layout import Layout
from tfdist.strategies.mesh.operations import BATCH, LossBridge, mtf, without_log
from tfdist.strategies.mesh.optimizer import (
    clip,
    squared_norms,
    unscaled,
)
from tfdist.strategies.mesh.ranks import Ranks
from tfdist.strategies.mesh.recompute import Block, Segments, differentiated
from tfdist.strategies.mesh.state import SlicedState
from tfdist.training.engine.collective import Collective
from tfdist.training.layers import loss_masks, losses
from tfdist.training.layers.autograph import with_autograph
from tfdist.training.layers.clipping import limit_of_values
from tfdist.training.memory.update_place import updates_where_weights_lie
from tfdist.training.model.logits import changed


def plan(model: tf.keras.Model, layout: Layout, num_rows: int) -> None:
    """Converts the model once on a scratch graph: it settles the layout, or raises.

    Raises:
        UnsupportedLayerError: a layer or an option that a mesh cannot run.
        OptionError: the layout does not fit the model.
        ModelError: a weight that no layer of the graph uses.
    """

    def convert_once() -> None:
        mesh = mtf.Mesh(mtf.Graph(), "mesh")

        def read(variable: Any, dims: list[Any]) -> Any:
            return mtf.import_tf_tensor(
                mesh, tf.zeros(variable.shape, variable.dtype), mtf.Shape(dims)
            )

        for training in (True, False):
            context = Context(
                mesh,
                layout,
                training=training,
                read=read,
                num_rows=num_rows,
                seed=tf.zeros([2], tf.int64),
            )
            inputs = [
                context.activation(tf.zeros([num_rows, *symbol.shape[1:]], symbol.dtype))
                for symbol in model.inputs
            ]
            convert(model, context, inputs)

    tf.function(convert_once, autograph=False).get_concrete_function()
    layout.check_complete(model.weights)
    unused = [keras.tensors.path_of(v) for v in model.weights if id(v) not in layout.settled]
    foreign = set(layout.settled) - set(map(id, model.weights))
    if foreign:
        raise ModelError(
            "every variable that a call on a mesh reads must be a weight of a layer",
            received=f"{len(foreign)} in operations between layers, of none",
            mend="Make a layer of your own that has it as an attribute, and uses it in its call",
        )
    if unused:
        raise ModelError(
            "every weight of a model on a mesh must be used by a layer that its graph reaches",
            received=f"{', '.join(unused)} unused",
            mend="In the call of a layer of your own, call layers that are attributes of it "
            "(self.dense), or call them on tensors that come from its inputs",
        )


class Program:
    """One forward pass on the mesh, and what it takes to go back; built while a step is traced."""

    def __init__(
        self,
        state: SlicedState,
        layout: Layout,
        x: Any,
        *,
        training: bool,
        seed: tf.Tensor | None = None,
        num_rows: int | None = None,
        ranks: Ranks | None = None,
        segments: Segments | None = None,
    ):
        model, devices = self._model, self._devices = state.model, state.devices
        self._state = state
        self._graph = mtf.Graph()
        mesh = mtf.Mesh(self._graph, "mesh")
        self._mesh = mesh
        flat = keras.graph.conformed_inputs(model, x)
        given = int(flat[0].shape[0])
        self.num_rows = given if num_rows is None else num_rows
        rows = -(-given // devices.axis_size(BATCH)) * devices.axis_size(BATCH)
        self.context = Context(
            mesh,
            layout,
            training=training,
            read=self._read,
            num_rows=self.num_rows,
            padded_rows=rows - self.num_rows,
            is_divided=devices.axis_size(BATCH) > 1,
            seed=seed,
            ranks=ranks,
        )
        inputs = [self.context.activation(_padded(tensor, rows - given)) for tensor in flat]
        self._blocks: list[Block] = []
        if segments is not None and training:
            self.outputs, self._blocks = segments.convert(self.context, inputs)
        else:
            self.outputs = convert(model, self.context, inputs)

    def _read(self, variable: Any, dims: list[Any]) -> Any:
        weight, devices = self._state.of(variable), self._devices
        places = devices.first_places([weight.slices])
        parts = devices.run(lambda part: part.read_value(), [weight.slices], places)
        laid_out = devices.LaidOutTensor(parts)
        return mtf.import_laid_out_tensor(self._mesh, laid_out, mtf.Shape(dims))

    def run(self, loss_fn: Callable[[Any, list[tf.Tensor]], tf.Tensor], y: Any) -> None:
        """Lowers the program.

        Args:
            loss_fn: (y_pred, losses of activities) -> the loss.
            y: the labels that it is of.
        """
        num_outputs = len(self.outputs)

        def loss_of(whole: list[tf.Tensor]) -> tf.Tensor:
            activity = [tf.reshape(scalar, []) for scalar in whole[num_outputs:]]
            return loss_fn(self._packed(whole[:num_outputs]), activity)

        known = self.context.masks
        masks = {n: known[output] for n, output in enumerate(self.outputs) if output in known}
        bridge = LossBridge([*self.outputs, *self.context.losses], loss_of, masks)
        self.gradients = self._backward(bridge, y) if self.context.training else {}
        self._lowering = self._lower()

    def predict(self) -> Any:
        lowering = self._lower()
        return self._packed([lowering.export_to_tf_tensor(output) for output in self.outputs])

    def _packed(self, outputs: list[tf.Tensor]) -> Any:
        def cut(whole: tf.Tensor) -> tf.Tensor:
            return whole[: self.num_rows]

        rows = []
        for output in outputs:
            mask = keras.tensors.mask_of(output)
            own = changed(cut, output)
            rows.append(own if mask is None else keras.tensors.with_mask(own, cut(mask)))
        return tf.nest.pack_sequence_as(keras.graph.nested_outputs(self._model), rows)

    def _backward(self, bridge: LossBridge, y: Any) -> dict[int, Any]:
        weights = self.context.weights
        trained = [v for v in self._model.trainable_variables if id(v) in weights]
        found = [x for look_ups in self.context.look_ups.values() for x in look_ups]
        of_outputs = keras.losses.have_loss(self._model, y, keras.graph.nested_outputs(self._model))
        has_loss = [*of_outputs, *[True] * len(self.context.losses)]
        made = differentiated(
            [*self.outputs, *self.context.losses],
            [*(weights[id(v)] for v in trained), *found],
            # None, as in Keras, where no loss is: with zeros an optimizer would decay weights.
            [g if has else None for g, has in zip(bridge.outputs, has_loss, strict=True)],
            self._blocks,
        )
        of_look_ups = zip(found, made[len(trained) :], strict=True)
        self._of_look_ups = {x: g for x, g in of_look_ups if g is not None}
        pairs = zip(trained, made, strict=False)
        return {id(v): g for v, g in pairs if g is not None}

    def look_up_squares(self) -> dict[int, tf.Tensor]:
        """Returns weight id -> the squared norm of its gradient as Keras takes it for clipping.

        Keras keeps the gradient of a look-up as one row for each id, and does not add the rows of
        equal ids up before it takes the norm.
        """
        ranks, squares = self.context.ranks, {}
        for key in self.context.look_ups:
            total = []
            for found in self._looked_up(key):
                slices = unscaled(self._model.optimizer, self.slices_of(self._of_look_ups[found]))
                if ranks is not None and not has_batch(found):  # As positions: all rows look it up.
                    slices = [ranks.sum(g) for g in slices]
                whole = found.shape.size
                replication = len(slices) * slices[0].shape.num_elements() / whole
                square = tf.add_n([tf.reduce_sum(g * g) for g in slices]) / replication
                if ranks is not None and has_batch(found):
                    square = ranks.sum(square)
                total.append(square)
            if total:
                squares[key] = tf.add_n(total)
        return squares

    def look_up_rows(self, variable: Any) -> list[tf.IndexedSlices]:
        """Returns the gradient of a table, of its slices, as one row for each look-up.

        Keras 3 hands them to an optimizer so, which does not add the rows of equal ids up before it
        squares them.
        """
        ids, rows = [], []
        for found in self._looked_up(id(variable)):
            _, given = found.operation.inputs
            last = self.num_rows if has_batch(found) else None
            ids.append(tf.reshape(self._lowering.export_to_tf_tensor(given)[:last], [-1]))
            gradient = self._lowering.export_to_tf_tensor(self._of_look_ups[found])[:last]
            rows.append(tf.reshape(gradient, [-1, variable.shape[-1]]))
        ids = [tf.cast(of_one, tf.int64) for of_one in ids]
        [values] = unscaled(self._model.optimizer, [tf.concat(rows, 0)])
        return self._state.of(variable).look_ups_of(tf.concat(ids, 0), values)

    def _looked_up(self, key: int) -> list[Any]:
        """Returns what was looked up in the weight of this id, and that gradients reach."""
        return [x for x in self.context.look_ups.get(key, []) if x in self._of_look_ups]

    def _lower(self) -> Any:
        with without_log():  # Counters of each program, which notebooks show.
            return mtf.Lowering(self._graph, {self._mesh: self._devices}, autostack=False)

    def slices_of(self, tensor: Any) -> list[tf.Tensor]:
        return self._lowering.tensors[tensor].to_laid_out_tensor().tensor_list


def _padded(tensor: tf.Tensor, rows: int) -> tf.Tensor:
    # Copies of a real row: a row of zeros could send a layer to infinity, and 0 x inf is not 0.
    return tf.concat([tensor, tf.repeat(tensor[-1:], rows, axis=0)], 0) if rows else tensor


class WeightRegularizers:
    """The regularizers of a model's weights, on slices.

    Raises:
        ModelError: one that is not a sum over elements, or a loss that a layer adds otherwise.
    """

    def __init__(self, state: SlicedState):
        model = self._model = state.model
        self._state = state
        self._pairs = keras.layers.regularized_in(model)
        for variable, regularizer in self._pairs:
            if type(regularizer) not in SEPARABLE_REGULARIZERS:
                raise ModelError(
                    "a regularizer of weights on a mesh must be a sum over their elements",
                    received=f"{type(regularizer).__name__} of {keras.tensors.path_of(variable)}",
                    mend="Use L1, L2 or L1L2",
                )
        expected = keras.layers.num_weight_losses(model)
        if expected != len(self._pairs):
            raise ModelError(
                "a layer on a mesh must add no loss but that of a regularizer of its weights",
                received=f"{expected} losses beside the compiled one, {len(self._pairs)} of them "
                "regularizers of weights",
                mend="Write it as a kernel_regularizer or activity_regularizer, or into the loss",
            )

    def has(self, variable: Any) -> bool:
        return any(variable is regularized for regularized, _ in self._pairs)

    def losses(self) -> list[tf.Tensor]:
        result = []
        for variable, regularizer in self._pairs:
            sliced = self._state.of(variable)
            parts = [regularizer(part) for part in sliced.slices]
            result.append(tf.add_n(parts) / tf.cast(sliced.replication, parts[0].dtype))
        return result

    def add_to(self, gradients: dict[int, list[tf.Tensor]]) -> None:
        trained = {id(variable) for variable in self._model.trainable_variables}
        for variable, regularizer in self._pairs:
            if id(variable) not in trained:
                continue
            slices = self._state.trained(variable).slices
            if id(variable) not in gradients:  # No loss but this one reaches it.
                gradients[id(variable)] = [tf.zeros_like(part) for part in slices]
            total = []
            for part, gradient in zip(slices, gradients[id(variable)], strict=True):
                with tf.device(part.device), tf.GradientTape() as tape:
                    value = part.read_value()
                    tape.watch(value)
                    penalty = regularizer(value)
                total.append(gradient + tape.gradient(penalty, value))
            gradients[id(variable)] = total


def _skipped_by_all(gradients: list[list[tf.Tensor]], ranks: Ranks) -> list[list[tf.Tensor]]:
    """Returns gradients that are NaN where a part of any rank is not finite.

    A loss scale looks at the parts of its own rank, and all must leave the update out.
    """
    finite = [tf.reduce_all(tf.math.is_finite(g)) for slices in gradients for g in slices]
    missing = ranks.sum(tf.cast(tf.logical_not(tf.reduce_all(finite)), tf.float32))
    told = tf.where(missing > 0, float("nan"), 0.0)
    return [[g + tf.cast(told, g.dtype) for g in slices] for slices in gradients]


class MeshSteps:
    """train, test and predict on one batch of known shape; each is traced once for each shape."""

    def __init__(
        self,
        state: SlicedState,
        layout: Layout,
        ranks: Collective,
        segments: Segments | None,
    ):
        self._model = state.model
        self._layout = layout
        self._state = state
        self._ranks = ranks
        self._segments = segments
        self._regularizers = WeightRegularizers(state)
        #: Whether losses and metrics of Keras 3 have their variables.
        self.are_built = False
        # Drawn from the seed that tf.keras.utils.set_random_seed sets, like Keras' own.
        self._waited_for = tf.Variable(0.0, trainable=False)
        self._seed = tf.random.uniform([2], maxval=2**31 - 1, dtype=tf.int64) + ranks.process
        # Conversion is plain Python; only the user's loss and metrics may need AutoGraph.
        self.train = tf.function(self._train, autograph=False)
        self.test = tf.function(self._test, autograph=False)
        self.predict = tf.function(self._predict, autograph=False)

    def _program(self, x: Any, y: Any = None, told: Any = None, *, training: bool) -> Program:
        """Returns the program of a batch, which is a share of a global one where ``told`` is."""
        seed, share = None, {}
        if told is not None:
            num_rows = int(tf.nest.flatten(y)[0].shape[0])
            share = {"num_rows": num_rows, "ranks": Ranks(self._ranks, told)}
        if training:
            steps = keras.optimizers.steps_of(self._model.optimizer)
            step = tf.cast(tf.convert_to_tensor(steps), tf.int64)
            seed = self._base_seed() + step * tf.constant([7_919, 104_729], tf.int64)
        return Program(
            self._state,
            self._layout,
            x,
            training=training,
            seed=seed,
            segments=self._segments,
            **share,
        )

    def _base_seed(self) -> tf.Tensor:
        """Returns what all random numbers of a training follow from.

        In Keras 3 layers keep it, and checkpoints hold that.
        """
        kept = keras.seeds.seeds_in(self._model)
        if not kept:
            return self._seed
        return (
            tf.add_n([tf.cast(seed.read_value(), tf.int64) for seed in kept]) + self._ranks.process
        )

    def _evaluate(self, program: Program, x: Any, y: Any, weight: Any) -> dict[str, tf.Tensor]:
        y_preds, shared = [], []
        ranks = program.context.ranks

        def loss(y_pred: Any, activity: list[tf.Tensor]) -> tf.Tensor:
            y_preds.append(y_pred)
            labels, weights = y, weight
            if ranks is not None:
                labels, y_pred, weights = self._of_rank(y, y_pred, weight, ranks)
                shared.extend(w for w in tf.nest.flatten(weights) if w is not None)
            if not program.num_rows:
                return tf.zeros([])
            added = [*self._regularizers.losses(), *activity]
            part = 1.0 if ranks is None else ranks.part
            compiled_loss = with_autograph(keras.losses.compiled_loss_of(self._model, part))
            total = compiled_loss(labels, y_pred, weights, regularization_losses=added)
            keras.losses.show_loss(self._model, total, program.num_rows)
            if ranks is not None:
                total *= tf.cast(part, total.dtype)
            factor = keras.optimizers.loss_factor(self._model.optimizer)
            if factor is None or not program.context.training:
                return total
            return total * tf.cast(factor, total.dtype)

        program.run(loss, y)
        if not program.num_rows:  # Of no rows, a user's own mean would be NaN.
            for of_none in shared:  # Other ranks wait for the sums in it, which nothing else reads.
                self._waited_for.assign(tf.cast(tf.reduce_sum(of_none), tf.float32))
            return self._model.get_metrics_result()
        return with_autograph(self._model.compute_metrics)(x, y, y_preds[0], weight)

    def _of_rank(self, y: Any, y_pred: Any, weight: Any, ranks: Ranks) -> tuple[Any, Any, Any]:
        """Returns labels, outputs and weights whose mean is this rank's part of that over all."""
        if losses.is_sum(self._model):
            weights = losses.weights_of_sum(self._model, y_pred, weight, ranks.told)
            return y, y_pred, weights
        masks, labels = loss_masks.found(self._model, y, y_pred)
        counted = loss_masks.counted(masks, y_pred, lambda tensor, _: ranks.sum(tensor))
        weights = loss_masks.as_weights(self._model, masks, y_pred, weight, ranks.told, counted)
        return labels, loss_masks.without_masks(y_pred), weights

    def _train(self, x: Any, y: Any, weight: Any, told: Any = None) -> dict[str, tf.Tensor]:
        program = self._program(x, y, told, training=True)
        logs = self._evaluate(program, x, y, weight)
        gradients = {
            key: unscaled(self._model.optimizer, program.slices_of(gradient))
            for key, gradient in program.gradients.items()
        }
        if program.context.ranks is not None:
            self._take_parts()
            gradients = self._over_ranks(gradients, program.context.ranks)
        self._regularizers.add_to(gradients)
        self._apply(gradients, program)
        for variable, tensor in program.context.updates.values():
            weight, values = self._state.of(variable), program.slices_of(tensor)
            for place, part in zip(weight.holders, weight.held, strict=True):
                part.assign(values[place])
        return logs

    def _over_ranks(
        self, gradients: dict[int, list[tf.Tensor]], ranks: Ranks
    ) -> dict[int, list[tf.Tensor]]:
        """Returns sums over ranks, of which this one gets its parts where they divide them."""
        divided, found = self._state.ranks, {}
        for number, variable in enumerate(self._model.trainable_variables):
            if id(variable) in gradients:
                slices, places = gradients[id(variable)], self._state.of(variable).first_places
                found[id(variable)] = (
                    ranks.sum_slices(slices, places)
                    if divided is None
                    else divided.sums(slices, places, f"{number}")
                )
        return found

    def _take_parts(self) -> None:
        """Gives the parts that this rank updates the values that the slices have now."""
        for key, parts in self._state.parts.items():
            for part, whole in zip(parts.held, self._state.weights[key].held, strict=True):
                with tf.device(part.device):
                    part.assign(self._state.ranks.cut(whole.read_value()))

    def _give_parts(self) -> None:
        """Gives the slices what all ranks have made of their parts."""
        for number, (key, parts) in enumerate(self._state.parts.items()):
            weight = self._state.weights[key]
            for place in sorted(set(weight.first_places)):
                whole = weight.slices[place]
                with tf.device(whole.device):
                    name = f"{number}.{place}"
                    whole.assign(
                        self._state.ranks.gathered(parts.slices[place].read_value(), whole, name)
                    )
            weight.repeat_first()

    def _apply(self, gradients: dict[int, list[tf.Tensor]], program: Program) -> None:
        optimizer = keras.optimizers.inner_of(self._model.optimizer)
        by_norm = bool(optimizer.clipnorm or optimizer.global_clipnorm)
        variables = [v for v in self._model.trainable_variables if id(v) in gradients]
        if not variables:  # Keras 3 takes no update of nothing.
            if self._model.trainable_variables:
                raise ModelError(
                    "a model must have a loss to be trained",
                    received=f"model '{self._model.name}' without one that reaches a weight",
                    mend="Compile it with loss=...",
                )
            return
        self._refuse_clipped_look_ups(variables, program)
        sliced = [self._state.trained(v) for v in variables]
        given = [gradients[id(v)] for v in variables]
        ranks = program.context.ranks if self._state.ranks is not None else None
        if ranks is not None and keras.loss_scale.asks_whether_finite(self._model.optimizer):
            given = _skipped_by_all(given, ranks)
        squares = []
        if by_norm:
            squares = squared_norms(given, [self._state.of(v).replication for v in variables])
            if ranks is not None:
                squares = tf.unstack(ranks.sum(tf.stack(squares)))
            of_look_ups = program.look_up_squares()
            squares = [
                square if self._regularizers.has(v) else of_look_ups.get(id(v), square)
                for v, square in zip(variables, squares, strict=True)
            ]
        tables = [v for v in variables if self._keeps_look_ups(v, program)]
        if tables:
            rows = {id(v): program.look_up_rows(v) for v in tables}
            given = [rows.get(id(v), slices) for v, slices in zip(variables, given, strict=True)]
        clipped = [
            slices[place]
            for slices, weight in zip(clip(optimizer, given, squares), sliced, strict=True)
            for place in weight.holders
        ]
        pairs = [
            (slices[place], part)
            for slices, weight in zip(given, sliced, strict=True)
            for place, part in zip(weight.holders, weight.held, strict=True)
        ]
        # A LossScaleOptimizer looks for infinities before its inner optimizer clips.
        clipping = keras.optimizers.clipped_to(optimizer, clipped)
        with clipping, updates_where_weights_lie(optimizer):
            self._model.optimizer.apply_gradients(pairs)
        if self._state.ranks is not None:
            self._give_parts()

    def _keeps_look_ups(self, variable: Any, program: Program) -> bool:
        """Whether the optimizer is to have the rows of equal look-ups apart, as in Keras 3.

        Raises:
            ModelError: they are those of several ranks.
        """
        is_table = id(variable) in program.context.look_ups and not self._regularizers.has(variable)
        optimizer = keras.optimizers.inner_of(self._model.optimizer)
        if not is_table or not keras.optimizers.squares_look_ups(optimizer):
            return False
        if program.context.ranks is not None:
            raise ModelError(
                "a table of Keras 3 on a mesh with replicas must be trained by SGD, since other "
                "optimizers of Keras 3 do not add up the gradients of equal look-ups, and ranks do",
                received=f"{type(optimizer).__name__} and '{keras.tensors.path_of(variable)}'",
                mend="Use SGD, leave replicas out, or use strategy 'horovod'",
            )
        return True

    def _refuse_clipped_look_ups(self, variables: list[Any], program: Program) -> None:
        if limit_of_values(keras.optimizers.inner_of(self._model.optimizer)) is None:
            return
        tables = program.context.look_ups.keys()
        looked_up = [
            keras.tensors.path_of(v)
            for v in variables
            if id(v) in tables and not self._regularizers.has(v)
        ]
        if looked_up:
            raise ModelError(
                "a table on a mesh must have gradients that are not clipped by value, since Keras "
                "clips each row that was looked up, and a mesh has their sums",
                received=f"clipvalue and '{looked_up[0]}'",
                mend="Use clipnorm or global_clipnorm, or another strategy",
            )

    def _test(self, x: Any, y: Any, weight: Any, told: Any = None) -> dict[str, tf.Tensor]:
        return self._evaluate(self._program(x, y, told, training=False), x, y, weight)

    def _predict(self, x: Any) -> Any:
        return self._program(x, training=False).predict()
