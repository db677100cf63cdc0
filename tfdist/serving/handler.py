"""The model between ``instances``, which decodes requests, and ``answers``, which encodes its rows.

The three know nothing of HTTP or of LitServe: whatever brings requests stands on them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import tfdist
from tfdist.compat import import_tensorflow
from tfdist.errors import DataError
from tfdist.records.reading.decode import batch_spec, make_decoder
from tfdist.records.writing.instances import InstanceError
from tfdist.runs.predict_rank import load, named_outputs
from tfdist.serving.served import Served
from tfdist.training.engine import model_path
from tfdist.training.layers.data_errors import explain_value_error
from tfdist.training.model.deferred_build import build_now

tf = import_tensorflow()
# What the model, or what reads its records, says of rows that it does not take.
_REFUSALS = (tf.errors.InvalidArgumentError, DataError)
#: What a request's rows become, or why there are none.
Answer = dict[str, np.ndarray] | InstanceError


def trained(served: Served) -> tf.keras.Model:
    """Returns the model with its weights, untouched by any strategy. Raises as ``Handler`` does."""
    model = model_path.load(served.model)()
    model.predict_step(_zeros(served))  # Builds what has no shapes of its own.
    load(model, str(served.weights))
    return model


def _zeros(served: Served) -> Any:
    spec = batch_spec(served.schema)
    return tf.nest.map_structure(lambda s: tf.zeros((1, *s.shape[1:]), s.dtype), spec)


class Handler:
    """A model with its weights.

    Args:
        served: what is served.
        max_rows: most rows of one forward pass, >= 1.
        strategy: that which divides the model.
        options: of the strategy.

    Raises:
        TfdistError: the model or its weights are not what they must be.
    """

    def __init__(self, served: Served, max_rows: int, strategy: str, options: Mapping[str, Any]):
        self._max_rows = max_rows
        # Before TensorFlow is first used, and until this process ends: its devices are the model's.
        divides = None if strategy == "single" else tfdist.strategy(strategy, **options).__enter__()
        zeros, decode = _zeros(served), make_decoder(served.schema, None)
        if divides is None:
            self._model = trained(served)
            outputs = self._model.predict_step(zeros)
            # One graph of all: a small model takes less than to call a second one.
            self._predict = _graph(lambda records: self._model.predict_step(decode(records)))
            # Optimized here, and not while somebody waits; what takes no rows, when they come.
            with contextlib.suppress(tf.errors.OpError):
                self._predict(tf.constant([], tf.string))
        else:
            self._model = divides.build(model_path.load(served.model))
            build_now(self._model, _arrays(zeros))
            load(self._model, str(served.weights))
            self._decode = _graph(decode)
            self._predict = self._predict_divided
            outputs = self._model.predict(_arrays(zeros), self._max_rows, verbose=0)
        #: Output -> shape of a row, and dtype.
        self.outputs = {
            name: (list(rows.shape[1:]), rows.dtype.name)
            for name, rows in self._outputs(outputs).items()
        }

    def predict(self, requests: Sequence[Sequence[bytes]]) -> list[Answer]:
        """Returns the rows of each request, by output; all are predicted together.

        Args:
            requests: the records of each, as ``records_of`` returns them.
        """
        try:
            together = self._rows([record for records in requests for record in records])
        except _REFUSALS:  # Of one of them: a photo that is cut off, an id that is unknown.
            return [self._alone(records) for records in requests]
        ends = np.cumsum([len(records) for records in requests])[:-1]
        parts = {name: np.split(rows, ends) for name, rows in together.items()}
        return [{n: part[place] for n, part in parts.items()} for place in range(len(requests))]

    def _alone(self, records: Sequence[bytes]) -> Answer:
        try:
            return self._rows(records)
        except _REFUSALS as error:
            told = error  # That of a divided model's own loop has been explained.
            if not isinstance(error, DataError):
                told = explain_value_error(error, self._model)
            if told is None:
                text = "an instance must be one that can be decoded, as a whole photo"
                return InstanceError(f"{text}, and that the model takes")
            return InstanceError(f"{told.rule}, but found {told.received}")

    def _rows(self, records: Sequence[bytes]) -> dict[str, np.ndarray]:
        pieces = []
        for piece in np.array_split(
            np.array(records, object), math.ceil(len(records) / self._max_rows)
        ):
            pieces.append(self._outputs(self._predict(tf.constant(piece))))
        return {name: np.concatenate([p[name] for p in pieces]) for name in pieces[0]}

    def _predict_divided(self, records: Any) -> Any:
        """Returns what the loop of ``tfdist predict`` does, which fills microbatches and shares."""
        batch = _arrays(self._decode(records))
        return self._model.predict(batch, batch_size=self._max_rows, verbose=0)

    def _outputs(self, found: Any) -> dict[str, np.ndarray]:
        return named_outputs(self._model, _arrays(found))


def _graph(function: Callable[[Any], Any]) -> Any:
    """Returns a function of serialised records, traced for any number of them."""
    spec = tf.TensorSpec((None,), tf.string)
    return tf.function(function, input_signature=[spec], autograph=False).get_concrete_function()


def _arrays(tensors: Any) -> Any:
    return tf.nest.map_structure(np.asarray, tensors)
