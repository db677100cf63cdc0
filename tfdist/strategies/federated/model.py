"""A compiled Keras model as TFF's clients train it.

TFF's own ``from_keras_model`` knows neither sample weights nor a compiled model, never updates the
moving statistics of BatchNormalization, and needs metrics that can be made without arguments.
Here loss and metrics are those of ``compile``, computed by Keras' own code.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tfdist.training.metrics import state_of

#: Which update of a round a batch belongs to: int32 [].
SLOT = "slot"


class ClientModel(tff.learning.models.VariableModel):
    """What runs on a client: one pass over a batch, with the loss and metrics of ``compile``.

    It reports sums that a server can add up: the state of all metrics, who finished, the records,
    and the moving statistics times the records they were taken from.

    Args:
        model: a compiled, built Keras model, made in the graph that this one belongs to.
        batch_spec: of a batch: an OrderedDict of x, y (perhaps w), and the slot.
        num_slots: the most clients in a round.
        statistics: indices in ``model.non_trainable_variables`` of moving statistics to average.
    """

    def __init__(
        self,
        model: tf.keras.Model,
        batch_spec: OrderedDict,
        num_slots: int,
        statistics: Sequence[int] = (),
    ):
        self._model = model
        self._spec = batch_spec
        self._statistics = [model.non_trainable_variables[index] for index in statistics]
        make_metrics(model, batch_spec)
        self._rows = tf.Variable(0.0, trainable=False, name="rows")
        self._present = tf.Variable(tf.zeros([num_slots]), trainable=False, name="present")
        self._metric_state = state_of(model)

    @property
    def trainable_variables(self) -> Sequence[tf.Variable]:
        return self._model.trainable_variables

    @property
    def non_trainable_variables(self) -> Sequence[tf.Variable]:
        return self._model.non_trainable_variables

    @property
    def local_variables(self) -> Sequence[tf.Variable]:
        return [*self._metric_state, self._rows, self._present]

    @property
    def input_spec(self) -> OrderedDict:
        return self._spec

    def predict_on_batch(self, batch_input: Any, training: bool = True) -> Any:
        return self._model(batch_input, training=training)

    def forward_pass(self, batch_input: Any, training: bool = True) -> Any:
        model = self._model
        x, y = batch_input["x"], batch_input.get("y")
        weight = batch_input.get("w")
        y_pred = self.predict_on_batch(x, training)
        loss = model.compute_loss(x, y, y_pred, weight)
        model.compute_metrics(x, y, y_pred, weight)
        rows = tf.shape(tf.nest.flatten(x)[0])[0]
        self._rows.assign_add(tf.cast(rows, tf.float32))
        self._present.assign(tf.one_hot(batch_input[SLOT], self._present.shape[0]))
        return tff.learning.models.BatchOutput(
            loss=loss, predictions=tf.nest.flatten(y_pred)[0], num_examples=rows
        )

    @tf.function
    def reset_metrics(self) -> None:
        """Called by TFF when the update is not finite: the client then has reported nothing."""
        for variable in self.local_variables:
            variable.assign(tf.zeros_like(variable))

    @tf.function
    def report_local_unfinalized_metrics(self) -> OrderedDict:
        # FedSGD does not reset what a client that diverges has reported.
        is_finite = tf.reduce_all(
            [tf.reduce_all(tf.math.is_finite(variable)) for variable in self._floats()]
        )

        def kept(value: tf.Tensor) -> tf.Tensor:
            return tf.where(is_finite, value, tf.zeros_like(value))

        return OrderedDict(
            metrics=[kept(variable) for variable in self._metric_state],
            present=[kept(self._present)],
            rows=[kept(self._rows)],
            statistics=[kept(variable * self._rows) for variable in self._statistics],
        )

    def _floats(self) -> list[tf.Variable]:
        variables = [*self._metric_state, *self._statistics, self._rows]
        return [variable for variable in variables if variable.dtype.is_floating]

    def metric_finalizers(self) -> OrderedDict:
        """The sums themselves: Keras makes results of them, on the host."""
        names = ("metrics", "present", "rows", "statistics")
        return OrderedDict((name, tf.function(lambda values: values)) for name in names)


def make_metrics(model: tf.keras.Model, batch_spec: OrderedDict) -> None:
    """Makes the variables of the model's metrics, which Keras makes at the first batch."""

    def one_row(spec: Any) -> Any:
        return tf.nest.map_structure(
            lambda leaf: tf.zeros([1, *(size or 1 for size in leaf.shape[1:])], leaf.dtype), spec
        )

    y_pred = model(one_row(batch_spec["x"]), training=False)
    if not model.compiled_loss.built:
        model.compiled_loss.build(y_pred)
    if not model.compiled_metrics.built:
        model.compiled_metrics.build(y_pred, one_row(batch_spec["y"]))
