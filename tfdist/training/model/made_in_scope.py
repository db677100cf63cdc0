"""What Keras and TensorFlow refuse while a model is made for replicas, in the field's words."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from tfdist.errors import ModelError
from tfdist.training.model.stateful_rnn import rows_divided

# Keras' and TensorFlow's words.
_METRIC_FROM_OUTSIDE = "different distribution strategy scope"
_ROWS_OF_INPUT = re.compile(r"`batch_size` argument \((\d+)\) must be .* replicas \((\d+)\)")
_UPDATED_METRIC = "SyncOnReadVariable does not support"
_CALLED = re.compile(r'when calling layer [\'"]([^\'"]+)')
_STATEFUL = "Stateful RNNs"


@contextlib.contextmanager
def explained(strategy_name: str) -> Iterator[None]:
    """Encloses the making of a model within a scope of tf.distribute.

    Raises:
        ModelError: the model has a layer that keeps its state from batch to batch, or metrics that
            were made outside, an input with a number of rows that replicas cannot divide, or a
            layer that updates a metric.
    """
    try:
        yield
    except ValueError as error:
        known = _in_words(str(error), strategy_name)
        if known is None:
            raise
        raise known from error


def _in_words(said: str, strategy_name: str) -> ModelError | None:
    if _METRIC_FROM_OUTSIDE in said:
        return ModelError(
            "metrics that a model is compiled with must be made in the function that makes it",
            received=said.splitlines()[0].partition(" passed to ")[0],
            mend="Make them there, or give their names",
        )
    if found := _ROWS_OF_INPUT.search(said):
        return ModelError(
            "the batch_size of a keras.Input must be divisible by the replicas, among which "
            "Keras divides it",
            received=f"batch_size={found[1]} and {found[2]} replicas",
            mend="Leave batch_size out of keras.Input",
        )
    if _UPDATED_METRIC in said:
        layer = _CALLED.search(said)
        return ModelError(
            "a layer of a functional model must not update a metric in its call, which "
            "TensorFlow refuses on several replicas while the model is made",
            received=f"layer '{layer[1]}'" if layer else "such a layer",
            mend="Write self.add_metric(value, name=...) there, or make the model as a class "
            "of your own",
        )
    if _STATEFUL in said:
        return rows_divided(f"a layer with stateful=True on strategy '{strategy_name}'")
    return None
