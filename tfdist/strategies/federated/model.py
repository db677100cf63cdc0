"""A compiled Keras model as TFF's clients train it.

TFF's own ``from_keras_model`` knows neither sample weights nor a compiled model, never updates the
moving statistics of BatchNormalization, and needs metrics that can be made without arguments: TFF
makes models inside of TF1 graphs, where Keras is another Keras. Here Keras runs its own step once,
eagerly, and TFF gets what was traced, on variables of TFF's graph.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist import keras
from tfdist.errors import ModelError
from tfdist.strategies.federated.optimizers import client_optimizer, learning_rate_of
from tfdist.strategies.federated.options import Options
from tfdist.training.engine.binding import Binding
from tfdist.training.engine.metrics import state_of
from tfdist.training.layers import eager_variables
from tfdist.training.layers.losses import as_on_one_device, counted_as, is_sum
from tfdist.training.model.refusals import (
    refuse_eager,
    refuse_float8,
    refuse_own_steps,
    refuse_xla,
)
from tfdist.training.model.stateful_rnn import refuse_stateful


def check_model(model: tf.keras.Model, options: Options) -> None:
    """Raises ModelError for a model that TFF's clients cannot train as it is compiled."""
    refuse_own_steps(model, "federated")
    refuse_xla(model)
    refuse_stateful(model, "clients with rows of their own")
    refuse_eager(model, "federated")
    mixed = [weight.name for weight in model.trainable_weights if weight.dtype != "float32"]
    policies = {
        layer.compute_dtype for layer in keras.layers.layers_in(model) if layer.trainable_weights
    }
    if mixed or policies - {"float32"}:
        raise ModelError(
            "clients must train in float32, as TFF's optimizers do",
            received=f"the precision {', '.join(sorted(policies | set(mixed[:1])))}",
            mend='Leave the policy at "float32"',
        )
    refuse_float8(model)
    if keras.loss_scale.is_undone_in_update(model.optimizer):
        raise ModelError(
            "the loss of a model that clients train must have no scale, which float32 does not "
            "need and TFF's optimizers do not undo",
            received=f"{type(model.optimizer).__name__} with one",
            mend="Leave LossScaleOptimizer and loss_scale_factor out",
        )
    if options.algorithm == "fedsgd" and is_sum(model):
        raise ModelError(
            "clients that send gradients must have a loss that is a mean over rows, as the server "
            "takes the mean of theirs",
            received="a loss with reduction='sum'",
            mend="Compile with reduction='sum_over_batch_size'",
        )
    if options.algorithm != "fedsgd":
        bound = [w.name for w in model.trainable_weights if getattr(w, "constraint", None)]
        if bound:
            raise ModelError(
                "weights that clients train must have no constraint, of which TFF's optimizers "
                "know nothing",
                received=f"a constraint of {', '.join(bound[:3])}",
                mend="Use a regularizer, or algorithm='fedsgd', where Keras updates the weights",
            )
        rate = options.client_learning_rate or learning_rate_of(model.optimizer)
        client_optimizer(model.optimizer, rate)


