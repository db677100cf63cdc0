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

from tfdist.compat import import_tensorflow_federated
from tfdist.errors import ModelError
from tfdist.training.engine.binding import Binding
from tfdist.training.engine.metrics import state_of
from tfdist.training.layers import eager_variables
from tfdist.training.layers.losses import as_on_one_device, counted_as

tff = import_tensorflow_federated()

#: The place of a client in its round, with each of its records: int32 [batch].
SLOT = "slot"


class TracedStep:
    """The forward pass, loss and metrics of a compiled model on a batch, as one traced function.

    Args:
        binding: of the user's model, built and compiled.
        batch_spec: of a batch: an OrderedDict of x, y, perhaps w, and the slot.

    Raises:
        ModelError: the model holds a state that is not a variable, such as a lookup table.
    """

    def __init__(self, binding: Binding, batch_spec: OrderedDict):
        model = binding.model
        self.batch_spec = batch_spec
        make_metrics(model, batch_spec)

        as_on_one_device(binding)

        @tf.function(input_signature=[batch_spec], autograph=False)
        def step(batch: OrderedDict) -> tuple[tf.Tensor, tf.Tensor]:
            x, y, weight = batch["x"], batch["y"], batch.get("w")
            rows = tf.shape(tf.nest.flatten(x)[0])[0]
            with counted_as(tf.cast(rows, tf.keras.backend.floatx())):
                y_pred = model(x, training=True)
                loss = model.compute_loss(x, y, y_pred, weight)
            model.compute_metrics(x, y, y_pred, weight)
            return loss, rows

        self._function = step.get_concrete_function()
        self.trainable = list(model.trainable_variables)
        others = model.non_trainable_variables
        self.non_trainable = [v for v in others if isinstance(v, tf.Variable)]
        self.metric_state = state_of(model)
        known = {variable.ref() for variable in (*self.trainable, *self.non_trainable)}
        known |= {variable.ref() for variable in self.metric_state}
        self.others = [v for v in self._function.graph.variables if v.ref() not in known]
        every = (*self.trainable, *self.non_trainable, *self.metric_state, *self.others)
        self.other_values = [variable.numpy() for variable in self.others]
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

    def __call__(self, batch: Any, variables: dict[Any, tf.Variable]) -> Any:
        """Returns (loss, rows) of a batch, computed on ``variables``.

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


class ClientModel(tff.learning.models.VariableModel):
    """What runs on a client: one pass over a batch, with the loss and metrics of ``compile``.

    It reports sums that a server can add up: the state of all metrics, who finished, the records,
    and the moving statistics times the records they were taken from.

    Args:
        step: of the user's model.
        num_slots: the most clients in a round.
        statistics: indices in ``model.non_trainable_variables`` of moving statistics to average.
    """

    def __init__(self, step: TracedStep, num_slots: int, statistics: Sequence[int] = ()):
        self._step = step
        self._copies: dict[Any, tf.Variable] = {}
        # The server's weights overwrite the zeros before each use.
        self._trainable = self._copy(step.trainable, _zeros(step.trainable), trainable=True)
        self._non_trainable = self._copy(step.non_trainable, _zeros(step.non_trainable))
        self._metric_state = self._copy(step.metric_state, _zeros(step.metric_state))
        self._others = self._copy(step.others, step.other_values)
        self._statistics = [self._non_trainable[index] for index in statistics]
        self._rows = tf.Variable(0.0, trainable=False, name="rows")
        self._present = tf.Variable(tf.zeros([num_slots]), trainable=False, name="present")

    def _copy(
        self, variables: list[tf.Variable], values: list[Any], *, trainable: bool = False
    ) -> list[tf.Variable]:
        copies = []
        for variable, value in zip(variables, values, strict=True):
            copy = tf.Variable(value, trainable=trainable, dtype=variable.dtype)
            self._copies[variable.ref()] = copy
            copies.append(copy)
        return copies

    @property
    def trainable_variables(self) -> Sequence[tf.Variable]:
        return self._trainable

    @property
    def non_trainable_variables(self) -> Sequence[tf.Variable]:
        return self._non_trainable

    @property
    def local_variables(self) -> Sequence[tf.Variable]:
        return [*self._metric_state, *self._others, self._rows, self._present]

    @property
    def input_spec(self) -> OrderedDict:
        return self._step.batch_spec

    def predict_on_batch(self, batch_input: Any, training: bool = True) -> Any:
        raise NotImplementedError("evaluation and prediction are the host's")

    def forward_pass(self, batch_input: Any, training: bool = True) -> Any:
        loss, rows = self._step(batch_input, self._copies)
        # TFF leaves out clients whose update is not finite; an infinite loss may have finite ones.
        loss *= tf.stop_gradient(tf.where(tf.math.is_finite(loss), 1.0, float("nan")))
        self._rows.assign_add(tf.cast(rows, tf.float32))
        self._present.assign(tf.one_hot(batch_input[SLOT][0], self._present.shape[0]))
        return tff.learning.models.BatchOutput(loss=loss, predictions=None, num_examples=rows)

    @tf.function
    def reset_metrics(self) -> None:
        """Called by TFF when the update is not finite: the client then has reported nothing."""
        for variable in (*self._metric_state, self._rows, self._present):
            variable.assign(tf.zeros_like(variable))

    @tf.function
    def report_local_unfinalized_metrics(self) -> OrderedDict:
        # FedSGD does not reset what a client that diverges has reported.
        floats = [v for v in (*self._metric_state, *self._statistics) if v.dtype.is_floating]
        is_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(v)) for v in floats])

        def kept(value: tf.Tensor) -> tf.Tensor:
            return tf.where(is_finite, value, tf.zeros_like(value))

        rows = self._rows
        return OrderedDict(
            metrics=[kept(variable) for variable in self._metric_state],
            present=[kept(self._present)],
            rows=[kept(rows)],
            statistics=[kept(v * tf.cast(rows, v.dtype)) for v in self._statistics],
        )

    def metric_finalizers(self) -> OrderedDict:
        """The sums themselves: Keras makes results of them, on the host."""
        names = ("metrics", "present", "rows", "statistics")
        return OrderedDict((name, tf.function(lambda values: values)) for name in names)


def _zeros(variables: list[tf.Variable]) -> list[tf.Tensor]:
    return [tf.zeros(variable.shape, variable.dtype) for variable in variables]


def make_metrics(model: tf.keras.Model, batch_spec: OrderedDict) -> None:
    """Makes the variables of the model's metrics, which Keras makes at the first batch."""

    def one_row(spec: Any) -> Any:
        return tf.nest.map_structure(
            lambda leaf: tf.zeros([1, *(size or 1 for size in leaf.shape[1:])], leaf.dtype), spec
        )

    y_pred = model(one_row(batch_spec["x"]), training=False)
    eager_variables.make_metrics(model, y_pred, one_row(batch_spec["y"]))
