"""Recurrent layers that go on in each batch where the batch before has ended, row by row."""

from __future__ import annotations

import tensorflow as tf

from tfdist.errors import DataError, ModelError
from tfdist.keras.layers import layers_in
from tfdist.training.feed.feed import Feed


def stateful_layers(model: tf.keras.Model) -> list[str]:
    """Returns the names of the recurrent layers that keep their state from batch to batch."""
    rnn = tf.keras.layers.RNN
    return [layer.name for layer in layers_in(model) if isinstance(layer, rnn) and layer.stateful]


def rows_divided(received: str) -> ModelError:
    """Returns what to raise where such a layer's rows would be divided."""
    return ModelError(
        "a stateful recurrent layer must see the rows of a batch in one piece, to go on with each "
        "where the batch before has ended",
        received=received,
        mend="Make it with stateful=False, or use strategy 'single'",
    )


def refuse_stateful(model: tf.keras.Model, divided_by: str) -> None:
    """Raises:
    ModelError: a layer keeps its state from batch to batch.

    Args:
        divided_by: what divides the rows of a batch, for people.
    """
    names = stateful_layers(model)
    if names:
        raise rows_divided(f"layer '{names[0]}' and {divided_by}")


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