class TracedStep:
    """The gradients, loss and metrics of a compiled model on a batch, as one traced function.

    Args:
        binding: of the user's model, built and compiled.
        batch_spec: of a batch: an OrderedDict of x, y, and perhaps w.

    Raises:
        ModelError: the model holds a state that is not a variable, such as a lookup table.
    """

    def __init__(self, binding: Binding, batch_spec: OrderedDict):
        model = binding.model
        self.batch_spec = batch_spec
        make_metrics(model, batch_spec)

        as_on_one_device(binding)

        @tf.function(input_signature=[batch_spec], autograph=False)
        def step(batch: OrderedDict) -> tuple[Any, ...]:
            # With a seed TFF would draw the same numbers in every round.
            tf.compat.v1.get_default_graph().seed = None
            x, y, weight = batch["x"], batch["y"], batch.get("w")
            rows = tf.shape(tf.nest.flatten(x)[0])[0]
            with tf.GradientTape() as tape:
                with counted_as(tf.cast(rows, tf.keras.backend.floatx())):
                    y_pred = keras.steps.called(model, x, training=True)
                    loss = keras.losses.compute_loss(model, x, y, y_pred, weight, training=True)
                    keras.losses.show_loss(model, loss, rows)
                # Clients whose update is not finite are left out; an infinite loss may have
                # finite gradients.
                loss *= tf.stop_gradient(tf.where(tf.math.is_finite(loss), 1.0, float("nan")))
            model.compute_metrics(x, y, y_pred, weight)
            return tuple(tape.gradient(loss, keras.tensors.all_raw(model.trainable_variables)))

        self._function = step.get_concrete_function()
        self.trainable = keras.tensors.all_raw(model.trainable_variables)
        self.metric_state = state_of(model)
        of_metrics = {variable.ref() for variable in self.metric_state}
        # Keras 2 counts tables among them, Keras 3 the state of metrics.
        others = [
            v
            for v in model.non_trainable_variables
            if isinstance(own := keras.tensors.raw(v), tf.Variable) and own.ref() not in of_metrics
        ]
        self.non_trainable = keras.tensors.all_raw(others)
        known = {variable.ref() for variable in (*self.trainable, *self.non_trainable)} | of_metrics
        # Those of a loss, say, which a callback may set between rounds.
        self.non_trainable += [v for v in self._function.graph.variables if v.ref() not in known]
        every = (*self.trainable, *self.non_trainable, *self.metric_state)
        drawn_from = [*keras.seeds.seeds_in(model), keras.seeds.shared_seed()]
        self.seeds = [v for v in self.non_trainable if any(v is seed for seed in drawn_from)]
        self._name_of = {
            keras.tensors.raw(v).ref(): keras.tensors.path_of(v)
            for v in (*model.trainable_variables, *others)
        }
        self._variable_of_handle = {id(variable.handle): variable for variable in every}
        self._constants: dict[int, Any] = {}
        for captured in self._function.captured_inputs:
            if id(captured) in self._variable_of_handle:
                continue
            if captured.dtype in (tf.resource, tf.variant):
                raise ModelError(
                    "a model of strategy 'federated' must hold nothing but variables",
                    received=f"model '{model.name}' with a lookup table or another resource",
                    mend="Leave text and category lookups to map_fn of strategy.dataset",
                )
            self._constants[id(captured)] = captured.numpy()
        unknown = [v.name for v in every if not v.shape.is_fully_defined()]
        if unknown:
            raise ModelError(
                "a model of strategy 'federated' must hold variables of known shapes only",
                received=f"variable '{unknown[0]}' of model '{model.name}'",
                mend="Leave what has learned from data with adapt, as Discretization, to map_fn of "
                "strategy.dataset",
            )

    @property
    def has_gradients(self) -> list[bool]:
        """Whether each of the trained weights has a gradient."""
        return [gradient is not None for gradient in self._function.structured_outputs]

    @property
    def looked_up(self) -> list[str]:
        """The names of the trained weights whose gradients are of rows that were looked up."""
        gradients = self._function.structured_outputs
        return [
            self._name_of[variable.ref()]
            for variable, gradient in zip(self.trainable, gradients, strict=True)
            if isinstance(gradient, tf.IndexedSlices)
        ]

    def changed_beside(self, kept: Sequence[tf.Variable]) -> set[str]:
        """Returns the names of what is not trained, nor ``kept``, and that a step assigns to."""
        graph = self._function.graph
        known = {v.ref() for v in kept}
        weights = {
            id(v.handle): self._name_of.get(v.ref(), v.name)
            for v in self.non_trainable
            if v.ref() not in known
        }
        names = {id(inner): weights.get(id(outer)) for outer, inner in graph.captures}
        operations = [op for op in graph.get_operations() if op.type.startswith("Assign")]
        return {name for op in operations if (name := names.get(id(op.inputs[0])))}

    def __call__(self, batch: Any, variables: dict[Any, tf.Variable]) -> tuple[Any, ...]:
        """Returns the gradients of a batch, computed on ``variables``; None of an unused weight.

        Args:
            variables: the model's own variable, by reference -> the one to use.
        """
        with self._on(variables):
            return self._function(batch)

    @contextlib.contextmanager
    def _on(self, variables: dict[Any, tf.Variable]) -> Iterator[None]:
        """Rebinds what the function has captured, as the loader of SavedModels does."""
        function = self._function
        before, graph_before = list(function.captured_inputs), function.graph.variables
        captured = []
        for tensor in before:
            variable = self._variable_of_handle.get(id(tensor))
            if variable is None:
                captured.append(tf.constant(self._constants[id(tensor)]))
            else:
                captured.append(variables[variable.ref()].handle)
        function.set_external_captures(captured)
        function.graph.variables = [variables[variable.ref()] for variable in graph_before]
        try:
            yield
        finally:
            function.set_external_captures(before)
            function.graph.variables = graph_before


class StepCopy:
    """The variables of a traced step in a graph of TFF's, for one client after the other."""

    def __init__(self, step: TracedStep):
        self._step = step
        self._copies: dict[Any, tf.Variable] = {}
        self.trainable = self._copied(step.trainable)
        self.non_trainable = self._copied(step.non_trainable)
        self.metric_state = self._copied(step.metric_state)
        self._seeds = [self._copies[seed.ref()] for seed in step.seeds]

    def _copied(self, variables: list[tf.Variable]) -> list[tf.Variable]:
        copies = [
            tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False, dtype=v.dtype)
            for v in variables
        ]
        self._copies |= {v.ref(): copy for v, copy in zip(variables, copies, strict=True)}
        return copies

    def begin(self, weights: Any, slot: tf.Tensor) -> None:
        """Sets all variables to what a client begins a round with.

        Args:
            weights: the server's.
            slot: the place of the client in the round; each draws random numbers of its own.
        """
        pairs = [
            *zip(self.trainable, weights.trainable, strict=True),
            *zip(self.non_trainable, weights.non_trainable, strict=True),
            *((variable, tf.zeros_like(variable)) for variable in self.metric_state),
        ]
        for variable, value in pairs:
            variable.assign(value)
        for seed in self._seeds:
            seed.assign_add(tf.cast(tf.stack([slot, 0]), seed.dtype))

    def __call__(self, batch: Any) -> tuple[Any, ...]:
        return self._step(batch, self._copies)


def make_metrics(model: tf.keras.Model, batch_spec: OrderedDict) -> None:
    """Makes the variables of the model's metrics, which Keras makes at the first batch."""
    if keras.steps.build_all(model, tuple(batch_spec.values())):
        return

    def one_row(spec: Any) -> Any:
        return tf.nest.map_structure(
            lambda leaf: tf.zeros([1, *(size or 1 for size in leaf.shape[1:])], leaf.dtype), spec
        )

    y_pred = model(one_row(batch_spec["x"]), training=False)
    eager_variables.make_metrics(model, y_pred, one_row(batch_spec["y"]))
