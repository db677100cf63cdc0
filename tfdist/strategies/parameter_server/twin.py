"""The user's model a second time, with its variables on the parameter servers.

The chief's model is an ordinary one, with whole variables of its own: evaluation, prediction and
files are Keras' own. Its twin is what workers train. TensorFlow divides large variables of it into
shards, which Keras can neither save nor read as one weight; here the chief's variables are paired
with their shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import ModelError, first_line
from tfdist.keras.layers import can_be_called, take_trainable, variables_in
from tfdist.keras.optimizer_copies import decay_alike
from tfdist.keras.optimizers import set_learning_rate
from tfdist.strategies.parameter_server.refusals import refuse_on_shards
from tfdist.training.engine.metrics import state_of
from tfdist.training.layers import eager_variables
from tfdist.training.layers.losses import unmoved_by_padding
from tfdist.training.model.lookup_vocabularies import follow_variables, learned_words, take_words

_Pair = tuple[tf.Variable, list[tf.Variable]]
"""A variable of the chief, and its shards in order."""


class Twin:
    """A model of the chief and its twin.

    Args:
        model: the chief's.
        twin: made like it within the scope of ``engine``; compiled like it, or not at all.
        engine: TensorFlow's strategy.
    """

    def __init__(
        self,
        model: tf.keras.Model,
        twin: tf.keras.Model,
        engine: tf.distribute.ParameterServerStrategy,
    ):
        self._model = model
        self.twin = twin
        self._engine = engine
        #: The loss of the compilation that the twin has, too.
        self._compiled_as = model.compiled_loss if twin.optimizer is not None else None
        self._pairs: list[_Pair] = []
        #: Name of a metric of the twin -> that of the chief's. Keras counts names up.
        self.metric_names: dict[str, str] = {}

    def is_ready(self) -> bool:
        """Whether the model is still the one that was prepared: not compiled anew."""
        return bool(self._pairs) and self._compiled_as is self._model.compiled_loss

    def prepare(self, batch: Any) -> None:
        """Makes all variables of both models, and pairs them.

        Args:
            batch: (x[, y[, sample_weight]]), the first of a training.

        Raises:
            ModelError: a variable that must be whole is divided, or Keras cannot compile a copy.
        """
        model, twin = self._model, self.twin
        take_trainable(twin, model)
        if self._compiled_as is not model.compiled_loss:
            self._compile_twin()
        x, y, _ = tf.keras.utils.unpack_x_y_sample_weight(batch)
        one_x = tf.nest.map_structure(_first_row, x)
        one_y = None if y is None else tf.nest.map_structure(_first_row, y)
        y_pred = None
        if can_be_called(model):
            # Layers may tell theirs of each call.
            with unmoved_by_padding(lambda: state_of(model), tf.constant(False)):
                y_pred = model(one_x, training=False)
            eager_variables.make_metrics(model, y_pred, one_y)
        eager_variables.make_slots(model)
        with self._engine.scope():
            if y_pred is not None:
                eager_variables.make_metrics(twin, y_pred, one_y)
            twin.optimizer.build(twin.trainable_variables)
            # The chief knows the rate, and the place in a schedule; it sends both with each step.
            rate = tf.Variable(0.0, trainable=False, dtype=tf.keras.backend.floatx())
            set_learning_rate(twin.optimizer, rate)
        twin.optimizer.jit_compile = False
        weights = list(_paired(variables_in(model), variables_in(twin)))
        refuse_on_shards(model, [whole for whole, parts in weights if len(parts) > 1])
        self._pairs = [
            *weights,
            *_paired_state(model.optimizer, twin.optimizer),
            *_paired(state_of(model), state_of(twin)),
        ]
        self.metric_names = {
            theirs.name: ours.name for theirs, ours in zip(twin.metrics, model.metrics, strict=True)
        }

    def wholes(self) -> list[tf.Variable]:
        """Returns the chief's variables, but for the count of steps, which it counts itself."""
        return [whole for whole, _ in self._pairs if whole is not self._model.optimizer.iterations]

    def push(self) -> None:
        """Gives the twin the chief's values: weights, optimizer and metrics."""
        for whole, parts in self._pairs:
            value = whole.numpy()
            if len(parts) == 1:
                parts[0].assign(value)
                continue
            start = 0
            for part in parts:
                part.assign(value[start : start + part.shape[0]])
                start += part.shape[0]
        with self._engine.scope():  # Each worker has tables of its own.
            take_words(self.twin, learned_words(self._model))
        follow_variables(self.twin)

    def pull(self) -> None:
        """Gives the chief the twin's values."""
        for whole, parts in self._pairs:
            values = [part.read_value() for part in parts]
            whole.assign(values[0] if len(values) == 1 else tf.concat(values, axis=0))

    def _compile_twin(self) -> None:
        model, twin = self._model, self.twin
        try:
            with self._engine.scope():
                twin.compile_from_config(model.get_compile_config())
        except (ValueError, TypeError, NotImplementedError) as error:
            raise ModelError(
                "a model of strategy 'parameter_server' must be compiled with what Keras can copy, "
                "for a second model on the parameter servers",
                received=f"model '{model.name}': {first_line(error)}",
                mend="Compile it in model_fn, and build it anew",
            ) from error
        pairs = _paired(variables_in(model), variables_in(twin))
        parts = [(whole, part) for whole, of_servers in pairs for part in of_servers]
        decay_alike(model.optimizer, twin.optimizer, parts)
        self._compiled_as = model.compiled_loss


def _first_row(tensor: Any) -> Any:
    if isinstance(tensor, tf.SparseTensor):
        return tf.sparse.slice(tensor, [0] * tensor.shape.rank, [1, *tensor.dense_shape[1:]])
    return tensor[:1]


def _paired(wholes: Sequence[Any], parts: Sequence[Any]) -> Iterator[_Pair]:
    """Yields each variable with its shards; those of one stand together, divided by rows."""
    left = iter(parts)
    for whole in wholes:
        own = [next(left)]
        rows = whole.shape[0] if whole.shape.rank else None  # None: the server has it whole.
        while rows is not None and sum(part.shape[0] for part in own) < rows:
            own.append(next(left))
        yield whole, own
    assert next(left, None) is None, "the twin has other variables than the model"


def _paired_state(ours: Any, theirs: Any) -> Iterator[_Pair]:
    """Yields the variables of two optimizers of one kind: counters, and slots of each weight."""
    for name, value in vars(ours).items():
        if name in ("_variables", "_learning_rate", "_current_learning_rate"):
            continue
        if isinstance(value, tf.Variable):
            yield value, [getattr(theirs, name)]
        elif isinstance(value, list) and value and isinstance(value[0], tf.Variable):
            yield from _paired(value, getattr(theirs, name))
