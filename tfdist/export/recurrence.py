"""Recurrent layers that begin each record anew, as Keras' do.

TFLite turns Keras' LSTM into an operator that keeps its state from one call to the next, until the
app resets it: the second record would get another answer than the first. A loop over the cell
begins with zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import tensorflow as tf

from tfdist.errors import ExportError
from tfdist.export.flatbuffer import operators
from tfdist.export.models import PlainModel, whole_copy
from tfdist.keras.layers import layers_in

_WITH_STATE = ("UNIDIRECTIONAL_SEQUENCE_LSTM", "BIDIRECTIONAL_SEQUENCE_LSTM")
_OF_RNN = (
    "name",
    "trainable",
    "dtype",
    "return_sequences",
    "return_state",
    "go_backwards",
    "stateful",
    "unroll",
    "time_major",
    "zero_output_for_mask",
)
Change = Callable[[tf.keras.layers.Layer], tf.keras.layers.Layer]


def without_state(model: PlainModel) -> PlainModel:
    """Returns the model with each LSTM as a loop over its cell, which has the same weights.

    Raises:
        ExportError: a recurrent layer is stateful: it is not meant to begin anew.
    """
    recurrent = [part for part in layers_in(model.keras) if isinstance(part, tf.keras.layers.RNN)]
    for layer in recurrent:
        if layer.stateful:
            raise ExportError(
                "a recurrent layer in a file must begin each record anew",
                received=f"layer '{layer.name}' with stateful=True",
                mend="Leave stateful out, or make the state an input and an output of the model",
            )
    if not any(isinstance(layer, tf.keras.layers.LSTM) for layer in recurrent):
        return model
    return replace(model, keras=whole_copy(model.keras, clone_function=_visitor(_as_loop)))


def unrolled(model: PlainModel) -> PlainModel:
    """Returns the model with the steps of recurrent layers one behind the other."""
    visit = _visitor(lambda rnn: type(rnn).from_config(rnn.get_config() | {"unroll": True}))
    return replace(model, keras=whole_copy(model.keras, clone_function=visit))


def refuse_state(content: bytes, name: str) -> None:
    """Raises ExportError for a file that would remember the record before."""
    if set(_WITH_STATE) & set(operators(content)):
        raise ExportError(
            "a recurrent layer in a file must begin each record anew, which TFLite's LSTM does not",
            received=f"model '{name}', in which Keras cannot replace it",
            mend="Write keras.layers.RNN(keras.layers.LSTMCell(units)) instead of LSTM(units)",
        )


def _visitor(change: Change) -> Change:
    def visit(layer: tf.keras.layers.Layer) -> tf.keras.layers.Layer:
        if isinstance(layer, tf.keras.Model) and layer.inputs is not None:
            return tf.keras.models.clone_model(layer, clone_function=visit)
        if isinstance(layer, tf.keras.layers.RNN):
            return change(layer)
        if isinstance(layer, tf.keras.layers.Bidirectional):
            return tf.keras.layers.Bidirectional(
                visit(layer.forward_layer),
                backward_layer=visit(layer.backward_layer),
                merge_mode=layer.merge_mode,
                name=layer.name,
            )
        return type(layer).from_config(layer.get_config())

    return visit


def _as_loop(layer: tf.keras.layers.RNN) -> tf.keras.layers.RNN:
    config = layer.get_config()
    if not isinstance(layer, tf.keras.layers.LSTM):
        return type(layer).from_config(config)
    # An LSTM's configuration is that of its cell, and of the loop around it.
    cell = tf.keras.layers.LSTMCell.from_config(layer.cell.get_config())
    return tf.keras.layers.RNN(cell, **{key: config[key] for key in _OF_RNN if key in config})
