"""Recurrent layers that go on in each batch where the batch before has ended, row by row."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

from tfdist.errors import DataError, ModelError
from tfdist.keras.layers import layers_in
from tfdist.training.feed.feed import Feed

_RULE = (
    "a stateful recurrent layer must see the rows of a batch in one piece, to go on with each "
    "where the batch before has ended"
)
# Keras' words.
_ROWS_OF_INPUT = re.compile(r"`batch_size` argument \((\d+)\) must be .* replicas \((\d+)\)")
_UPDATED_METRIC = "SyncOnReadVariable does not support"
_CALLED = re.compile(r'when calling layer [\'"]([^\'"]+)')
_MEND = "Make it with stateful=False, or use strategy 'single'"


def stateful_layers(model: tf.keras.Model) -> list[str]:
    """Returns the names of the recurrent layers that keep their state from batch to batch."""
    rnn = tf.keras.layers.RNN
    return [layer.name for layer in layers_in(model) if isinstance(layer, rnn) and layer.stateful]


def refuse_stateful(model: tf.keras.Model, divided_by: str) -> None:
    """Raises:
    ModelError: a layer keeps its state from batch to batch.

    Args:
        divided_by: what divides the rows of a batch, for people.
    """
    names = stateful_layers(model)
    if names:
        raise ModelError(_RULE, received=f"layer '{names[0]}' and {divided_by}", mend=_MEND)


@contextlib.contextmanager
def explained(strategy_name: str) -> Iterator[None]:
    """Encloses the making of a model within a scope of tf.distribute, where Keras itself refuses.

    Raises:
        ModelError: the model has a layer that keeps its state from batch to batch, or metrics that
            were made outside, an input with a number of rows that replicas cannot divide, or a
            layer that updates a metric.
    """
    try:
        yield
    except ValueError as error:
        if "different distribution strategy scope" in str(error):
            raise ModelError(
                "metrics that a model is compiled with must be made in the function that makes it",
                received=str(error).splitlines()[0].partition(" passed to ")[0],
                mend="Make them there, or give their names",
            ) from error
        if found := _ROWS_OF_INPUT.search(str(error)):
            raise ModelError(
                "the batch_size of a keras.Input must be divisible by the replicas, among which "
                "Keras divides it",
                received=f"batch_size={found[1]} and {found[2]} replicas",
                mend="Leave batch_size out of keras.Input",
            ) from error
        if _UPDATED_METRIC in str(error):
            layer = _CALLED.search(str(error))
            raise ModelError(
                "a layer of a functional model must not update a metric in its call, which "
                "TensorFlow refuses on several replicas while the model is made",
                received=f"layer '{layer[1]}'" if layer else "such a layer",
                mend="Write self.add_metric(value, name=...) there, or make the model as a class "
                "of your own",
            ) from error
        if "Stateful RNNs" not in str(error):
            raise
        received = f"a layer with stateful=True on strategy '{strategy_name}'"
        raise ModelError(_RULE, received=received, mend=_MEND) from error


def check_batches(model: tf.keras.Model, feed: Feed) -> None:
    """Raises:
    DataError: a stateful layer, whose state has a fixed number of rows, would get another number.
    """
    inputs = getattr(model, "inputs", None) or []
    sizes = {symbol.shape[0] for symbol in inputs} - {None}
    if not sizes or not stateful_layers(model):
        return
    given = {min(feed.global_batch_size, feed.num_records)} | ({feed.tail} - {0})
    if given != sizes:
        raise DataError(
            "the batches of a model with stateful layers must all have the rows of its "
            f"keras.Input(batch_size=...), here {min(sizes)}",
            received=f"batches of {' and '.join(map(str, sorted(given, reverse=True)))} rows",
            mend="Give strategy.dataset that global_batch_size, and a multiple of it in records",
        )
