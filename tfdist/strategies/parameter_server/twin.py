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

from tfdist.compat import uses_keras_3
from tfdist.errors import ModelError, first_line
from tfdist.keras.layers import (
    can_be_called,
    freeze_alike,
    list_shards,
    take_trainable,
    variables_in,
)
from tfdist.keras.losses import compilation_of, name_alike
from tfdist.keras.optimizer_copies import compile_config_of, decay_alike
from tfdist.keras.optimizers import build, set_learning_rate, steps_of
from tfdist.keras.optimizers import state_of as optimizer_state_of
from tfdist.keras.seeds import seeds_in
from tfdist.keras.tensors import raw, shards_of
from tfdist.keras.trackables import unknown_variables
from tfdist.strategies.parameter_server.refusals import refuse_on_shards
from tfdist.training.engine.metrics import state_of
from tfdist.training.layers import eager_variables
from tfdist.training.layers.losses import unmoved_by_padding
from tfdist.training.model.lookup_vocabularies import learned_words, take_adapted, take_words

_Pair = tuple[tf.Variable, list[tf.Variable]]
"""A variable of the chief, and its shards in order."""


class Twin:
    """A model of the chief and its twin.

    Args:
        model: the chief's.
        twin: made like it within the scope of ``engine``.
        engine: TensorFlow's strategy.
        is_compiled: whether the twin is compiled like the model; else it is before its first step.
    """

    def __init__(
        self,
        model: tf.keras.Model,
        twin: tf.keras.Model,
        engine: tf.distribute.ParameterServerStrategy,
        *,
        is_compiled: bool,
    ):
        self._model = model
        self.twin = twin
        self._engine = engine
        if list_shards(twin) and twin.optimizer.built:
            is_compiled = False  # A user has made slots of whole variables.
        #: The compilation that the twin has, too.
        self._compiled_as = compilation_of(model) if is_compiled else None
        self._pairs: list[_Pair] = []
        #: Name of a metric of the twin -> that of the chief's. Keras counts names up.
        self.metric_names: dict[str, str] = {}

    def is_ready(self) -> bool:
        """Whether the model is still the one that was prepared: not compiled anew."""
        return bool(self._pairs) and self._compiled_as is compilation_of(self._model)

    def prepare(self, batch: Any) -> None:
        """Makes all variables of both models, and pairs them.

        Args:
            batch: (x[, y[, sample_weight]]), the first of a training.

        Raises:
            ModelError: a variable that must be whole is divided, or Keras cannot compile a copy.
        """
        model, twin = self._model, self.twin
        take_trainable(twin, model)
        freeze_alike(_paired(model.weights, twin.weights))
        if self._compiled_as is not compilation_of(model):
            self._compile_twin()
        self._make_metrics(batch)
        eager_variables.make_slots(model)
        with self._engine.scope():
            build(twin.optimizer, twin.trainable_variables)
            slots, own = optimizer_state_of(twin.optimizer), unknown_variables(twin, shared=True)
            # The chief knows the rate, and the place in a schedule; it sends both with each step.
            rate = tf.Variable(0.0, trainable=False, dtype=tf.keras.backend.floatx())
            set_learning_rate(twin.optimizer, rate)
        twin.optimizer.jit_compile = False
        weights = list(_paired(variables_in(model), variables_in(twin)))
        refuse_on_shards(model, [whole for whole, parts in weights if len(parts) > 1])
        self._pairs = [
            *weights,
            *(
                pair
                for name, wholes in optimizer_state_of(model.optimizer).items()
                for pair in _paired(wholes, slots[name])
            ),
            *_paired(state_of(model), state_of(twin)),
            *_paired(seeds_in(model), seeds_in(twin)),
            *_paired(unknown_variables(model, shared=True), own),
        ]
        name_alike(twin, model)
        self.metric_names = {
            theirs.name: ours.name for theirs, ours in zip(twin.metrics, model.metrics, strict=True)
        }

    def _make_metrics(self, batch: Any) -> None:
        model, twin = self._model, self.twin
        if uses_keras_3():
            spec = tf.nest.map_structure(tf.type_spec_from_value, batch)
            for each in (model, twin):
                eager_variables.make_known_metrics(each, spec)
            return
        if not can_be_called(model):
            return
        x, y, _ = tf.keras.utils.unpack_x_y_sample_weight(batch)
        one_x = tf.nest.map_structure(_first_row, x)
        one_y = None if y is None else tf.nest.map_structure(_first_row, y)
        # Layers may tell theirs of each call.
        with unmoved_by_padding(lambda: state_of(model), tf.constant(False)):
            y_pred = model(one_x, training=False)
        eager_variables.make_metrics(model, y_pred, one_y)
        with self._engine.scope():
            eager_variables.make_metrics(twin, y_pred, one_y)

    def wholes(self) -> list[tf.Variable]:
        """Returns the chief's variables, but for the count of steps, which it counts itself."""
        steps = raw(steps_of(self._model.optimizer))
        return [whole for whole, _ in self._pairs if whole is not steps]

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
            take_adapted(self.twin, self._model)

    def pull(self) -> None:
        """Gives the chief the twin's values."""
        for whole, parts in self._pairs:
            values = [part.read_value() for part in parts]
            whole.assign(values[0] if len(values) == 1 else tf.concat(values, axis=0))

    def _compile_twin(self) -> None:
        model, twin = self._model, self.twin
        try:
            with self._engine.scope():
                twin.compile_from_config(compile_config_of(model))
        except (ValueError, TypeError, NotImplementedError) as error:
            raise ModelError(
                "a model of strategy 'parameter_server' must be compiled with what Keras can copy, "
                "for a second model on the parameter servers",
                received=f"model '{model.name}': {first_line(error)}",
                mend="Compile it in model_fn, without optimizer.build, and build it anew",
            ) from error
        pairs = _paired(variables_in(model), variables_in(twin))
        parts = [(whole, part) for whole, of_servers in pairs for part in of_servers]
        decay_alike(model.optimizer, twin.optimizer, parts)
        self._compiled_as = compilation_of(model)


def _first_row(tensor: Any) -> Any:
    if isinstance(tensor, tf.SparseTensor):
        return tf.sparse.slice(tensor, [0] * tensor.shape.rank, [1, *tensor.dense_shape[1:]])
    return tensor[:1]


def _paired(wholes: Sequence[Any], parts: Sequence[Any]) -> Iterator[_Pair]:
    """Yields each variable with its shards; those of one stand together, divided by rows."""
    left = (part for variable in parts for part in shards_of(variable))
    for whole in wholes:
        own = [next(left)]
        rows = whole.shape[0] if whole.shape.rank else None  # None: the server has it whole.
        while rows is not None and sum(part.shape[0] for part in own) < rows:
            own.append(next(left))
        yield whole, own
    assert next(left, None) is None, "the twin has other variables than the model"
